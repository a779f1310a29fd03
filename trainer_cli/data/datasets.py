"""Datasets for configs: `Datasets` joins any datasets by name, and `Digits` are handwritten digits of this package.

The 1,797 grey images of 8x8 are in digits.npz; digits.txt names their source and licence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trainer_cli.data.order import sample_indices
from trainer_cli.errors import UserError


class Datasets:
    """A dataset for training, for validation one dataset or a mapping of names to datasets, and one for `train predict`
    alone."""

    def __init__(self, train: Any, val: Any | Mapping[str, Any] | None = None, predict: Any = None) -> None:
        self.train, self.val, self.predict = train, val, predict


_FILE = Path(__file__).with_name("digits.npz")
_DARKEST = 16


class Digits:
    """Handwritten digits, split into `train` and a held-out `val`.

    With `augment` each training image is shifted, turned and scaled at random each time it is read. The split depends
    on `seed` and `val_fraction` alone, and not on the seed of the training.
    """

    def __init__(self, augment: bool = True, val_fraction: float = 0.2, seed: int = 0) -> None:
        with np.load(_FILE, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
        held_out = round(len(images) * val_fraction)
        if not 1 <= held_out < len(images):
            raise UserError(
                f"data.val_fraction is {val_fraction}, which leaves nothing to train on or to evaluate",
                where="data.val_fraction",
                cure="Use a number between 0 and 1.",
            )
        # Not torch's generator: the split must be the same whatever version of torch permutes.
        order = sample_indices(seed, 0, 0, len(images), len(images))
        self.val = DigitImages(images[order[:held_out]], labels[order[:held_out]], augment=False)
        self.train = DigitImages(images[order[held_out:]], labels[order[held_out:]], augment=augment)


class DigitImages:
    """Samples of (image (1, 8, 8) of floats from 0 to 1, label)."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, *, augment: bool) -> None:
        self.fingerprint = blake2b(images.tobytes() + labels.tobytes(), digest_size=16).hexdigest()
        self.deterministic = not augment
        self._images = torch.from_numpy(images).float().div_(_DARKEST).unsqueeze(1)
        self._labels: list[int] = labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self._images[index]
        return (image if self.deterministic else distort(image)), self._labels[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Many samples at once, as torch's loaders ask for them."""
        return [self[index] for index in indices]


def distort(image: Tensor, *, degrees: float = 12.0, pixels: float = 0.7, zoom: float = 0.1) -> Tensor:
    """Turn, shift and scale a (channels, height, width) image by random amounts up to these."""
    # From torch's generator, which the loader has seeded for this sample.
    turn, right, down, scale = (torch.rand(4) * 2 - 1).tolist()
    angle, scale = math.radians(degrees) * turn, 1 + zoom * scale
    cos, sin = math.cos(angle) * scale, math.sin(angle) * scale
    step = 2 * pixels / image.shape[-1]
    theta = torch.tensor([[[cos, -sin, step * right], [sin, cos, step * down]]])
    grid = functional.affine_grid(theta, [1, *image.shape], align_corners=False)
    return functional.grid_sample(image.unsqueeze(0), grid, align_corners=False)[0]
