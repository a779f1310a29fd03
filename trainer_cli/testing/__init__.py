"""What tests can use: faults on demand."""
