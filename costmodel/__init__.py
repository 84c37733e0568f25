"""What a choice costs: seconds and bytes of operators, collectives, memory and schedules."""
