"""Training with sparse weights."""
