"""The training loop and what it counts."""
