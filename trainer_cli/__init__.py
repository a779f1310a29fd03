"""The command `train` and its library."""
