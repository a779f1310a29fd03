"""Proof that a training is exact: replay, samples of a step, bisect, diverge, and the check of a resume."""
