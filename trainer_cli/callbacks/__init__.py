"""Callbacks that ship, one a file."""
