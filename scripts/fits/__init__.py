"""Fits of the catalog's constants to published steps."""
