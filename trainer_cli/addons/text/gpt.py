"""A decoder-only transformer after GPT-2 (Radford et al., 2019), as in nanoGPT, and the outputs of a classifier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100
"""Target of a position without a next token. It does not count in the loss."""


class GPT(nn.Module):
    """Learned positions, pre-norm blocks, and a head tied to the token embedding.

    A batch is (tokens (N, T), next tokens (N, T)), with T at most `context`, or a mapping of packed rows as
    `trainer_cli.Packing` makes them. In a packed row each token attends to earlier tokens of its segment alone.

    Args:
        fused_qkv: compute queries, keys and values by one matrix. With three, tensor parallelism divides heads too.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int = 64,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        bias: bool = False,
        fused_qkv: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width ({width}) must be a multiple of heads ({heads})")
        self.context, self.heads, self.fused_qkv = context, heads, fused_qkv
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, bias, fused_qkv) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocab_size, bias=False)
        # Tied before `_initialise`, which leaves the head out so that the shared weight is drawn once.
        self.head.weight = self.tokens.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Initialise as GPT-2: normal with 0.02, and smaller for the layers that add to the residual stream."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and module is not self.head:
                is_residual = name.endswith((".attention.out", ".mlp.out"))
                # The stream is a sum of 2 * layers outputs, whose variance shall not grow with the depth.
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers) if is_residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def tensor_parallel_plan(self, tensor_size: int) -> dict[str, str]:
        """Divide the perceptrons, and without `fused_qkv` also the heads of attention."""
        plan = {"blocks.*.mlp.hidden": "colwise", "blocks.*.mlp.out": "rowwise"}
        if self.fused_qkv:
            # Rows of queries, keys and values lie one after another, so a division by rows would not divide heads.
            return plan
        if self.heads % tensor_size:
            raise ValueError(f"model.heads is {self.heads}, which {tensor_size} processes cannot divide")
        return plan | {"blocks.*.attention.{query,key,value}": "colwise", "blocks.*.attention.out": "rowwise"}

    def logits(self, tokens: Tensor, segments: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """The (N, T, vocab_size) scores of each next token.

        Args:
            segments: (N, T) number of the segment of each token, for packed rows.
            positions: (N, T) position of each token in its segment.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"a sequence of {length} is longer than the model's context of {self.context}")
        # A slice instead of a lookup: the positions of windows are always the first ones.
        position_embedding = self.positions.weight[:length] if positions is None else self.positions(positions)
        mask = None
        if segments is not None:
            mask = (segments.unsqueeze(2) == segments.unsqueeze(1)).tril().unsqueeze(1)
        hidden = self.dropout(self.tokens(tokens) + position_embedding)
        for block in self.blocks:
            hidden = block(hidden, mask)
        scores: Tensor = self.head(self.norm(hidden))
        return scores

    def forward(self, batch: tuple[Tensor, Tensor] | Mapping[str, Any]) -> dict[str, Tensor | int]:
        """The mean cross-entropy of the next tokens in nats, their number, and in evaluation `accuracy`, `logits` and
        `labels`.

        In packed rows, positions without a target do not count. The number of targets is then also the batch's weight.
        """
        if isinstance(batch, Mapping):
            targets = batch["targets"]
            scores = self.logits(batch["tokens"], batch["segments"], batch["positions"])
            # The loader counts on the host. A sum here makes the host wait for the device.
            count = int(batch["count"]) if "count" in batch else int((targets != IGNORED).sum())
            outputs: dict[str, Tensor | int] = {"weight": count}
        else:
            tokens, targets = batch[0], batch[1]
            scores, count, outputs = self.logits(tokens), targets.numel(), {}
        outputs["loss"] = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        outputs["tokens"] = count
        if not self.training:
            with torch.no_grad():
                outputs["accuracy"] = (scores.argmax(dim=2) == targets).float().sum() / count
            outputs |= {"logits": scores, "labels": targets}
        return outputs


class Block(nn.Module):
    """Attention, then a perceptron, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool, fused_qkv: bool) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, heads, dropout, bias, fused_qkv)
        self.norm_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = Perceptron(width, dropout, bias)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = hidden + self.attention(self.norm_1(hidden), mask)
        mixed: Tensor = hidden + self.mlp(self.norm_2(hidden))
        return mixed


class Attention(nn.Module):
    """Causal self-attention with several heads. `mask` (N, 1, T, T) is True where a token attends to another."""

    def __init__(self, width: int, heads: int, dropout: float, bias: bool, fused_qkv: bool) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_dropout = dropout
        if fused_qkv:
            self.qkv = nn.Linear(width, 3 * width, bias=bias)
        else:
            self.query, self.key, self.value = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.out = nn.Linear(width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix (rows, length, width) values between positions: of each with earlier ones, or as `mask` says."""
        batch, length, _ = hidden.shape
        if hasattr(self, "qkv"):
            qkv = self.qkv(hidden).view(batch, length, 3, -1, self.head_width).permute(2, 0, 3, 1, 4)
            query, key, value = qkv.unbind(0)
        else:
            # -1, because with tensor parallelism each process has only some of the heads.
            query, key, value = (
                layer(hidden).view(batch, length, -1, self.head_width).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
        dropout = self.attention_dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
        output: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return output


class Perceptron(nn.Module):
    """A hidden layer of four times the width, with GELU."""

    def __init__(self, width: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, 4 * width, bias=bias)
        self.out = nn.Linear(4 * width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.out(functional.gelu(self.hidden(hidden))))
        return output
