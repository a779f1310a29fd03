"""The samples of a step through the dataset: shapes and values, texts, and images as PNG files."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_cli.files import replace as replace_file
from trainer_cli.leaves import walk

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
            yield f"{label}{_of_array(torch.as_tensor(leaf))}"
        else:
            text = repr(leaf)
            yield f"{label}{text if len(text) <= _MOST_LETTERS else text[:_MOST_LETTERS] + '…'}"


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value)


def count_not_finite(value: Any) -> dict[str, int]:
    """Name -> number of values that are NaN or infinite, of each tensor, array and number of a sample that has any."""
    counts: dict[str, int] = {}
    for name, leaf in walk(value):
        if isinstance(leaf, torch.Tensor | np.ndarray | np.floating | float):
            tensor = torch.as_tensor(leaf)
            if count := tensor.numel() - int(tensor.isfinite().sum()):
                counts[name] = count
    return counts


def find_integer_ranges(value: Any) -> dict[str, tuple[int, int]]:
    """Name -> the least and the largest value of each integer, and tensor or array of integers, of a sample."""
    ranges: dict[str, tuple[int, int]] = {}
    for name, leaf in walk(value):
        if isinstance(leaf, torch.Tensor | np.ndarray | np.integer | int) and not isinstance(leaf, bool):
            tensor = torch.as_tensor(leaf)
            if tensor.numel() and tensor.dtype in _INTEGERS:
                ranges[name] = int(tensor.min()), int(tensor.max())
    return ranges


def _of_array(tensor: torch.Tensor) -> str:
    tensor = tensor.detach().cpu()
    description = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if tensor.numel() <= _MOST_VALUES:
        return f"{description} {tensor.tolist()}"
    if tensor.is_complex():
        return description
    values = tensor.double()
    finite = values[values.isfinite()]
    facts = [f"from {finite.min().item():.4g} to {finite.max().item():.4g}, mean {finite.mean().item():.4g}"] * bool(
        finite.numel()
    )
    if count := values.numel() - finite.numel():
        facts.append(f"{count:,} not finite")
    return f"{description} {', '.join(facts)}"


def save_images(value: Any, folder: Path, name: str) -> Iterator[Path]:
    """Write each image in a sample as a PNG file, and yield its path.

    An image is a PIL image, or an array of (1 or 3, height, width), or of (height, width, 3) bytes. Numbers from 0 to 1
    are taken as shares of white, others are stretched from the smallest to the largest.
    """
    images = (image for _, leaf in walk(value) if (image := _image_of(leaf)) is not None)
    for number, pixels in enumerate(images):
        path = folder / f"{name}{f'-{number}' if number else ''}.png"
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, [_png(pixels)])
        yield path


def _image_of(value: Any) -> np.ndarray[Any, Any] | None:
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
    return array.astype(np.uint8) if is_bytes else _as_bytes(array)


def _as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = np.nan_to_num(array.astype(np.float64))
    low, high = array.min(), array.max()
    if low < 0 or high > 1:
        array = (array - low) / max(high - low, 1e-12)
    return (array * 255).round().astype(np.uint8)


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG file of bytes (height, width, 1 or 3)."""
    height, width, channels = pixels.shape
    # Each row begins with the number of its filter: none.
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes())), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
