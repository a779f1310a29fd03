"""Training with some weights held at zero: which, and when that changes."""
