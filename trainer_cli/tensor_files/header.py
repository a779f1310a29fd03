"""The header of a tensor file, which is padded safetensors. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trainer_cli.errors import UserError
from trainer_cli.strict_json import unique_keys
from trainer_cli.terminal import format_count

ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
"""Size of each element type, by its name in safetensors."""
ALIGNMENT = 4096
"""The first tensor begins at a multiple of this, so that tensors can be written past the page cache from memory."""
LINE = 64
"""Size of a cache line in bytes. Tensors begin at a multiple of it where possible, as torch's own do."""
_LONGEST_HEADER = 100_000_000
_MOST_DIMENSIONS = 64
_LARGEST = 2**63


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    code: str
    shape: tuple[int, ...]
    size_bytes: int


def render_header(layout: Iterable[TensorEntry]) -> bytes:
    """The header of a file with these tensors, in this order."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in layout:
        end = offset + entry.size_bytes
        fields[entry.name] = {"dtype": entry.code, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    # safetensors accepts spaces after the JSON; 8 bytes of length precede it.
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    if len(text) > _LONGEST_HEADER:
        raise UserError(f"the state has {format_count(len(fields), 'tensor')}, more than one file can name")
    return len(text).to_bytes(8, "little") + text


def read_entries(take: Callable[[int], bytes], file_bytes: int) -> list[TensorEntry]:
    """The tensors of any safetensors file, in its order.

    Args:
        take: returns the next bytes of the file.
        file_bytes: the size of the whole file.

    Raises:
        ValueError: the header is malformed, or its tensors do not fill the file exactly.
    """
    if file_bytes < 8:
        raise ValueError("it is too short for a header")
    length = int.from_bytes(take(8), "little")
    # Before it is read: the length of a damaged file may be any number.
    if length > min(_LONGEST_HEADER, file_bytes - 8):
        raise ValueError("its header is longer than the file")
    try:
        fields = json.loads(take(length).decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON: {str(error)[:120]}") from None
    if not isinstance(fields, dict):
        raise ValueError("its header is not a JSON object")
    fields.pop("__metadata__", None)
    # In the order of the bytes, which may differ from the order in the JSON.
    located = sorted((_parse_entry(name, raw) for name, raw in fields.items()), key=lambda entry: entry[:2])
    offset = 0
    for begin, end, entry in located:
        if begin != offset:
            raise ValueError(f"{entry.name[:80]!r} does not begin where the tensor before it ends")
        offset = end
    if offset != file_bytes - 8 - length:
        raise ValueError("its tensors do not fill it")
    return [entry for _, _, entry in located]


def _parse_entry(name: str, raw: object) -> tuple[int, int, TensorEntry]:
    """The begin, the end and the description of a tensor, from its field of the header."""
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name[:80]!r} is not described by dtype, shape and offsets")
    code, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(code, str) or code not in ELEMENT_BYTES:
        raise ValueError(f"{name[:80]!r} has an unknown dtype")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{name[:80]!r} has an invalid shape or offset")
    size_bytes = math.prod(shape) * ELEMENT_BYTES[code]
    # Zeros are left out: torch multiplies the sizes in 64 bits, also those of an empty tensor.
    if math.prod(size for size in shape if size) >= _LARGEST or offsets[1] - offsets[0] != size_bytes:
        raise ValueError(f"{name[:80]!r} has a shape that does not fit its offsets")
    return offsets[0], offsets[1], TensorEntry(name, code, tuple(shape), size_bytes)


def _are_sizes(raw: object) -> bool:
    """Whether a value of the JSON is a list of integers from 0 to 2**63 - 1."""
    return isinstance(raw, list) and all(type(size) is int and 0 <= size < _LARGEST for size in raw)
