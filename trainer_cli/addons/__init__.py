"""What a user can do without: each folder can be deleted, and everything else works."""
