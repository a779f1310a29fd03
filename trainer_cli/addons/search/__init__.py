"""Searches: trials of a sweep that are drawn from a space, by chance or by Optuna.

A draw is a function of the space, the seed and the trials before it. The same command therefore draws the same trials,
and one with more trials adds to them.

Begin with `draws.py`. No other package takes a name from this one: the add-on `jobs` asks for its parts.
"""
