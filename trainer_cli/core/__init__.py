"""What is decided without torch, clock, disk, other processes or chance."""
