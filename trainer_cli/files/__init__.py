"""Durable files: replaced as a whole, locked, appended to, and named by a path or an address."""
