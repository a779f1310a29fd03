"""A small BERT (Devlin et al., 2019) of transformers that tells two kinds of sentences apart, whole or by LoRA."""

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

WORDS, LENGTH = 50, 12


def make(dropout: float = 0.1) -> BertForSequenceClassification:
    """New weights, so that nothing is downloaded. Yours: {_target_: transformers.…from_pretrained, …}."""
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForSequenceClassification(config)


class Sentences(Dataset[dict[str, Tensor]]):
    """Of the first kind are those with more even words than odd ones."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(self.first + index))
        return {"input_ids": words, "labels": ((words % 2).sum() < LENGTH / 2).long()}


class Data:
    def __init__(self, count: int = 2000) -> None:
        self.train, self.val = Sentences(0, count), Sentences(count, 300)
