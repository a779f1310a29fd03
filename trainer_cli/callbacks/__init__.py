"""The callbacks of this package, one per file."""
