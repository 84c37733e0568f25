"""Malformed inputs by family, and the pool that runs each in a process with limits."""
