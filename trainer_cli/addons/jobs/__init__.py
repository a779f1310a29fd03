"""Many trainings: sweeps, submitted jobs, restarts, and processes that are launched here."""
