"""Where checkpoints live: folders on a disk."""
