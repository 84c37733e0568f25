"""What to do, and why: the search for the fastest plan that fits, and its account of itself."""
