"""From YAML and overrides to a checked config."""
