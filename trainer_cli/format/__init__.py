"""How a state becomes files, and files a state."""
