"""How many processes train one model: one, copies of it, or shards."""
