"""Values that are measured before the training: the batch size and the learning rate."""
