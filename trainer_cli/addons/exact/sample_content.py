"""The samples of a step through the dataset: shapes and values, texts, and images as PNG files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_cli.files import replace as replace_file
from trainer_cli.leaves import walk
from trainer_cli.png import encode_png
from trainer_cli.terminal import format_first

_MOST_VALUES = 12
"""Elements of a tensor that are shown as they are; of a larger one, the range and the mean."""
_MOST_LETTERS = 2000
_LEAST_SIDE = 4
"""Smaller arrays are no images."""
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def describe_content(value: Any, name: str = "") -> Iterator[str]:
    """A line for each tensor, number and text of a sample."""
    for inner, leaf in walk(value, name, _is_numbers):
        label = f"{inner}: " if inner else ""
        if isinstance(leaf, torch.Tensor | np.ndarray):
            yield f"{label}{_describe_array(torch.as_tensor(leaf))}"
        else:
            text = repr(leaf)
            yield f"{label}{text if len(text) <= _MOST_LETTERS else text[:_MOST_LETTERS] + '…'}"


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value)


def look_at_numbers(value: Any) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """What a glance at the numbers, arrays and tensors of a sample shows.

    Returns the number of values that are NaN or infinite by name, where there are any, and the least and the largest
    value by name where they are integers.
    """
    not_finite: dict[str, int] = {}
    ranges: dict[str, tuple[int, int]] = {}
    for name, leaf in walk(value):
        if isinstance(leaf, bool) or not isinstance(leaf, torch.Tensor | np.ndarray | np.number | int | float):
            continue
        tensor = torch.as_tensor(leaf)
        if tensor.dtype in _INTEGERS and tensor.numel():
            ranges[name] = int(tensor.min()), int(tensor.max())
        elif count := tensor.numel() - int(tensor.isfinite().sum()):
            not_finite[name] = count
    return not_finite, ranges


def _describe_array(tensor: torch.Tensor) -> str:
    tensor = tensor.detach().cpu()
    description = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if tensor.numel() <= _MOST_VALUES:
        return f"{description} {tensor.tolist()}"
    if tensor.is_complex():
        return description
    values = tensor.double()
    finite = values[values.isfinite()]
    facts = []
    if finite.numel():
        facts.append(f"from {finite.min().item():.4g} to {finite.max().item():.4g}, mean {finite.mean().item():.4g}")
    if count := values.numel() - finite.numel():
        # In a batch, the first index is that of the sample.
        indices = sorted(set((~values.isfinite()).nonzero()[:, 0].tolist())) if values.ndim > 1 else []
        where = f", in {format_first([f'[{index}]' for index in indices])}" if indices else ""
        facts.append(f"{count:,} not finite{where}")
    return f"{description} {', '.join(facts)}"


def save_images(value: Any, folder: Path, name: str) -> Iterator[Path]:
    """Write each image in a sample as a PNG file, and yield its path.

    An image is a PIL image, or an array of (1 or 3, height, width), or of (height, width, 3) bytes. Numbers from 0 to 1
    are taken as shares of white, others are stretched from the smallest to the largest.
    """
    images = (image for _, leaf in walk(value) if (image := _read_image(leaf)) is not None)
    for number, pixels in enumerate(images):
        path = folder / f"{name}{f'-{number}' if number else ''}.png"
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, [encode_png(pixels)])
        yield path


def _read_image(value: Any) -> np.ndarray[Any, Any] | None:
    """An image as bytes (height, width, 1 or 3); None for what is none."""
    if callable(getattr(value, "convert", None)) and hasattr(value, "getbands"):
        # A PIL image; its package is not imported here.
        value = np.asarray(value.convert("RGB"))
    if not isinstance(value, torch.Tensor | np.ndarray):
        return None
    array = value.detach().cpu().float().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    is_bytes = value.dtype in (np.dtype(np.uint8), torch.uint8)
    if array.ndim != 3:
        return None
    if array.shape[0] in (1, 3) and min(array.shape[1:]) >= _LEAST_SIDE:
        array = array.transpose(1, 2, 0)
    elif not (is_bytes and array.shape[2] == 3 and min(array.shape[:2]) >= _LEAST_SIDE):
        return None
    return array.astype(np.uint8) if is_bytes else _scale_to_bytes(array)


def _scale_to_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = np.nan_to_num(array.astype(np.float64))
    low, high = array.min(), array.max()
    if low < 0 or high > 1:
        array = (array - low) / max(high - low, 1e-12)
    return (array * 255).round().astype(np.uint8)
