"""Hardware: devices, links, clusters, measurements."""

VERSION = "0.1.0"  # of all rooms; pyproject.toml reads it here
