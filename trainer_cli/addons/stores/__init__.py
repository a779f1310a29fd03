"""Checkpoints elsewhere: object stores, web servers and copies."""
