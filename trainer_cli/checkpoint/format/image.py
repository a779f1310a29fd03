"""A rank's state in memory, laid out as its files are: taken at a step's end, written while training goes on.

    take        at the boundary: small states as text, every tensor but the late ones copied
    copy_late   behind the training: the tensors that do not change before the next optimizer step
    moved       before that step: which of the late ones were changed all the same, so that the copy is worth nothing
                (by their version counters; where all was copied at the boundary, by every byte)
    write       the files, byte for byte those that are written straight from a state

Memory is got once and filled again for each save. While a state's names, types and shapes stay the same, so does
its layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer_cli.checkpoint.format import codec
from trainer_cli.checkpoint.format.copying import Copying
from trainer_cli.checkpoint.format.dtypes import DTYPES
from trainer_cli.checkpoint.format.layout import ALIGNMENT, TensorEntry, rendered_header, state_file, tensor_file
from trainer_cli.checkpoint.format.leaves import bytes_of, identity, laid_out
from trainer_cli.checkpoint.format.memory import Memory
from trainer_cli.checkpoint.format.port import FormatRecord

if TYPE_CHECKING:
    from trainer_cli.checkpoint.format.codec import Leaf
    from trainer_cli.checkpoint.process.port import Carrier
    from trainer_cli.checkpoint.storage.port import WritableFolder

_ORDINARY = {torch.Tensor, torch.nn.Parameter, np.ndarray}
_CHUNK = 1 << 18
"""Elements looked at in one go: as many as fit the processor's caches."""
_ENTRY_BYTES = 512
_SMALL_BYTES = 1 << 20
"""What a tensor's entry in a header takes at most, and all other states as a rule."""
_TOLD_BYTES = 1 << 25
"""So much has to arrive before it is told of again."""
_PIECE_BYTES = 1 << 26
"""So much of a GPU's memory is taken to compare a tensor with its copy."""


_Slot = tuple[TensorEntry, int]
"""A tensor's entry, and where it lies."""
_Late = tuple[_Slot, torch.Tensor, int]
"""And the version that it had."""


class TensorsImage:
    """The files of the tensors format, in memory; that is lent to a process that writes them, if one does."""

    def __init__(self, *, lent_to: Carrier | None = None) -> None:
        self._lent_to = lent_to
        self.size_bytes = 0
        """Of the memory that the last state needs."""
        self._memory: Memory | None = None
        self._text = b""
        self._layout: list[TensorEntry] = []
        self._header = b""
        self._aliases: dict[str, str] = {}
        self._tensors: dict[str, Leaf] = {}
        self._places: dict[str, int | None] = {}
        self._late: list[_Late] = []
        self._watched: list[_Late] = []
        self._overlapped = True
        self._trained: list[_Slot] = []
        self._at: dict[str, int] = {}
        self._known: codec.Known = {}
        self._form: _Form | None = None
        self._slots: list[_Slot] = []
        self._devices = _Devices()

    def plan(self, tree: Mapping[str, Any]) -> int:
        """Lay a state out; the bytes that `take` will hold for it.

        Raises:
            UnsavableState: naming the owner of what cannot be saved.
        """
        self._text, self._tensors = codec.encode(tree, self._known)
        try:
            self._places = _places(self._tensors)
        except (RuntimeError, ValueError):
            # A tensor without an address is one that no file can hold: it is named here.
            laid_out(self._tensors)
            raise
        form = _Form.of(self._tensors, self._places)
        if form is None or form != self._form or not self._still_tied():
            layout, self._aliases = laid_out(self._tensors)
            if layout != self._layout or not self._header:
                self._layout, self._header = layout, rendered_header(layout)
            offset = len(self._header)
            self._at = {}
            for entry in layout:
                self._at[entry.name] = offset
                offset += entry.size_bytes
            self.size_bytes = offset
            # Where tensors begin at the same place and are yet not tied, only a closer look tells them apart.
            tied = form is not None and form.distinct + len(self._aliases) == form.placed
            self._form = form if tied else None
            self._slots = [(entry, self._at[entry.name]) for entry in layout if entry.size_bytes]
        return self.size_bytes + len(self._text)

    @property
    def held_bytes(self) -> int:
        """The memory that it has got, with the small parts that were planned."""
        return 0 if self._memory is None else self._memory.size_bytes + len(self._text)

    def take(self, late: Collection[int] = (), trained: Collection[int] = (), *, overlapped: bool = True) -> None:
        """Copy the state that was planned, but for tensors that begin at the addresses in `late`.

        Those are left to `copy_late`; unless `overlapped`, they too are copied now. Either way `moved` tells which of
        them were changed. At the addresses in `trained` begin those that `is_finite` looks at.
        """
        memory = self._reserve(self.size_bytes, self._tensors.values())
        memory.put(self._header)
        names = [entry.name for entry, _ in self._slots]
        leaves: Iterator[Any] = map(self._tensors.__getitem__, names)
        watched: list[_Late] = []
        finite: list[_Slot] = []
        # The training waits, so all its threads copy. Behind it one does: more of them cost it more.
        with Copying(memory, torch.get_num_threads()) as copying:
            for slot, leaf, address in zip(self._slots, leaves, map(self._places.__getitem__, names), strict=True):
                if address in trained:
                    finite.append(slot)
                if address in late and not leaf.is_inference():
                    watched.append((slot, leaf, leaf._version))
                    if overlapped:
                        continue
                self._copy(leaf, slot, copying.copy)
            copying.wait()
        self._late, self._watched, self._trained = watched if overlapped else [], watched, finite
        self._overlapped = overlapped
        self._devices.boundary()
        self._tensors = {}

    def copy_late(self) -> Iterator[int]:
        """Copy what was left; in any thread. How many bytes from the beginning have arrived is told now and then.

        GPUs may still be at it at the end, and nothing is told of what they copy.
        """
        memory, late, told = self._memory, self._late, 0
        assert memory is not None
        for slot, leaf, _ in late:
            here = slot[1] - slot[1] % ALIGNMENT
            if here - told >= _TOLD_BYTES and not self._devices.any:
                told = here
                yield here
            self._copy(leaf, slot, memory.copy)
        self._devices.copied()
        self._late = []

    def moved(self) -> list[str]:
        """The names of late tensors that were changed since `take`. Devices wait here until theirs are copied.

        What is written through `.data`, by numpy or by a fused kernel moves no version counter. A copy that was whole
        at the boundary tells of that too.
        """
        self._devices.hold()
        watched, self._watched = self._watched, []
        found = [entry.name for (entry, _), leaf, version in watched if leaf._version != version]
        if not found and not self._overlapped:
            self._devices.finish()
            found = [slot[0].name for slot, leaf, _ in watched if self._differs(leaf, slot)]
        return found

    def finish(self) -> None:
        """Wait until every byte has arrived."""
        self._devices.finish()

    def is_finite(self) -> bool:
        """True where no element of the trained tensors is NaN or infinite."""
        assert self._memory is not None
        for entry, offset in self._trained:
            raw = self._memory.tensor[offset : offset + entry.size_bytes]
            if not _is_finite(raw.view(DTYPES[entry.code])):
                return False
        return True

    def write(self, folder: WritableFolder, arrived: Iterable[int] = (), rank: int = 0) -> FormatRecord:
        """Write the files of one rank, as far as the copy has `arrived`; at its end, all."""
        assert self._memory is not None
        file, done = tensor_file(rank), 0
        view = self._memory.view(self.size_bytes)
        with folder.create(file) as sink:
            for here in arrived:
                sink.write(view[done:here], stays=True)
                done = here
            sink.write(view[done:], stays=True)
        with folder.create(state_file(rank)) as sink:
            sink.write(self._text)
        return FormatRecord({file: self._aliases} if self._aliases else {})

    def needed_bytes(self, tensors: Collection[torch.Tensor]) -> int:
        """About what a state of these tensors takes, header and small others included."""
        places = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
        return sum(places.values()) + len(places) * _ENTRY_BYTES + _SMALL_BYTES

    def prepare(self, tensors: Collection[torch.Tensor]) -> Callable[[], object]:
        """Get the memory that a state of these takes. What is returned has the system find it, in any thread; memory
        that is pinned for a GPU is found at once."""
        return self._reserve(self.needed_bytes(tensors), tensors).populate

    @property
    def arrives_in_order(self) -> bool:
        """Whether `copy_late` tells of what has arrived before the end: not where GPUs copy."""
        return not self._devices.any

    def close(self) -> None:
        """Give the memory back."""
        self._late, self._watched, self._tensors, self._text = [], [], {}, b""
        self._give_back()

    def _still_tied(self) -> bool:
        """Whether those that were stored under another's name are still that other."""
        pairs = [(self._tensors[name], self._tensors[first]) for name, first in self._aliases.items()]
        return all(identity(one) == identity(other) for one, other in pairs)

    def _reserve(self, size_bytes: int, tensors: Collection[Leaf]) -> Memory:
        pinned = self._devices.see(tensors)
        if self._memory is None or self._memory.size_bytes < size_bytes:
            self._give_back()
            self._memory = Memory(size_bytes, pinned=pinned, shared=self._lent_to is not None)
            if self._lent_to is not None and self._memory.file is not None:
                self._lent_to.lend(self._memory.file, self._memory.address, self._memory.size_bytes)
        return self._memory

    def _give_back(self) -> None:
        memory, self._memory = self._memory, None
        self._watched = []
        if memory is not None:
            if self._lent_to is not None:
                self._lent_to.take_back()
            memory.close()

    def _copy(self, leaf: Leaf, slot: _Slot, copy: Callable[[int, int, int], object]) -> None:
        assert self._memory is not None
        offset, size_bytes = slot[1], slot[0].size_bytes
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            self._devices.copy(leaf, self._memory.tensor[offset : offset + size_bytes])
        elif isinstance(leaf, torch.Tensor) and _lies_plainly(leaf):
            copy(leaf.data_ptr(), size_bytes, offset)
        else:
            array = bytes_of(leaf)
            self._memory.copy(array.ctypes.data, size_bytes, offset)

    def _differs(self, leaf: torch.Tensor, slot: _Slot) -> bool:
        """Whether a tensor has other bytes than its copy."""
        assert self._memory is not None
        offset, size_bytes = slot[1], slot[0].size_bytes
        if leaf.is_cuda:
            raw = _raw(leaf)
            kept = self._memory.tensor[offset : offset + size_bytes]
            pieces = range(0, size_bytes, _PIECE_BYTES)
            return any(not _equal(raw[at : at + _PIECE_BYTES], kept[at : at + _PIECE_BYTES]) for at in pieces)
        if _lies_plainly(leaf):
            return self._memory.differs(leaf.data_ptr(), size_bytes, offset)
        array = bytes_of(leaf)
        return self._memory.differs(array.ctypes.data, size_bytes, offset)


@dataclass(frozen=True, slots=True)
class _Form:
    """All that a layout depends on, but for which tensors are tied: equal forms are laid out alike."""

    names: list[str]
    types: list[tuple[Any, Any]]
    placed: int
    """Tensors that begin somewhere."""
    distinct: int
    """Places at which they begin."""

    @classmethod
    def of(cls, tensors: Mapping[str, Leaf], places: Mapping[str, int | None]) -> _Form | None:
        """None where some are of a kind that needs a closer look."""
        leaves = tensors.values()
        if not set(map(type, leaves)) <= _ORDINARY:
            return None
        placed = [place for place in places.values() if place]
        return cls(list(tensors), [(leaf.dtype, leaf.shape) for leaf in leaves], len(placed), len(set(placed)))


def _places(tensors: Mapping[str, Leaf]) -> dict[str, int | None]:
    """Where each tensor begins; 0 where it has no memory, None for what is no tensor."""
    return {name: leaf.data_ptr() if isinstance(leaf, torch.Tensor) else None for name, leaf in tensors.items()}


class _Devices:
    """Copies from GPUs: on a stream of their own beside the compute stream, which waits before it writes again."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._events: list[tuple[torch.device, Any]] = []

    @property
    def any(self) -> bool:
        """Whether there are GPUs."""
        return bool(self._streams)

    def see(self, leaves: Collection[Leaf]) -> bool:
        """Get ready for the GPUs that these are on; True where there are any. What they hold now is what is copied."""
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda}
        for device in devices:
            stream = self._streams.setdefault(device, None) or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
            stream.wait_stream(torch.cuda.current_stream(device))
        return bool(devices)

    def copy(self, leaf: torch.Tensor, into: torch.Tensor) -> None:
        """Have a tensor copied; nobody waits for it here."""
        stream = self._streams[leaf.device]
        with torch.cuda.stream(stream):
            raw = _raw(leaf)
            into.copy_(raw, non_blocking=True)
            # Its memory must not be given to another tensor before the copy is made.
            raw.record_stream(stream)

    def boundary(self) -> None:
        """What was copied at the boundary may change from here on: the compute streams wait for these copies."""
        self.copied()
        self.hold()

    def copied(self) -> None:
        """All copies are asked for: mark their end."""
        self._events = [(device, stream.record_event()) for device, stream in self._streams.items()]

    def hold(self) -> None:
        """The compute streams go on once the copies asked for are made; the host does not wait."""
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

    def finish(self) -> None:
        """The host waits for every copy."""
        for _, event in self._events:
            event.synchronize()


def _lies_plainly(leaf: torch.Tensor) -> bool:
    """True where its bytes in this memory are those of a file."""
    return leaf.is_cpu and leaf.is_contiguous() and not leaf.is_conj() and not leaf.is_neg()


def _raw(leaf: torch.Tensor) -> torch.Tensor:
    """Its bytes, on its device."""
    return leaf.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _equal(here: torch.Tensor, kept: torch.Tensor) -> bool:
    return torch.equal(here, kept.to(here.device))


def _is_finite(values: torch.Tensor) -> bool:
    """In pieces: one pass where all is well, since a sum of numbers with NaN or infinity is none of them finite."""
    if not values.is_floating_point() and not values.is_complex():
        return True
    for start in range(0, values.numel(), _CHUNK):
        piece = values[start : start + _CHUNK]
        if piece.dtype in (torch.float32, torch.float64):
            # Of numpy, which takes no second thread away from the training.
            with np.errstate(all="ignore"):
                whole = bool(np.isfinite(piece.numpy().sum()))
        else:
            piece = piece if piece.is_complex() else piece.float()
            whole = bool(torch.isfinite(piece.sum()))
        if not whole and not bool(torch.isfinite(piece).all()):
            return False
    return True
