"""What the hardware does: devices, links and clusters, from a catalog or from measurement."""
