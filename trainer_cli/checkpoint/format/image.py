"""A rank's state in memory, laid out as its files are: taken at a step's end, written while training goes on.

    take        at the boundary: small states as text, every tensor but the late ones copied
    copy_late   behind the training: the tensors that do not change before the next optimizer step
    leave       before that step: where tensors live in what is written, what is not written yet is copied
    moved       before that step: which of the late ones were changed all the same, so that the copy is worth nothing
                (by their version counters; where all was copied at the boundary, by every byte)
    write       the files, byte for byte those that are written straight from a state
    settle_in   once: tensors that nothing but that step changes live in an image from now on, and need no copy

Memory is got once and filled again for each save. While a state's names, types and shapes stay the same, so does
its layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer_cli.checkpoint.format import codec
from trainer_cli.checkpoint.format.arrangement import Arrangement, Roles, Slot, Watch, lie_plainly
from trainer_cli.checkpoint.format.copying import Copying
from trainer_cli.checkpoint.format.devices import Devices, raw_bytes
from trainer_cli.checkpoint.format.dtypes import DTYPES
from trainer_cli.checkpoint.format.finite import Finite
from trainer_cli.checkpoint.format.home import Home
from trainer_cli.checkpoint.format.layout import ALIGNMENT, state_file, tensor_file
from trainer_cli.checkpoint.format.leaves import bytes_of
from trainer_cli.checkpoint.format.memory import Memory
from trainer_cli.checkpoint.format.outgoing import Outgoing, Reach, StateGoneError
from trainer_cli.checkpoint.format.port import FormatRecord

if TYPE_CHECKING:
    from trainer_cli.checkpoint.format.codec import Leaf
    from trainer_cli.checkpoint.process.port import Carrier
    from trainer_cli.checkpoint.storage.port import WritableFolder

log = logging.getLogger(__name__)

_ENTRY_BYTES = 512
_SMALL_BYTES = 1 << 20
"""What a tensor's entry in a header takes at most, and all other states as a rule."""
_TOLD_BYTES = 1 << 25
"""So much has to arrive before it is told of again."""
_PIECE_BYTES = 1 << 26
"""So much of a GPU's memory is taken to compare a tensor with its copy."""
_HOME_BYTES = 1 << 26
"""A smaller state is copied sooner than its tensors are asked where they live."""
_HOME_SHARE = 0.5
"""How much of a state has to be able to move."""
_MOST_HOMES = 3
"""So often tensors move in, as when a state grows with its first step; what moves on and on is copied."""


class TensorsImage:
    """The files of the tensors format, in memory; that is lent to a process that writes them, if one does."""

    def __init__(self, *, lent_to: Carrier | None = None) -> None:
        self._lent_to = lent_to
        self._arranged = Arrangement()
        self._memory: Memory | None = None
        self._home: Home | None = None
        self._built: Home | None = None
        """In which nobody lives yet."""
        self._homes = 0
        self._movable: dict[int, Slot] = {}
        self._sample: np.ndarray[Any, Any] | None = None
        self._outgoing: Outgoing | None = None
        self._reach = Reach()
        self._taken: Memory | None = None
        """What the last state was taken to."""
        self._finite = True
        self._text = b""
        self._late: list[tuple[Slot, Leaf]] = []
        self._watch = Watch()
        self._overlapped = True
        self._trained: list[Slot] = []
        self._known: codec.Known = {}
        self._devices = Devices()

    def plan(self, tree: Mapping[str, Any]) -> int:
        """Lay a state out; the bytes that `take` will hold for it.

        Raises:
            UnsavableState: naming the owner of what cannot be saved.
        """
        self._text, tensors = codec.encode(tree, self._known)
        if self._arranged.fill(tensors):
            self._movable = {}
        return self.size_bytes + len(self._text)

    @property
    def size_bytes(self) -> int:
        """Of the memory that the last state needs."""
        return self._arranged.size_bytes

    @property
    def held_bytes(self) -> int:
        """The memory that it has got, with the small parts that were planned."""
        return 0 if self._memory is None else self._memory.size_bytes + len(self._text)

    def take(self, late: Sequence[int] = (), trained: Sequence[int] = (), *, overlapped: bool = True) -> None:
        """Copy the state that was planned, but for tensors that begin at the addresses in `late`.

        Those are left to `copy_late`; unless `overlapped`, they too are copied now. Either way `moved` tells which of
        them were changed. At the addresses in `trained` begin those that `is_finite` looks at.
        """
        slots, leaves = self._arranged.slots, self._arranged.leaves
        spare = self._reserve(self.size_bytes, leaves)
        roles = self._arranged.roles(late, trained)
        home, left_at = self._home_of(roles) if overlapped else (None, [])
        memory = self._taken = spare if home is None else home.memory
        refuge = None if home is None else spare
        expected = self._reach
        self._outgoing = Outgoing(memory, self.size_bytes, refuge, ahead=expected.ahead, soonest_s=expected.soonest_s)
        memory.put(self._arranged.header)
        self._trained = roles.trained
        watch = self._watch = Watch(roles.late, [leaves[at] for at in roles.late_at])
        # The training waits, so all its threads copy. Behind it one does: more of them cost it more.
        with Copying(memory, torch.get_num_threads()) as copying:
            for at in roles.early_at if overlapped else range(len(slots)):
                self._copy(leaves[at], slots[at], copying.copy)
            copying.wait()
        self._late = [(slots[at], leaves[at]) for at in left_at]
        self._sample = None if home is None else home.sample()
        if self.is_homeless:
            # Where a file holds a tensor in another order than memory does, it cannot live there.
            watched = zip(watch.slots, watch.leaves, strict=True)
            self._movable = {leaf.data_ptr(): slot for slot, leaf in watched if _lies_plainly(leaf)}
        self._overlapped = overlapped
        self._devices.boundary()
        self._arranged.empty()

    def copy_late(self) -> Iterator[int]:
        """Copy what was left; in any thread. How many bytes from the beginning have arrived is told now and then.

        GPUs may still be at it at the end, and nothing is told of what they copy; nor of a little, which is there at
        once.
        """
        memory, late, told = self._taken, self._late, 0
        tells = not self._devices.any and sum(entry.size_bytes for (entry, _), _ in late) >= _TOLD_BYTES
        assert memory is not None
        for slot, leaf in late:
            here = slot[1] - slot[1] % ALIGNMENT
            if here - told >= _TOLD_BYTES and tells:
                told = here
                yield here
            self._copy(leaf, slot, memory.copy)
        self._devices.copied()
        self._late = []

    def moved(self) -> list[str]:
        """The names of late tensors that were changed since `take`. Devices wait here until theirs are copied.

        What is written through `.data`, by numpy or by a fused kernel moves no version counter. A copy that was whole
        at the boundary tells of that too; where tensors are written from where they live, samples of them do.
        """
        self._devices.hold()
        watch, self._watch = self._watch, Watch()
        found = watch.moved()
        if not found and self._home is not None and self._sample is not None:
            found = self._home.changed(self._sample)
        if not found and not self._overlapped:
            self._devices.finish()
            watched = zip(watch.slots, watch.leaves, strict=True)
            found = [slot[0].name for slot, leaf in watched if self._differs(leaf, slot)]
        return found

    def finish(self) -> None:
        """Wait until every byte has arrived."""
        self._devices.finish()

    def leave(self) -> None:
        """Return once late tensors may change, all that was left to copy being copied: from then on nothing is written
        from where they live. In any thread.

        Raises:
            StateGoneError: that took too long, and what is being written is worth nothing. From now on all is copied.
        """
        if self._outgoing is not None:
            try:
                self._outgoing.leave()
            except StateGoneError:
                self._home, self._homes = None, _MOST_HOMES
                raise
            self._reach.note(self._outgoing)

    def end(self) -> None:
        """Nothing more is written of this state."""
        if self._outgoing is not None:
            self._outgoing.end()

    @property
    def is_lived_in(self) -> bool:
        """Whether late tensors live where the last state was taken to: they may change once they `leave` it."""
        return self._home is not None and self._taken is self._home.memory

    def build(self) -> Callable[[], object]:
        """Get the memory to settle in. What is returned has the system find it, in any thread: that takes longer than
        to move."""
        if self._built is None or self._built.header != self._arranged.header:
            self._built = Home(self._arranged.header, self.size_bytes)
        return self._built.memory.populate

    def settle_in(self, tensors: Collection[torch.Tensor]) -> None:
        """Have the late ones of these live where later saves write them from, as far as nobody else knows where they
        are. Between two saves, or once nothing is left to copy of one, which is not written from where they live.
        Without memory that was built for this very state, nobody moves."""
        home, self._built, moves = self._built, None, []
        if home is None or home.header != self._arranged.header:
            return
        self._homes += 1
        for tensor in tensors:
            # Each once, though some be told of twice.
            slot = self._movable.pop(tensor.data_ptr(), None)
            if slot and slot[0].size_bytes == tensor.nbytes and home.may_take(tensor, slot[1]):
                moves.append((slot[0].name, tensor, slot[1]))
        moved = sum(tensor.nbytes for _, tensor, _ in moves)
        log.debug("%s of %s bytes may live where they are written from", moved, self.size_bytes)
        if moved < _HOME_SHARE * self.size_bytes:
            # Another memory for all, and copies of most of it, would cost more than it saves.
            self._homes = _MOST_HOMES
            return
        home.move_in(moves)
        self._home, self._reach = home, Reach()

    def forget(self) -> None:
        """Let go of the memory from which tensors moved away, and of what was built for nobody."""
        self._built = None
        if self._home is not None:
            self._home.forget()

    @property
    def is_homeless(self) -> bool:
        """Whether it would be worth it to `settle_in`."""
        return (
            self.size_bytes >= _HOME_BYTES
            and self._homes < _MOST_HOMES
            and not self._devices.any
            and not self.is_lived_in
        )

    def is_finite(self) -> bool:
        """True where no element of the trained tensors that were written is NaN or infinite."""
        return self._finite

    def write(self, folder: WritableFolder, arrived: Iterable[int] = (), rank: int = 0) -> FormatRecord:
        """Write the files of one rank, as far as the copy has `arrived`; at its end, all."""
        outgoing, file = self._outgoing, tensor_file(rank)
        assert outgoing is not None
        finite = Finite((DTYPES[entry.code], offset, entry.size_bytes) for entry, offset in self._trained)
        with folder.create(file) as sink:
            outgoing.begin(sink)
            for here in arrived:
                outgoing.send(here, finite)
            outgoing.send(self.size_bytes, finite)
        self._finite = finite.so_far
        with folder.create(state_file(rank)) as sink:
            sink.write(self._text)
        return FormatRecord({file: self._arranged.aliases} if self._arranged.aliases else {})

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
        self._late, self._text = [], b""
        self._arranged.empty()
        self._taken = self._outgoing = self._home = self._built = None
        self._give_back()

    def _home_of(self, roles: Roles) -> tuple[Home | None, list[int]]:
        """The home in which all that moved in are at their places still, and the numbers of the late ones that are to
        be copied. No home where one is not: a tensor of another may live where one of this state would be put."""
        home, leaves = self._home, self._arranged.leaves
        if home is not None and home.header == self._arranged.header and (found := roles.at_home(home)) is not None:
            tenants_at, left_at = found
            if lie_plainly([leaves[at] for at in tenants_at]):  # type: ignore[misc]
                return home, left_at
        return None, roles.late_at

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
        self._watch, self._outgoing, self._taken = Watch(), None, None
        if memory is not None:
            if self._lent_to is not None:
                self._lent_to.take_back()
            memory.close()

    def _copy(self, leaf: Leaf, slot: Slot, copy: Callable[[int, int, int], object]) -> None:
        assert self._taken is not None
        offset, size_bytes = slot[1], slot[0].size_bytes
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            self._devices.copy(leaf, self._taken.tensor[offset : offset + size_bytes])
        elif isinstance(leaf, torch.Tensor) and _lies_plainly(leaf):
            copy(leaf.data_ptr(), size_bytes, offset)
        else:
            array = bytes_of(leaf)
            self._taken.copy(array.ctypes.data, size_bytes, offset)

    def _differs(self, leaf: torch.Tensor, slot: Slot) -> bool:
        """Whether a tensor has other bytes than its copy."""
        assert self._taken is not None
        offset, size_bytes = slot[1], slot[0].size_bytes
        if leaf.is_cuda:
            raw = raw_bytes(leaf)
            kept = self._taken.tensor[offset : offset + size_bytes]
            pieces = range(0, size_bytes, _PIECE_BYTES)
            return any(not _equal(raw[at : at + _PIECE_BYTES], kept[at : at + _PIECE_BYTES]) for at in pieces)
        if _lies_plainly(leaf):
            return self._taken.differs(leaf.data_ptr(), size_bytes, offset)
        array = bytes_of(leaf)
        return self._taken.differs(array.ctypes.data, size_bytes, offset)


def _lies_plainly(leaf: Leaf) -> bool:
    """True where its bytes in this memory are those of a file."""
    return isinstance(leaf, torch.Tensor) and leaf.is_cpu and lie_plainly([leaf])


def _equal(here: torch.Tensor, kept: torch.Tensor) -> bool:
    return torch.equal(here, kept.to(here.device))
