"""Masks of weights: tensors of ones and zeros, shaped and typed as their parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_cli.checkpoint.format.dtensor import Target, is_dtensor, local_of, part_of


def put(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor; of plain values into a sharded one this rank's part."""
    if is_dtensor(tensor) and not is_dtensor(values):
        values = Target(tensor, part_of("mask", tensor).shard).narrowed(values)
    local_of(tensor).copy_(local_of(values))


def largest(scores: Tensor, count: int) -> Tensor:
    """A mask of the `count` largest scores."""
    mask = torch.zeros_like(scores)
    mask.view(-1)[torch.topk(scores.reshape(-1), count).indices] = 1
    return mask


def random_scores(like: Tensor, seed: int) -> Tensor:
    """Random numbers from 0 to 1 for each weight, that depend on the seed and the type of device alone."""
    generator = torch.Generator(like.device).manual_seed(seed % 2**63)
    return torch.rand(like.shape, generator=generator, device=like.device)


def replaced(mask: Tensor, weight: Tensor, growth: Tensor, drop: int, grow: int, active: int) -> Tensor:
    """A mask without the `drop` smallest of the `active` weights, and with `grow` others that have the largest growth
    scores (of at least 0). Weights just dropped may grow again, as in RigL.
    """
    held = largest(torch.where(mask > 0, weight.abs().float(), -1.0), active - drop)
    return (held + largest(torch.where(held > 0, -1.0, growth.float()), grow)).to(mask.dtype)
