"""Callbacks that look at a training and change nothing in it: profilers, tensors, samples, metrics.

Each is a public name of `trainer_cli` that a config gives in `callbacks`, and a module of its own here, so that one is
imported only where it is used. No other package takes a name from this one.
"""
