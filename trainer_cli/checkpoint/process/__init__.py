"""Where slow work is done: here and now, or behind the training."""
