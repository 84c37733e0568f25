"""What the hardware does: devices, links, clusters, measurements."""
