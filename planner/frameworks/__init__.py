"""Plans in the forms of other frameworks."""
