"""Doing it: a plan lowered and run on ranks."""
