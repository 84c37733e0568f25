"""A module for each command, of its name: its flags (`add_arguments`), and its answer (`run`).

What takes long to import is imported where a command runs, so that `--help` answers at once.
"""
