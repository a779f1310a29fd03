"""Memory in which the tensors of a training live, laid out as the file of its state: a save needs no copy of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch

from trainer_cli.checkpoint.format.copying import Copying
from trainer_cli.checkpoint.format.layout import LINE
from trainer_cli.checkpoint.format.memory import Memory

_WORTH_BYTES = 1 << 16
"""A smaller tensor stays where it is: copying it costs less than asking where it lives."""
_MOVED_AT_ONCE = 1 << 26
"""So much lies in both places for a moment."""

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

    def move_in(self, moves: Iterable[Move]) -> int:
        """Have tensors live here from now on, each at its place in the file; how many bytes of them could. Their
        version counters stay as they are."""
        moved = 0
        with Copying(self.memory, torch.get_num_threads()) as copying:
            for some in _in_portions(one for one in moves if _may_move(*one[1:])):
                for _, tensor, offset in some:
                    copying.copy(tensor.data_ptr(), tensor.nbytes, offset)
                copying.wait()
                # At once, so that what they leave is free before others come.
                for name, tensor, offset in some:
                    tensor.data = self.memory.part(offset, tensor)
                    self.tenants[name] = tensor.data_ptr()
                    moved += tensor.nbytes
        return moved


def _in_portions(moves: Iterable[Move]) -> Iterator[list[Move]]:
    some: list[Move] = []
    size_bytes = 0
    for one in moves:
        some.append(one)
        size_bytes += one[1].nbytes
        if size_bytes >= _MOVED_AT_ONCE:
            yield some
            some, size_bytes = [], 0
    if some:
        yield some


def _may_move(tensor: torch.Tensor, offset: int) -> bool:
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
