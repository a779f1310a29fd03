"""The sections of the config as dataclasses, with the rules of each value."""
