"""What to do, and why."""
