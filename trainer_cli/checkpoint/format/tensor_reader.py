"""Reading a tensor file: each tensor straight into the memory where it is wanted, the digest taken on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trainer_cli.checkpoint.format import codec
from trainer_cli.checkpoint.format.block_reader import Part, read_in_order
from trainer_cli.checkpoint.format.file_layout import DTYPES, memory_of
from trainer_cli.checkpoint.format.header import TensorEntry, parsed_header, state_file, tensor_file
from trainer_cli.checkpoint.format.lazy_state import LazyState, Targets
from trainer_cli.checkpoint.format.verified_file import VerifiedFile
from trainer_cli.checkpoint.manifest import DamagedCheckpoint, Manifest

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.interfaces import ReadableFolder

Spare = Callable[[int], memoryview]


def read_state(
    folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None, later: Collection[str], rank: int
) -> LazyState:
    """A rank's tree, or its top-level keys in `only`; tensors under the paths in `later` are read lazily.

    Raises:
        DamagedCheckpoint: naming the file that is not what was written.
    """
    with VerifiedFile(folder, manifest, state_file(rank)) as file:
        text = file.rest()
    try:
        decoder = codec.decode(text, only)
        tensors = TensorFile(folder, manifest, rank, decoder.wanted, later)
        if not tensors.waiting:
            tensors.read_into({})
        else:
            tensors.read_early()
        tree = decoder.tree(tensors.found)
    except codec.Undecodable as error:
        where = str(folder.path / state_file(rank))
        raise DamagedCheckpoint(f"the small states cannot be read: {error}", where=where) from None
    return LazyState(tree, tensors.waiting, tensors.read_into, tensors.verify) if tensors.waiting else LazyState(tree)


class TensorFile:
    """A rank's tensors: their memory is there from the beginning, their values come with `read_into`."""

    def __init__(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        rank: int,
        wanted: Mapping[str, bool],
        later: Collection[str],
    ) -> None:
        self._folder, self._manifest, self._file = folder, manifest, tensor_file(rank)
        aliases = manifest.aliases.get(self._file, {})
        stored = {name: aliases.get(name, name) for name in wanted}
        # Arrays are no tensors of anybody's, and some are turned into numbers while the tree is made.
        soon = {stored[name] for name, is_array in wanted.items() if is_array or not _is_under(name, later)}
        file = VerifiedFile(folder, manifest, self._file)
        with file.peeked():
            layout = parsed_header(file)
        if missing := set(stored.values()) - {entry.name for entry in layout} | set(stored.values()) & set(aliases):
            raise file.damaged(f"it lacks the tensor {min(missing)[:80]!r}")
        kept = set(stored.values())
        self._layout = layout
        with _unfilled():
            self._memory = {entry.name: _memory_of(file, entry) for entry in layout if entry.name in kept}
        self._soon = soon
        self.found = {name: self._memory[stored[name]] for name in wanted}
        self.waiting = [memory for name, memory in self._memory.items() if name not in soon]

    def read_early(self) -> None:
        """Read what has to be known before the rest has a place; it is read again, and verified, by `read_into`."""
        file = VerifiedFile(self._folder, self._manifest, self._file)
        with file.peeked() as source:
            offset = file.size_bytes - sum(entry.size_bytes for entry in self._layout)
            for entry in self._layout:
                if entry.name in self._soon and entry.size_bytes:
                    into = [memory_of(self._memory[entry.name])]
                    parts = [Part(entry.size_bytes, into[0])]
                    read_in_order(source, parts, offset, entry.size_bytes, lambda view: None)
                offset += entry.size_bytes

    def read_into(self, targets: Targets) -> None:
        """Read the file once, each tensor into its target or itself; leaving it compares the digest."""
        on_device = any(target.is_cuda for target in targets.values())
        with VerifiedFile(self._folder, self._manifest, self._file) as file:
            if parsed_header(file) != self._layout:
                raise file.damaged("it has changed while it was read")
            file.read_parts(self._parts(file, targets), file.left_bytes, _pinned if on_device else None)

    def verify(self) -> None:
        """Read the file once, and compare its digest."""
        with VerifiedFile(self._folder, self._manifest, self._file):
            pass

    def _parts(self, file: VerifiedFile, targets: Targets) -> Iterator[Part]:
        skipped = 0
        for entry in self._layout:
            memory = self._memory.get(entry.name)
            if memory is None:
                skipped += entry.size_bytes
                continue
            if skipped:
                yield Part(skipped)
                skipped = 0
            if entry.size_bytes:
                yield part_of(targets.get(id(memory), memory), entry.size_bytes, file, entry.name)
        if skipped:
            yield Part(skipped)


def part_of(target: torch.Tensor, size_bytes: int, file: VerifiedFile, name: str) -> Part:
    """How the bytes of a tensor get into `target`, which may lie on a device or have any strides.

    Straight where its memory is as the file's; through a block that is used again where it is on a GPU; through a
    tensor that is gone before the next is read where its elements stand in another order.
    """
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)
    plain = target.is_contiguous() and target.dtype is not torch.bool
    if plain and target.device.type == "cpu":
        return Part(size_bytes, memory_of(target))
    if plain and target.is_cuda:
        return Part(size_bytes, give=giver(target.detach().reshape(-1).view(torch.uint8)))
    with _unfilled():
        between = torch.empty(target.shape, dtype=target.dtype)

    def done() -> None:
        if between.dtype is torch.bool and int(between.reshape(-1).view(torch.uint8).max()) > 1:
            raise file.damaged(f"{name[:80]!r} holds booleans that are neither true nor false")
        with torch.no_grad():
            target.copy_(between)

    return Part(size_bytes, memory_of(between), done=done)


def giver(raw: torch.Tensor) -> Callable[[memoryview, int], None]:
    """Copies pieces into the bytes of a tensor, wherever they are."""

    def give(piece: memoryview, at: int) -> None:
        # From pinned memory where that is a GPU; done when it returns, since the block is filled anew right after.
        raw[at : at + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))

    return give


def _pinned(size_bytes: int) -> memoryview:
    return memory_of(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True))


def _is_under(name: str, paths: Collection[str]) -> bool:
    return any(not path or name == path or name.startswith(f"{path}/") for path in paths)


@contextmanager
def _unfilled() -> Iterator[None]:
    """Memory that is about to be read into is left untouched, also where determinism has it filled."""
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before


def _memory_of(file: VerifiedFile, entry: TensorEntry) -> torch.Tensor:
    try:
        return torch.empty(entry.shape, dtype=DTYPES[entry.code])
    except RuntimeError as error:
        raise file.damaged(f"{entry.name[:80]!r} has a shape that cannot be: {error}") from None
