"""Continue a text: python generate.py WEIGHTS TEXT."""

import sys

import torch
from characters import Text
from transformer import Transformer

weights, text = sys.argv[1:]
data = Text()
model = Transformer(data.vocabulary, data.context)
model.load_state_dict(torch.load(weights, weights_only=True))
model.eval()
tokens = torch.tensor([list(text.encode("ascii", "replace"))])
print("".join(map(chr, model.generate(tokens, 200)[0].tolist())))
