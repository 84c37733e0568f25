"""What is exported, read by the software that it is for (`scripts/setup_exports`)."""
