"""What checkpointing asks of a file format: a state tree becomes files in a folder, and comes back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_cli.checkpoint.format.pending import Pending
    from trainer_cli.checkpoint.manifest import Manifest
    from trainer_cli.checkpoint.process.port import Carrier
    from trainer_cli.checkpoint.storage.port import ReadableFolder, WritableFolder


@dataclass(frozen=True, slots=True)
class FormatRecord:
    """What the manifest has to remember for the reader."""

    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For each tensor file: names of tied tensors, and the name under which each is stored."""


class Image(Protocol):
    """A rank's state in memory, as its files will be: filled again for each save. See `format.image`."""

    @property
    def held_bytes(self) -> int:
        """The memory that it has got, with the small parts that were planned."""
        ...

    @property
    def arrives_in_order(self) -> bool:
        """Whether `copy_late` tells of what has arrived before its end."""
        ...

    def needed_bytes(self, tensors: Collection[Tensor]) -> int:
        """About what a copy of a state of these takes."""
        ...

    def plan(self, tree: Mapping[str, Any]) -> int:
        """Lay a state out, and take its small parts; the bytes that its copy needs. Raises as `Format.trial`."""
        ...

    def take(self, late: Sequence[int] = (), trained: Sequence[int] = (), *, overlapped: bool = True) -> None:
        """Copy the planned state; where `overlapped`, all but the tensors that begin at the addresses in `late`."""
        ...

    def prepare(self, tensors: Collection[Tensor]) -> Callable[[], object]:
        """Get the memory for a state of these; what is returned does the rest of that, in any thread."""
        ...

    def copy_late(self) -> Iterator[int]:
        """Copy these; in any thread. Tells now and then how many bytes from the beginning have arrived."""
        ...

    def moved(self) -> list[str]:
        """Which of these were changed since `take`; asked once. Unless `overlapped`, of every way to change them."""
        ...

    def leave(self) -> None:
        """Return once these may change, all that was left to copy being copied; in any thread. Raises StateGoneError
        where the disk takes too long for that."""
        ...

    def end(self) -> None:
        """Nothing more is written of this state."""
        ...

    @property
    def is_lived_in(self) -> bool:
        """Whether they live where the last state was taken to, so that they change only after `leave`."""
        ...

    @property
    def is_homeless(self) -> bool:
        """Whether it would be worth it to `settle_in`, for which the memory of one more state is needed meanwhile."""
        ...

    def build(self) -> Callable[[], object]:
        """Get the memory to `settle_in` with the state that was taken; what is returned does the rest of that, in any
        thread, which need not be done by then."""
        ...

    def settle_in(self, tensors: Collection[Tensor]) -> None:
        """Have tensors live from now on in what was built, from where saves write them. Only where nothing but the
        optimizer changes them, and nothing is left to copy. Other threads may read them meanwhile."""
        ...

    def forget(self) -> None:
        """Let go of the memory from which they moved away, a step later; and of what was built for nobody."""
        ...

    def finish(self) -> None:
        """Wait until every byte has arrived."""
        ...

    def is_finite(self) -> bool:
        """True where no element written of the tensors at the addresses in `trained` is NaN or infinite."""
        ...

    def write(self, folder: WritableFolder, arrived: Iterable[int] = (), rank: int = 0) -> FormatRecord:
        """Write the files of one rank: the very bytes that `Format.write` writes, as far as they have `arrived`."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class Format(Protocol):
    """Turns a state tree into files in a folder, and back. Every rank calls it with its own rank."""

    @property
    def name(self) -> str:
        """What the manifest calls it."""
        ...

    def trial(self, tree: Mapping[str, Any]) -> int:
        """Go through a state as `write` would, writing nothing; the bytes it needs, at most.

        Raises:
            UnsavableState: naming the owner of what cannot be saved.
        """
        ...

    def write(self, folder: WritableFolder, tree: Mapping[str, Any], rank: int = 0) -> FormatRecord:
        """Write the files of one rank."""
        ...

    def image(self, *, lent_to: Carrier | None = None) -> Image:
        """A place in memory for the states of one training, from which they can be written later; its memory is
        lent to a process that does."""
        ...

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        later: Collection[str] = (),
        rank: int = 0,
    ) -> Pending:
        """The tree as written, or its top-level keys in `only` alone. Every digest is verified on the way.

        Tensors under the paths in `later` ("model", "optimizer/state"; "" is all) have no values before `fill`, and
        what has to be known sooner is proven right only then. The folder stays open until that is done.

        Raises:
            DamagedCheckpoint: naming the file that is not what was written.
        """
        ...
