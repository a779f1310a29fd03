"""Callbacks that look at a training: profilers, tensors, the machine, samples."""
