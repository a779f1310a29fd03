"""The first call of a save: one copy of the state in host memory, laid out as its tensor file, and reused.

`SnapshotBuffer.capture` runs at a step's boundary, in the training's thread. When it returns, nothing that the training
does changes the copy: tensors in host memory are copied by then, and of those on a GPU the copy is queued on a side
stream that the compute stream waits for before it runs anything else.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from trainer_cli.checkpoint.host_memory import HostMemory
from trainer_cli.format import FilesOfRank
from trainer_cli.memory import available_bytes
from trainer_cli.state import are_finite
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from trainer_cli.format import FileLayout, Format
    from trainer_cli.storage import StagedFolder
    from trainer_cli.tensor_files import Leaf

log = logging.getLogger(__name__)

_SERIAL = 32_768
"""Elements that torch processes in the calling thread alone (`at::internal::GRAIN_SIZE`)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One state as it will be written: a copy, whose bytes stay until the next `capture` of the same buffer, or,
    without an image, the live tensors of the layout."""

    layout: FileLayout
    trained: Sequence[torch.Tensor]
    """What `is_finite` examines."""
    image: memoryview | None = None
    others_finite: bool = True
    """Whether trained tensors that the copy does not contain were finite when it was made."""
    copied: Sequence[torch.cuda.Event] = ()

    def wait(self) -> None:
        """Return once copies from GPUs have arrived."""
        for event in self.copied:
            event.synchronize()

    def is_finite(self) -> bool:
        """Whether the trained tensors hold neither NaN nor infinity."""
        if self.image is None:
            return self.others_finite and are_finite(self.trained)
        # Another thread examines the copies, in pieces for which torch starts no threads: with those, OpenMP would
        # count more threads than processors, and the training's own would sleep between all operations from then on.
        return self.others_finite and all(are_finite(torch.split(copy.reshape(-1), _SERIAL)) for copy in self.trained)

    def write(self, folder: StagedFolder) -> dict[str, Mapping[str, str]]:
        """Write the files of this state, the same bytes from a copy and from live tensors. That of the frozen tensors
        is a link to that of an earlier checkpoint, if it has the same bytes."""
        if (frozen := self.layout.frozen) is not None:
            image = None if self.image is None else self.image[self.layout.frozen_offset :]
            folder.write_or_link(FilesOfRank(self.layout.rank).frozen, partial(frozen.content, image))
        return self.layout.write(folder, image=self.image)


class SnapshotBuffer:
    """Host memory for one snapshot at a time. It grows when a state does, and holds one state, never two.

    Args:
        available: the memory in bytes that can still be had, None if that is unknown. A snapshot takes no more than
            half of it.
    """

    def __init__(self, available: Callable[[], int | None] = available_bytes) -> None:
        self._available = available
        self._memory: HostMemory | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def held_bytes(self) -> int:
        """The size of the memory that is held now."""
        return 0 if self._memory is None else self._memory.size_bytes

    def reserve(self, layout: FileLayout) -> HostMemory:
        """Memory for a state of this layout; a smaller one is replaced, and what was captured in it is lost.

        Raises:
            OSError, MemoryError: the system has no such memory, or cannot spare it.
        """
        if self._memory is not None and self._memory.pid != os.getpid():
            # A forked child does not have its parent's memory.
            self._memory = None
        if self._memory is None or self._memory.size_bytes < layout.image_bytes:
            needed, available = layout.image_bytes, self._available()
            if available is not None:
                # What is held now is given back first.
                available += self.held_bytes
            if available is not None and needed > available // 2:
                raise MemoryError(
                    f"a copy of the state takes {format_count(needed, 'byte')}, more than half of the {available:,} "
                    "available"
                )
            self.close()
            leaves = [span.leaf for span in layout.image_spans]
            on_gpu = any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves)
            self._memory = HostMemory(layout.image_bytes, pinned=on_gpu)
        return self._memory

    def capture(self, layout: FileLayout, trained: Iterable[torch.Tensor] = ()) -> Snapshot:
        """Copy every tensor of a state. It may change once this returns.

        Args:
            layout: where each tensor goes.
            trained: tensors of the state whose copies `Snapshot.is_finite` examines.

        Raises:
            OSError, MemoryError: the system has no memory for the copy.
        """
        memory = self.reserve(layout)
        image = memory.view(layout.image_bytes)
        # The image is the file itself, header first, so that the writer hands it to the disk in one piece.
        for offset, header in layout.image_headers.items():
            image[offset : offset + len(header)] = header
        spans = layout.image_spans
        streams = self._streams_of([span.leaf for span in spans])
        examined = {_memory(tensor): tensor for tensor in trained}
        copies: dict[tuple[Any, ...], torch.Tensor] = {}
        with torch.no_grad():
            for span in spans:
                target_bytes = memory.tensor[span.offset : span.offset + span.size_bytes]
                if isinstance(span.leaf, np.ndarray):
                    target_bytes.copy_(torch.from_numpy(np.ascontiguousarray(span.leaf).reshape(-1).view(np.uint8)))
                    continue
                # Torch copies large tensors with all its threads, and any layout into contiguous order.
                copy = target_bytes.view(span.leaf.dtype).view(span.leaf.shape)
                if span.leaf.is_cuda:
                    with torch.cuda.stream(streams[span.leaf.device]):
                        # Torch would resolve these on the host, before the bytes are there.
                        copy.copy_(span.leaf.resolve_conj().resolve_neg(), non_blocking=True)
                else:
                    copy.copy_(span.leaf)
                key = _memory(span.leaf)
                if key in examined:
                    copies[key] = copy
        # Trained tensors that are not in the copy are examined now, before they change.
        others_finite = are_finite(tensor for key, tensor in examined.items() if key not in copies)
        copied = []
        for device, stream in streams.items():
            event = stream.record_event()
            torch.cuda.current_stream(device).wait_event(event)
            copied.append(event)
        return Snapshot(layout, list(copies.values()), image, others_finite, copied)

    def close(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _streams_of(self, leaves: Collection[Leaf]) -> dict[torch.device, Any]:
        """A side stream for each GPU that holds a tensor; it begins after all that is queued there now."""
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda}
        for device in devices:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return {device: self._streams[device] for device in devices}


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Identify a tensor by its elements in memory; the address alone could be that of a view of it."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class Stager(Protocol):
    """Turns a state into the snapshot that a writer writes."""

    @property
    def held_bytes(self) -> int:
        """The memory that it holds for copies."""
        ...

    def stage(
        self,
        format: Format,
        state: Mapping[str, Any],
        trained: Sequence[torch.Tensor] = (),
        frozen: Iterable[torch.Tensor] = (),
    ) -> Snapshot:
        """The state as it will be written. A snapshot with an image stays as it is when the state changes; without
        one it is the live tensors.

        Args:
            trained: tensors that must hold neither NaN nor infinity for the checkpoint to be finite.
            frozen: tensors that have probably not changed since the save before; see `FileLayout.split_off`.

        Raises:
            UnsavableState: naming the owner of what cannot be saved.
        """
        ...

    def prepare(
        self, format: Format, state: Mapping[str, Any], frozen: Iterable[torch.Tensor] = ()
    ) -> HostMemory | None:
        """Reserve what such a state needs; memory that is to be touched by the thread that will write, if any."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


class LiveStager:
    """Copies nothing: the state must not change until it is written."""

    held_bytes = 0

    def stage(
        self,
        format: Format,
        state: Mapping[str, Any],
        trained: Sequence[torch.Tensor] = (),
        frozen: Iterable[torch.Tensor] = (),
    ) -> Snapshot:
        """The live tensors of the state."""
        return Snapshot(format.plan(state).split_off(frozen), trained)

    def prepare(
        self, format: Format, state: Mapping[str, Any], frozen: Iterable[torch.Tensor] = ()
    ) -> HostMemory | None:
        """None, because no memory is needed."""
        return None

    def close(self) -> None:
        """Do nothing, because no memory is held."""


class CopyStager:
    """Copies the state into one buffer, reused from save to save. Where the host has no memory for that, the live
    tensors are staged, with a warning.

    Args:
        available: the memory in bytes that can still be had. The copy takes no more than half of it.
    """

    def __init__(self, available: Callable[[], int | None] = available_bytes) -> None:
        self.buffer = SnapshotBuffer(available)
        self._warned = False

    @property
    def held_bytes(self) -> int:
        return self.buffer.held_bytes

    def stage(
        self,
        format: Format,
        state: Mapping[str, Any],
        trained: Sequence[torch.Tensor] = (),
        frozen: Iterable[torch.Tensor] = (),
    ) -> Snapshot:
        """A copy of the state; the live tensors if there is no memory for it."""
        layout = format.plan(state).split_off(frozen)
        try:
            return self.buffer.capture(layout, trained)
        except (OSError, MemoryError) as error:
            if not self._warned:
                self._warned = True
                why = str(error) or "there is no memory for a copy of the state"
                log.warning("%s, so training waits for each save", why)
        return Snapshot(layout, trained)

    def prepare(
        self, format: Format, state: Mapping[str, Any], frozen: Iterable[torch.Tensor] = ()
    ) -> HostMemory | None:
        """Reserve memory for a copy of the state; None if there is not enough."""
        try:
            return self.buffer.reserve(format.plan(state).split_off(frozen))
        except (OSError, MemoryError) as error:
            log.debug("no memory is reserved for saves: %s", error)
            return None

    def close(self) -> None:
        self.buffer.close()
