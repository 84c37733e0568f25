"""Doing it: a plan lowered to this rank's local graphs, and the runtime that trains with them."""
