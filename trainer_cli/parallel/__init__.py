"""How many processes train one model, and what each of them does with it."""
