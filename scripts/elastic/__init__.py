"""Runs that lose hosts and get them back: `python -m scripts.elastic.trials`."""
