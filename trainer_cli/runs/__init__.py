"""What a run directory is and does: created, resumed, trained in, watched and read."""
