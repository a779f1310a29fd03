"""The bytes of a file in large blocks: some threads read ahead, and one sees them in order while they are still warm.

    threads   read block 1..8 ahead ->  straight into the memory that each part names, or into a spare block
    caller                              digests each block in order, then hands it on

Reading and digesting both let go of the interpreter, so they go side by side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.interfaces import Source

BLOCK_BYTES = 2 * 1024 * 1024
"""Small enough that what was read is digested from the processor's cache, large enough that few calls are made."""
_THREADS = 4
_AHEAD = 8
_MOST_PIECES = 1000


@dataclass(slots=True)
class Part:
    """Some bytes of a file, and where they go: into memory, or to who takes them piece by piece, or nowhere."""

    size_bytes: int
    into: memoryview | None = None
    give: Callable[[memoryview, int], None] | None = None
    """Is given each piece, and its place in the part; the piece is good until it returns."""
    done: Callable[[], None] | None = None
    """Is called once all of it was read."""


@dataclass(slots=True)
class _Block:
    """Pieces of parts that lie side by side, and are read by one call."""

    offset: int
    pieces: list[tuple[Part, int, int]] = field(default_factory=list)
    """Part, place in it, bytes."""
    size_bytes: int = 0
    views: list[memoryview] = field(default_factory=list)
    spare: memoryview | None = None

    def place(self, spares: list[memoryview], new_spare: Callable[[int], memoryview]) -> None:
        """Give each piece its memory."""
        used = 0
        for part, at, count in self.pieces:
            if part.into is not None:
                self.views.append(part.into[at : at + count])
                continue
            if self.spare is None:
                self.spare = spares.pop() if spares else new_spare(BLOCK_BYTES)
            self.views.append(self.spare[used : used + count])
            used += count

    def hand_on(self) -> None:
        for (part, at, count), view in zip(self.pieces, self.views, strict=True):
            if part.give is not None:
                part.give(view, at)
            if part.done is not None and at + count == part.size_bytes:
                part.done()


def read_in_order(
    source: Source,
    parts: Iterable[Part],
    offset: int,
    size_bytes: int,
    seen: Callable[[memoryview], object],
    new_spare: Callable[[int], memoryview] = lambda size_bytes: memoryview(bytearray(size_bytes)),
) -> None:
    """Read parts that lie side by side from `offset` on, `size_bytes` in all; `seen` is shown every byte in order.

    Parts are requested some blocks ahead, so the memory of one may be freed before the next.

    Raises:
        OSError: what the source raised first, in the order of the file. No thread reads any more then.
    """
    spares: list[memoryview] = []

    def use(block: _Block) -> None:
        for view in block.views:
            seen(view)
        block.hand_on()
        if block.spare is not None:
            spares.append(block.spare)

    blocks = _cut(parts, offset)
    if size_bytes <= BLOCK_BYTES:
        for block in blocks:
            block.place(spares, new_spare)
            source.read_at(block.views, block.offset)
            use(block)
        return
    ahead: deque[tuple[_Block, Future[None]]] = deque()

    def use_first() -> None:
        block, read = ahead.popleft()
        if read.cancel():
            # No thread has come to it yet: on a busy machine waiting for one takes longer than reading.
            source.read_at(block.views, block.offset)
        else:
            read.result()
        use(block)

    with ThreadPoolExecutor(_THREADS, "checkpoint-reading") as pool:
        try:
            for block in blocks:
                block.place(spares, new_spare)
                ahead.append((block, pool.submit(source.read_at, block.views, block.offset)))
                if len(ahead) >= _AHEAD:
                    use_first()
            while ahead:
                use_first()
        finally:
            pool.shutdown(cancel_futures=True)


def _cut(parts: Iterable[Part], offset: int) -> Iterator[_Block]:
    block = _Block(offset)
    for part in parts:
        at = 0
        while at < part.size_bytes:
            count = min(part.size_bytes - at, BLOCK_BYTES - block.size_bytes)
            block.pieces.append((part, at, count))
            block.size_bytes += count
            at += count
            if block.size_bytes == BLOCK_BYTES or len(block.pieces) == _MOST_PIECES:
                yield block
                block = _Block(block.offset + block.size_bytes)
    if block.pieces:
        yield block
