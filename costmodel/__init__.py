"""Seconds and bytes of a choice."""
