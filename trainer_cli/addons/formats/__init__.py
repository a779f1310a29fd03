"""Other formats of checkpoints, and those that other programs wrote."""
