"""`meshwright selftest`: whether plans are right on this machine, and their prices near."""
