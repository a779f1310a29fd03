"""Tensors that view the same memory: which are stored as views of another tensor, and where they lie in it.

torch.save writes each storage once and whole. Here a stored tensor covers only memory that tensors of the state fill.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

STORAGE = "#storage"
"""Ends the name of a stored tensor that is no tensor of the state, but the memory that several of them view."""
_LARGEST = 2**63


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of a state as a view of a stored one. Lengths are in elements."""

    name: str
    base: str
    """The name of the stored tensor."""
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def parse(cls, raw: Any) -> View:
        """Read what `to_json` writes.

        Raises:
            ValueError: it is no view, or several of its elements are one in memory.
        """
        match raw:
            case [str(name), str(base), offset, [*shape], [*strides]] if len(shape) == len(strides):
                numbers: list[Any] = [offset, *shape, *strides]
                in_range = all(type(number) is int and 0 <= number < _LARGEST for number in numbers)
                view = cls(name, base, offset, tuple(shape), tuple(strides))
                if in_range and all(shape) and extent_of(view.shape, view.strides) is not None:
                    return view
        raise ValueError(f"{str(raw)[:80]} is no view of a tensor")

    def to_json(self) -> list[Any]:
        return [self.name, self.base, self.offset, list(self.shape), list(self.strides)]

    def check_fits(self, elements: int) -> None:
        """Raise ValueError if a stored tensor of so many elements does not contain the view."""
        if self.offset + (extent_of(self.shape, self.strides) or 0) > elements:
            raise ValueError(f"{self.name[:80]!r} lies outside of {self.base[:80]!r}")

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor in the memory of its base.

        Raises:
            ValueError: it lies outside.
        """
        self.check_fits(base.numel())
        flat = base.detach().reshape(-1)
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The elements in memory from a tensor's first to its last; None if several of its elements are one in memory."""
    extent = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride < extent:
            return None
        extent += (size - 1) * stride
    return extent


class _Placed(NamedTuple):
    """A tensor, and the elements of its storage between which it lies."""

    name: str
    tensor: torch.Tensor
    begin: int
    end: int

    @property
    def is_dense(self) -> bool:
        return self.end - self.begin == self.tensor.numel()

    @property
    def geometry(self) -> tuple[Any, ...]:
        return self.begin, self.tensor.shape, self.tensor.stride()


def find_views(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, View]]:
    """Tensors to store besides those of a state, and the tensors of the state that are views of stored ones, by name.

    Memory that tensors fill without gaps, of which at least two overlap, is stored once: as one of them that is
    contiguous and covers it, if there is one. Other tensors that lie within are views. Tensors with gaps that lie in no
    such memory are not views, since more than their own elements would have to be stored.

    Args:
        tensors: strided ones with elements.
    """
    of_storage: dict[tuple[int, torch.dtype], list[_Placed]] = {}
    for name, tensor in tensors.items():
        if (extent := extent_of(tensor.shape, tensor.stride())) is not None:
            begin = int(tensor.storage_offset())
            key = (tensor.untyped_storage()._cdata, tensor.dtype)
            of_storage.setdefault(key, []).append(_Placed(name, tensor, begin, begin + extent))
    bases: dict[str, torch.Tensor] = {}
    views: dict[str, View] = {}
    for placed in of_storage.values():
        for (begin, end), members in _regions(placed) if len(placed) > 1 else ():
            if len({member.geometry for member in members}) == 1:
                continue  # Tied tensors are aliases.
            covering = (m for m in members if (m.begin, m.end) == (begin, end) and m.tensor.is_contiguous())
            cover = next(covering, None)
            if cover is None:
                base = members[0].name + STORAGE
                while base in tensors:
                    base += "#"
                bases[base] = members[0].tensor.detach().as_strided((end - begin,), (1,), begin)
            else:
                base = cover.name
            for member in members:
                if cover is None or member.geometry != cover.geometry:
                    shape, strides = tuple(member.tensor.shape), tuple(member.tensor.stride())
                    views[member.name] = View(member.name, base, member.begin - begin, shape, strides)
    return bases, views


def _regions(placed: Iterable[_Placed]) -> Iterable[tuple[tuple[int, int], list[_Placed]]]:
    """The spans of a storage that overlapping dense tensors fill, each with the tensors that lie within."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted({(tensor.begin, tensor.end) for tensor in placed if tensor.is_dense}):
        if spans and begin < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((begin, end))
    members: dict[tuple[int, int], list[_Placed]] = {}
    for tensor in placed:
        index = bisect_right(spans, tensor.begin, key=lambda span: span[0]) - 1
        if index >= 0 and tensor.end <= spans[index][1]:
            members.setdefault(spans[index], []).append(tensor)
    return members.items()


def views_in(raw: object) -> Iterable[View]:
    """The views in the JSON of a state, which is tagged as by codec.py, in its order.

    Raises:
        ValueError: one is not what a save writes.
    """
    rest = [raw]
    while rest:
        value = rest.pop()
        if isinstance(value, dict) and value.get("$") == "view":
            yield View.parse(value.get("v"))
        elif isinstance(value, dict | list):
            rest.extend(reversed(list(value.values()) if isinstance(value, dict) else value))
