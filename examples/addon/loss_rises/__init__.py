"""An add-on of trainer-cli: where the loss of a run rose."""
