"""`propose.py FILE TRIALS`: edit a copy of the best file, and print the idea. An agent with a model does the same."""

import sys
from pathlib import Path

IDEAS = [
    ("a wide layer", "WIDTH = 8", "WIDTH = 64"),
    ("a mistake", "torch.relu", "torch.rely"),
    ("a narrow layer", "WIDTH = 64", "WIDTH = 2"),
]

file, trials = map(Path, sys.argv[1:])
idea, before, after = IDEAS[len(list(trials.glob("[0-9]*"))) - 1]
file.write_text(file.read_text().replace(before, after))
print(idea)
