"""Tells somebody what happens to a run: its end, a failure, a step that does not end, a loss that jumps.

Each part is reached by `addon.py`. No other package takes a name from this one.
"""
