"""Hardware: devices, links, clusters, measurements."""
