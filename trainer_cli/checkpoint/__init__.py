"""Checkpoints: when, what, where, and what may go."""
