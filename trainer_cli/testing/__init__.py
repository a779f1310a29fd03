"""What tests can use: faults on demand, and proof that a resume is exact."""
