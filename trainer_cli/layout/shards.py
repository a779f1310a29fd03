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
_LARGEST = 2**63


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
        ranges = [] if match is None or not match[1] else [_RANGE.fullmatch(span) for span in match[1].split(", ")]
        sizes = [] if match is None or not match[2] else match[2].split(", ")
        if match is None or None in ranges or len(ranges) != len(sizes) or not all(map(str.isdecimal, sizes)):
            raise ValueError(f"{text[:80]!r} is not a part of a tensor")
        shape = tuple(map(int, sizes))
        spans = [(int(span[1]), int(span[2])) for span in ranges if span is not None]
        shard = cls(shape, tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))
        is_inside = all(begin <= end <= size for (begin, end), size in zip(spans, shape, strict=True))
        # Compared with its own text, so that each part has one spelling.
        # Sides of 0 do not count: a hostile [0, 2**62, 9] has no elements, but overflows when it is allocated.
        if not is_inside or math.prod(size for size in shape if size) >= _LARGEST or str(shard) != text:
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
        """The elements that two parts of one tensor have in common, as runs (offset in this part, offset in the other,
        count) in the order of this part. Both are stored in C order.

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
            at = [begin + step for begin, step in zip(begins[:outer], steps, strict=True)] + begins[outer:]
            yield _offset_in(self, at), _offset_in(target, at), count

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
        if count > total or (
            not _is_grid(boxes) and any(list(one.runs(other)) for one, other in combinations(boxes, 2))
        ):
            return "its parts overlap"
        return None


def _offset_in(shard: Shard, at: Sequence[int]) -> int:
    """Offset within a part, in C order, of the element with index `at` in the whole tensor."""
    position = 0
    for index, offset, size in zip(at, shard.offsets, shard.sizes, strict=True):
        position = position * size + index - offset
    return position


def _is_grid(boxes: Sequence[Shard]) -> bool:
    """Whether each box is one cell of the grid of all borders, so that different boxes do not overlap."""
    for dimension in range(len(boxes[0].shape)):
        ranges = {(box.offsets[dimension], box.offsets[dimension] + box.sizes[dimension]) for box in boxes}
        ends = sorted(ranges)
        if any(end > begin for (_, end), (begin, _) in pairwise(ends)):
            return False
    return True


def spread(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[str, int]:
    """Assign each tensor, all of which every rank has, to one rank that writes it: the largest first, each to the rank
    with the fewest bytes so far. The same arguments give the same result on every rank.

    Args:
        sizes: name -> size in bytes.
    """
    # Ties go to the lower rank, so that the order of `ranks` does not matter.
    load = [(0, rank) for rank in sorted(ranks)]  # A sorted list is a heap.
    writer: dict[str, int] = {}
    # The sort is stable: tensors of one size keep the order of the state, which every rank has.
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        size_bytes, writer[name] = load[0]
        heapreplace(load, (size_bytes + sizes[name], writer[name]))
    return writer
