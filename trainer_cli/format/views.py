"""Tensors that share memory: find those that are stored as views of another tensor, and their positions in it.

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
"""Suffix of the name of a stored tensor that is not in the state, but is the memory that several tensors view."""
_LARGEST = 2**63


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of a state as a view of a stored tensor. Offset and strides are in elements."""

    name: str
    base: str
    """The name of the stored tensor."""
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def parse(cls, raw: Any) -> View:
        """Parse the output of `to_json`.

        Raises:
            ValueError: it is not a view, or two of its elements overlap in memory.
        """
        match raw:
            case [str(name), str(base), offset, [*shape], [*strides]] if len(shape) == len(strides):
                numbers: list[Any] = [offset, *shape, *strides]
                in_range = all(type(number) is int and 0 <= number < _LARGEST for number in numbers)
                view = cls(name, base, offset, tuple(shape), tuple(strides))
                if in_range and all(shape) and extent_of(view.shape, view.strides) is not None:
                    return view
        raise ValueError(f"{str(raw)[:80]} is not a view of a tensor")

    def to_json(self) -> list[Any]:
        """The fields as a list for JSON."""
        return [self.name, self.base, self.offset, list(self.shape), list(self.strides)]

    def check_fits(self, elements: int) -> None:
        """Raise ValueError if a stored tensor with this number of elements does not contain the view."""
        if self.offset + (extent_of(self.shape, self.strides) or 0) > elements:
            raise ValueError(f"{self.name[:80]!r} lies outside of {self.base[:80]!r}")

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor in the memory of its base.

        Raises:
            ValueError: it is outside of the base.
        """
        # as_strided accepts any position within the storage, which may be larger than the base.
        self.check_fits(base.numel())
        flat = base.detach().reshape(-1)
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Number of elements in memory from a tensor's first to its last; None if two of its elements overlap."""
    extent = 1
    # Sorted by stride, each dimension must step over all of the smaller ones; dimensions of size 1 never step.
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride < extent:
            return None
        extent += (size - 1) * stride
    return extent


class _Region(NamedTuple):
    """A tensor, and the range of elements of its storage that it spans."""

    name: str
    tensor: torch.Tensor
    begin: int
    end: int

    @property
    def is_dense(self) -> bool:
        """Whether the tensor fills the range without gaps."""
        return self.end - self.begin == self.tensor.numel()

    @property
    def geometry(self) -> tuple[Any, ...]:
        """The position of each element, equal for tied tensors."""
        return self.begin, self.tensor.shape, self.tensor.stride()


def find_views(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, View]]:
    """Tensors to store in addition to those of a state, and the tensors of the state that are stored as views, by name.

    Memory that overlapping tensors fill without gaps is stored once: as a contiguous tensor that covers it, if there is
    one, else as an additional tensor. Other tensors within this memory are views. A tensor with gaps outside of such
    memory is not a view, because more than its own elements would have to be stored.

    Args:
        tensors: strided tensors with elements.
    """
    # By type too: offsets count elements, and views of one memory with different types do not compare.
    of_storage: dict[tuple[int, torch.dtype], list[_Region]] = {}
    for name, tensor in tensors.items():
        if (extent := extent_of(tensor.shape, tensor.stride())) is not None:
            begin = int(tensor.storage_offset())
            key = (tensor.untyped_storage()._cdata, tensor.dtype)
            of_storage.setdefault(key, []).append(_Region(name, tensor, begin, begin + extent))
    bases: dict[str, torch.Tensor] = {}
    views: dict[str, View] = {}
    for regions in of_storage.values():
        for (begin, end), members in _filled_spans(regions) if len(regions) > 1 else ():
            if len({member.geometry for member in members}) == 1:
                continue  # Tied tensors are aliases.
            covering = (
                member
                for member in members
                if (member.begin, member.end) == (begin, end) and member.tensor.is_contiguous()
            )
            cover = next(covering, None)
            if cover is None:
                base = members[0].name + STORAGE
                # A user's name may have this suffix, and names must be unique.
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


def _filled_spans(regions: Iterable[_Region]) -> Iterable[tuple[tuple[int, int], list[_Region]]]:
    """The spans of a storage that overlapping dense tensors fill, each with the tensors within it."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted({(region.begin, region.end) for region in regions if region.is_dense}):
        if spans and begin < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((begin, end))
    members: dict[tuple[int, int], list[_Region]] = {}
    for region in regions:
        index = bisect_right(spans, region.begin, key=lambda span: span[0]) - 1
        if index >= 0 and region.end <= spans[index][1]:
            members.setdefault(spans[index], []).append(region)
    return members.items()


def views_in(raw: object) -> Iterable[View]:
    """The views in the JSON of a state with the tags of `tree.encode`, in its order.

    Raises:
        ValueError: a view is malformed.
    """
    # A stack instead of recursion: damaged JSON may be nested to any depth.
    pending = [raw]
    while pending:
        value = pending.pop()
        if isinstance(value, dict) and value.get("$") == "view":
            yield View.parse(value.get("v"))
        elif isinstance(value, dict | list):
            pending.extend(reversed(list(value.values()) if isinstance(value, dict) else value))
