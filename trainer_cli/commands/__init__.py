"""The verbs of the command `train`, one file each."""
