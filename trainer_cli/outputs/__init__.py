"""What a model is called with, and what its outputs mean: loss, metrics, sums and samples."""
