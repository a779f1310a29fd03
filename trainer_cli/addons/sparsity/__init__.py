"""Callbacks for sparse weights (`Static`, `GMP`, `SET`, `RigL`) and sparse gradients (`SelectiveGrad`).

A mask of ones and zeros of each sparse parameter decides which of its elements are used or trained. Which these are
depends on the config, the seed and the step alone, and the masks are part of the callback's saved state: a resume
continues with the same ones.

Begin with `sparsity.py`, which has what all share; `sparse_training.py` has how masks change. No other package takes a
name from this one.
"""
