"""Commands, their flags, and what they show meanwhile."""

from meshwright.shell.progress import Progress, progress_shown
