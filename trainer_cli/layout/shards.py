"""Parts of tensors: their overlap, whether they make a whole, and which rank writes which tensor.

torch.distributed.checkpoint plans the same with objects that hold live tensors, and gathers the plans of all ranks for
every save. Here each rank computes its part of the plan alone; `commit` checks that nothing is missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import combinations, pairwise, product

from trainer_cli.terminal import format_count

PER_RANK = ("rng", "loop", "data")
"""Top-level keys of a state that every rank saves; everything else is saved once."""
# Without leading zeros each number has one spelling; 19 digits hold any below 2**63.
_RANGE = re.compile(r"(0|[1-9][0-9]{0,18}):(0|[1-9][0-9]{0,18})")
_TEXT = re.compile(r"\[([0-9:, ]*)\] of \[([0-9, ]*)\]")
_MAX_ELEMENTS = 2**63


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor: `shape` is that of the whole tensor; the box begins at `offsets` and has the shape `sizes`."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> Shard:
        """The whole tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read what `str` writes.

        Raises:
            ValueError: it is no box within a shape.
        """
        match = _TEXT.fullmatch(text)
        # The part of a scalar is `[] of []`.
        ranges = [] if match is None or not match[1] else [_RANGE.fullmatch(span) for span in match[1].split(", ")]
        sizes = [] if match is None or not match[2] else match[2].split(", ")
        are_numbers = None not in ranges and all(map(str.isdecimal, sizes))
        if match is None or not are_numbers or len(ranges) != len(sizes):
            raise ValueError(f"{text[:80]!r} is not a part of a tensor")
        shape = tuple(map(int, sizes))
        spans = [(int(span[1]), int(span[2])) for span in ranges if span is not None]
        shard = cls(shape, tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))
        is_inside = all(begin <= end <= size for (begin, end), size in zip(spans, shape, strict=True))
        # Sides of 0 do not count: a hostile [0, 2**62, 9] has no elements, but overflows when it is allocated.
        is_too_large = math.prod(size for size in shape if size) >= _MAX_ELEMENTS
        # Compared with its own text, so that each part has one spelling.
        if not is_inside or is_too_large or str(shard) != text:
            raise ValueError(f"{text[:80]!r} is not a part of a tensor")
        return shard

    def __str__(self) -> str:
        """Python's slices, such as `[4:8, 0:2] of [8, 2]`."""
        ranges = (f"{begin}:{begin + size}" for begin, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(ranges)}] of {list(self.shape)}"

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.sizes == self.shape

    def runs(self, target: Shard) -> Iterator[tuple[int, int, int]]:
        """The elements that this part and the `target` have in common, as runs of consecutive elements.

        A run is (offset in this part, offset in the target, count). Both parts are stored in C order, and the runs are
        in the order of this part.

        Raises:
            ValueError: they are parts of tensors of different shapes.
        """
        if self.shape != target.shape:
            raise ValueError(f"{self} and {target} are parts of different tensors")
        boxes = zip(self.offsets, self.sizes, target.offsets, target.sizes, strict=True)
        begins, sizes = [], []
        for source_offset, source_size, target_offset, target_size in boxes:
            begins.append(max(source_offset, target_offset))
            sizes.append(min(source_offset + source_size, target_offset + target_size) - begins[-1])
            # Without an overlap in one dimension there is none at all.
            if sizes[-1] <= 0:
                return
        # Inner dimensions that both parts have completely form one run, together with the next outer dimension.
        inner = len(sizes)
        while inner > 0 and sizes[inner - 1] == self.sizes[inner - 1] == target.sizes[inner - 1]:
            inner -= 1
        outer = max(inner - 1, 0)
        count = math.prod(sizes[outer:])
        for steps in product(*(range(size) for size in sizes[:outer])):
            index = [begin + step for begin, step in zip(begins[:outer], steps, strict=True)] + begins[outer:]
            yield _offset_in(self, index), _offset_in(target, index), count

    @staticmethod
    def why_incomplete(parts: Iterable[Shard]) -> str | None:
        """Why parts do not make one whole tensor, each element in one part; None if they do. Equal parts are copies."""
        # Ranks of a replicated group write equal parts; a dict removes them in order.
        boxes = list(dict.fromkeys(parts))
        if len(shapes := {box.shape for box in boxes}) != 1:
            return f"its parts are of {len(shapes)} different shapes"
        count, total = sum(box.count for box in boxes), math.prod(boxes[0].shape)
        if count < total:
            return f"its parts have {count:,} of its {format_count(total, 'element')}"
        # The grid first: comparing all pairs is quadratic in the number of parts.
        if count == total and _is_grid(boxes):
            return None
        overlap = count > total or any(list(first.runs(second)) for first, second in combinations(boxes, 2))
        return "its parts overlap" if overlap else None


def _offset_in(shard: Shard, index: Sequence[int]) -> int:
    """Offset within a part, in C order, of the element with this index in the whole tensor."""
    offset = 0
    for coordinate, begin, size in zip(index, shard.offsets, shard.sizes, strict=True):
        offset = offset * size + coordinate - begin
    return offset


def _is_grid(boxes: Sequence[Shard]) -> bool:
    """Whether each box is one cell of the grid of all borders, so that different boxes do not overlap."""
    for dimension in range(len(boxes[0].shape)):
        ranges = {(box.offsets[dimension], box.offsets[dimension] + box.sizes[dimension]) for box in boxes}
        # Ranges of one dimension that overlap are no cells of a grid.
        if any(end > begin for (_, end), (begin, _) in pairwise(sorted(ranges))):
            return False
    return True


def spread(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[str, int]:
    """Assign each tensor to one of the ranks, all of which have it, for writing: name -> rank.

    The largest tensor comes first, and each goes to the rank with the fewest bytes so far. The same arguments give the
    same result on every rank.

    Args:
        sizes: name -> size in bytes.
    """
    # Ties go to the lower rank, so that the order of `ranks` does not matter.
    bytes_by_rank = [(0, rank) for rank in sorted(ranks)]  # A sorted list is a heap.
    writer: dict[str, int] = {}
    # The sort is stable: tensors of one size keep the order of the state, which every rank has.
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rank_bytes, writer[name] = bytes_by_rank[0]
        heapreplace(bytes_by_rank, (rank_bytes + sizes[name], writer[name]))
    return writer
