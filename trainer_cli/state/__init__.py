"""What of a model and its optimizers is saved, and how it is loaded."""
