"""Optimizers, schedules of the learning rate and frozen parameters."""
