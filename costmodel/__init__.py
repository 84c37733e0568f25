"""What a choice costs, in seconds and bytes."""
