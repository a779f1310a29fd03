"""Data that ships, and the loader whose order can be resumed anywhere."""
