"""Decides when to save, what may go and when to stop, from plain facts, and simulates a run by it."""
