"""What commands take from the command line, and what they say meanwhile."""

from meshwright.shell.progress import Progress, progress_shown
