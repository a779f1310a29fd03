"""How a state becomes files."""
