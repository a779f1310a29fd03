"""A language model of characters by an LSTM, whose hidden state is carried from batch to batch."""

import pydoc_data.topics
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from trainer_cli import Callback, Trainer


class Columns(Dataset[tuple[Tensor, Tensor]]):
    """The text in `columns` equal parts: sample t * columns + c is the t-th window of part c, so that in order, in
    batches of `columns`, each row of a batch continues that row of the batch before."""

    def __init__(self, tokens: Tensor, columns: int, window: int) -> None:
        self.parts = tokens[: len(tokens) // columns * columns].view(columns, -1)
        self.window = window

    def __len__(self) -> int:
        return (self.parts.shape[1] - 1) // self.window * len(self.parts)

    def sample_keys(self, seed: int, epoch: int, start: int, stop: int) -> range:
        """The samples at the positions from `start` to `stop`: in order, in every epoch."""
        return range(start, stop)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        turn, column = divmod(index, len(self.parts))
        part, start = self.parts[column], turn * self.window
        return part[start : start + self.window], part[start + 1 : start + self.window + 1]


class Text:
    """What `data` of the config makes: the help texts of Python, of which one tenth is for evaluation."""

    def __init__(self, columns: int = 16, window: int = 32) -> None:
        text = "\n".join(pydoc_data.topics.topics.values())
        tokens = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()
        split = len(tokens) * 9 // 10
        self.train, self.val = (Columns(part, columns, window) for part in (tokens[:split], tokens[split:]))


class LSTM(nn.Module):
    """The hidden state is a buffer: a checkpoint holds it, so a resumed run goes on with it."""

    def __init__(self, columns: int = 16, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, 128)
        self.register_buffer("hidden", torch.zeros(2, layers, columns, width))

    def forward(self, batch: list[Tensor]) -> dict[str, Tensor]:
        tokens, following = batch
        output, hidden = self.lstm(self.embedding(tokens), (self.hidden[0], self.hidden[1]))
        self.hidden = torch.stack(hidden).detach()
        loss = cross_entropy(self.head(output).flatten(0, 1), following.flatten())
        return {"loss": loss, "perplexity": loss.detach().exp()}


class ResetHidden(Callback):
    """Begins each epoch and each evaluation with a hidden state of zeros; an evaluation leaves the training's as is."""

    def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            trainer.model.hidden.zero_()

    def on_enter_validate(self, trainer: Trainer, stack: ExitStack, val_loader: Any, loop: Any) -> None:
        stack.callback(setattr, trainer.model, "hidden", trainer.model.hidden)
        trainer.model.hidden = torch.zeros_like(trainer.model.hidden)
