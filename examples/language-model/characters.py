"""A text as windows of characters."""

import pydoc_data.topics
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Samples of (tokens, next tokens), both (context,)."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.tokens[start : start + self.context + 1]
        return window[:-1], window[1:]


class Text:
    """What `data` of the config makes: 128 tokens, one for each character of ASCII."""

    vocabulary = 128

    def __init__(self, path: str | None = None, context: int = 64) -> None:
        # By default the texts of `help("topics")`, about 700,000 characters that come with Python.
        text = Path(path).read_text() if path else "\n".join(pydoc_data.topics.topics.values())
        tokens = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()
        split = len(tokens) * 9 // 10
        self.context = context
        self.train, self.val = Windows(tokens[:split], context), Windows(tokens[split:], context)
