"""The story of one command."""
