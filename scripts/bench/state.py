"""Training states to save and load: a GPT-2's shapes with two moments, or so many bytes in so many tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from settings import Settings

Tree = dict[str, dict[str, Tensor]]
VOCABULARY, CONTEXT = 32_768, 64


def gpt_shapes(layers: int = 12, width: int = 768, vocabulary: int = VOCABULARY) -> dict[str, tuple[int, ...]]:
    """Of each parameter; 110 million numbers as called without arguments."""
    shapes: dict[str, tuple[int, ...]] = {"tokens": (vocabulary, width), "positions": (CONTEXT, width)}
    for layer in range(layers):
        for name, shape in {
            "norm_1": (width,), "qkv": (3 * width, width), "out": (width, width),
            "norm_2": (width,), "up": (4 * width, width), "down": (width, 4 * width),
        }.items():  # fmt: skip
            shapes[f"blocks.{layer}.{name}"] = shape
    return {**shapes, "norm": (width,)}


def gpt_state(settings: Settings) -> Tree:
    """Weights with AdamW's two moments: 1.32 GB, 60 MB or 200 kB."""
    shapes = gpt_shapes(*settings.pick(smoke=(1, 32, 64), quick=(4, 256, 8_192), whole=(12, 768, VOCABULARY)))
    parts = ("model", "exp_avg", "exp_avg_sq")
    return {part: {name: filled(shape) for name, shape in shapes.items()} for part in parts}


def even_state(size_bytes: int, tensors: int) -> Tree:
    """So many float32 tensors of one size."""
    return {"model": {f"tensor{number}": filled((size_bytes // tensors // 4,)) for number in range(tensors)}}


def filled(shape: tuple[int, ...]) -> Tensor:
    """Random numbers, the same ones again and again: nothing here compresses, so quickly made is good enough."""
    block = torch.rand(65_537)
    tensor = torch.empty(shape)
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), len(block)):
        part = flat[start : start + len(block)]
        part.copy_(block[: len(part)])
    return tensor


def flat(tree: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One mapping with names such as `model/norm`."""
    return {f"{part}/{name}": tensor for part, own in tree.items() for name, tensor in own.items()}


def size_bytes(tree: Mapping[str, Mapping[str, Tensor]]) -> int:
    return sum(tensor.nbytes for tensor in flat(tree).values())
