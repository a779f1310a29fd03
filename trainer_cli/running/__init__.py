"""What the verbs do: start, resume, fit, plan and validate a run."""
