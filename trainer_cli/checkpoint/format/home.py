"""Memory in which the tensors of a training live, laid out as the file of its state: a save needs no copy of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import numpy as np
import torch

from trainer_cli.checkpoint.format.copying import Copying
from trainer_cli.checkpoint.format.layout import LINE
from trainer_cli.checkpoint.format.memory import Memory, is_inherited

_WORTH_BYTES = 1 << 16
"""A smaller tensor stays where it is: copying it costs less than asking where it lives."""
_WORD = 4
_SAMPLED_BYTES = (1 << 22) + _WORD
"""A word of so many bytes is sampled, of ever other columns: few, as each is far from all caches, and they are looked
at while the training waits."""

Move = tuple[str, torch.Tensor, int]
"""What the file calls a tensor, the tensor, and its place in the file."""


class Home:
    """Tensors move in as far as nobody else knows where they were; somebody may move them away again.

    Args:
        header: of the file as which it is laid out.
    """

    def __init__(self, header: bytes, size_bytes: int) -> None:
        self.header = header
        self.memory = Memory(size_bytes, inherited=True)
        self.tenants: dict[str, int] = {}
        """Where each begins that moved in, by the name that the file gives it."""
        self._left: list[torch.UntypedStorage] = []
        self._sampled = np.zeros(0, np.int64)
        self._sampled_names: list[str] = []

    def move_in(self, moves: Collection[Move]) -> None:
        """Have tensors live here from now on, each at its place in the file. Their version counters stay as they are.

        What they leave stays until `forget`: other threads may be reading it.
        """
        with Copying(self.memory, torch.get_num_threads()) as copying:
            for _, tensor, offset in moves:
                copying.copy(tensor.data_ptr(), tensor.nbytes, offset)
            copying.wait()
        for name, tensor, offset in moves:
            self._left.append(tensor.untyped_storage())
            tensor.data = self.memory.part(offset, tensor)
            self.tenants[name] = tensor.data_ptr()
        places = [
            np.arange(offset, offset + one.nbytes, _SAMPLED_BYTES, dtype=np.int64) // _WORD for _, one, offset in moves
        ]
        self._sampled = np.concatenate([self._sampled, *places])
        self._sampled_names += [name for (name, _, _), own in zip(moves, places, strict=True) for _ in own]

    def forget(self) -> None:
        """Let go of the memory that was left."""
        self._left = []

    def sample(self) -> np.ndarray[Any, Any]:
        """A word here and there of each tensor that lives here, to compare with later ones."""
        everything = np.frombuffer(self.memory.view(self.memory.size_bytes), np.uint32)
        found: np.ndarray[Any, Any] = everything[self._sampled]
        return found

    def changed(self, since: np.ndarray[Any, Any]) -> list[str]:
        """The tensors of which a sample is another than it was: all that were written to as a whole, and hardly one of
        which a few numbers were."""
        names = [self._sampled_names[place] for place in np.flatnonzero(self.sample() != since)]
        return list(dict.fromkeys(names))

    @staticmethod
    def may_take(tensor: torch.Tensor, offset: int) -> bool:
        """Whether nobody can tell that a tensor's memory is another: no view of it, no array, no other process."""
        return (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.is_cpu
            and tensor.nbytes >= _WORTH_BYTES
            and offset % LINE == 0
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
            and not tensor.is_shared()  # type: ignore[no-untyped-call]
            and tensor.untyped_storage().nbytes() == tensor.nbytes
            and _owners(tensor) == _owners_of_one()
            # What neither torch nor a home got, such as an array's memory, others may look at by other ways.
            and (tensor.untyped_storage().resizable() or is_inherited(tensor.data_ptr()))
        )


def _owners(tensor: torch.Tensor) -> int:
    """How many hold a tensor's storage, whoever asks included; 0 where this torch does not tell."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else count(tensor.untyped_storage()._cdata)


@cache
def _owners_of_one() -> int:
    """What `_owners` says of a tensor that is alone; -1 where it cannot tell such a one, so that none is."""
    alone = torch.empty(1)
    before = _owners(alone)
    view = alone.detach()
    after = _owners(alone)
    del view
    return before if after == before + 1 else -1
