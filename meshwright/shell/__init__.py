"""Input of commands from the command line, and their progress."""

from meshwright.shell.progress import Progress, progress_shown
