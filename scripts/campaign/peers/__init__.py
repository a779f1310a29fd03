"""What runs in the environment of the contenders: their trainings, and the trials of one of them."""
