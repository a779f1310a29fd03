"""The characters of Python's help texts for a GPT, as nanoGPT's train_shakespeare_char has those of Shakespeare."""

import torch
from lstm import Text as Columns
from torch import Tensor
from torch.utils.data import Dataset


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """Blocks at random places of the text, `count` an epoch; torch is seeded for each sample."""

    def __init__(self, tokens: Tensor, block: int, count: int) -> None:
        self.tokens, self.block, self.count = tokens, block, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(torch.randint(len(self.tokens) - self.block - 1, ()))
        window = self.tokens[start : start + self.block + 1]
        return window[:-1], window[1:]


class Text:
    """What `data` of the config makes."""

    vocab_size = 128

    def __init__(self, block: int = 32) -> None:
        text, self.context = Columns(), block
        self.train = Blocks(text.train.parts.flatten(), block, 4000)
        self.val = Blocks(text.val.parts.flatten(), block, 400)
