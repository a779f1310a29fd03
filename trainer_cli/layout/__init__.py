"""How the files of checkpoints and runs are called, and which part of a state each of them holds."""
