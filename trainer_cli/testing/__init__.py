"""The earlier place of what tests can use: take it from `trainer_cli` itself."""
