"""Predictions of a model for every sample of a dataset, written to files."""
