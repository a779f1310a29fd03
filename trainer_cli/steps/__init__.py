"""How a training counts: steps, epochs, intervals, and how batches are divided."""
