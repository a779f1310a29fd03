"""Text as data: documents, tokens, mixtures, and the models for them."""
