"""Read a tensor file straight into live tensors, without a copy of their content in between.

Live tensors must not be touched before the digest of the whole file was verified, so the file is read twice: first to
verify it, then into the tensors, from the page cache. The second digest proves that both readings were the same. This
takes less time than to allocate memory for a copy, and none of that memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from typing import Any

import torch

from trainer_cli.errors import CheckpointError
from trainer_cli.manifest import DamagedCheckpoint
from trainer_cli.tensor_files.elements import DTYPES
from trainer_cli.tensor_files.header import TensorEntry

_SMALLEST_SHARE = 0.5
"""Minimum share of a file's bytes for which a second reading of the whole file is faster than a copy of the tensors."""


class TensorName(str):
    """The name of a stored tensor, in the place of that tensor."""

    __slots__ = ()


class LiveTensors:
    """The tensors of a live state that can be filled by reading into their memory.

    Args:
        state: the live state, with the keys of the checkpoint.
    """

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._state = state
        self._by_name: dict[str, torch.Tensor] = {}
        self._second_reads: list[Callable[[], None]] = []

    def match(self, names: Mapping[str, Any], shared: Container[str]) -> None:
        """Find the live tensor of each stored tensor that has one.

        Args:
            names: the state with a `TensorName` in place of each tensor.
            shared: names of stored tensors that are tied, or are views or their bases. These are read into new memory:
                many tensors are copied from a tied one, and views are made of their base.
        """
        pairs: list[tuple[str, torch.Tensor]] = []
        all_tensors: list[torch.Tensor] = []
        _collect(self._state, names, pairs, all_tensors)
        unshared = _without_shared_memory(all_tensors)
        count_of = Counter(name for name, _ in pairs)
        self._by_name = {
            name: tensor
            for name, tensor in pairs
            if count_of[name] == 1 and name not in shared and id(tensor) in unshared
        }

    def select(self, layout: Iterable[TensorEntry], file_bytes: int) -> dict[str, torch.Tensor]:
        """The live tensors, by stored name, that a second reading of a file is to fill. Empty if they are so small a
        part of the file that a copy takes less time."""
        selected = {
            entry.name: tensor
            for entry in layout
            if (tensor := self._by_name.get(entry.name)) is not None and _takes_bytes_of(tensor, entry)
        }
        pays = sum(tensor.nbytes for tensor in selected.values()) >= _SMALLEST_SHARE * file_bytes
        return selected if pays else {}

    def read_later(self, second_read: Callable[[], None]) -> None:
        """Fill tensors by this function once everything was verified and compared."""
        self._second_reads.append(second_read)

    def read(self) -> None:
        """Fill the selected tensors.

        Raises:
            CheckpointError: a file has changed since it was verified, or cannot be read any more. The live state is
                partly overwritten.
        """
        for second_read in self._second_reads:
            try:
                second_read()
            except (OSError, DamagedCheckpoint) as error:
                # Not as a DamagedCheckpoint, of which nothing is loaded.
                raise CheckpointError(
                    f"the checkpoint was intact, and could not be read again into the live state: {error}",
                    cure="The state is partly overwritten: load another checkpoint before you use it.",
                ) from error


def _collect(
    state: Mapping[Any, Any],
    names: Mapping[Any, Any],
    pairs: list[tuple[str, torch.Tensor]],
    all_tensors: list[torch.Tensor],
) -> None:
    """Append the tensors of a live state to `all_tensors`, and those with a stored name to `pairs`."""
    for key, value in state.items():
        saved = names.get(key)
        if isinstance(value, torch.Tensor):
            all_tensors.append(value)
            if isinstance(saved, TensorName):
                pairs.append((saved, value))
        # Another mapping is replaced as a whole, and so are the tensors in it.
        elif isinstance(value, MutableMapping):
            _collect(value, saved if isinstance(saved, Mapping) else {}, pairs, all_tensors)


def _without_shared_memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The `id` of each plain tensor on the CPU whose memory no other of them shares."""
    plain = [tensor for tensor in tensors if type(tensor) in (torch.Tensor, torch.nn.Parameter) and _has_memory(tensor)]
    # By the memory of their storages: two storages can be made of the same memory, as with an array.
    ranges = sorted((storage.data_ptr(), storage.nbytes(), id(tensor)) for tensor, storage in _storages(plain))
    unshared: set[int] = set()
    last_id, last_end = 0, 0
    for begin, size_bytes, tensor_id in ranges:
        if begin < last_end:
            unshared.discard(last_id)
        else:
            unshared.add(tensor_id)
        if begin + size_bytes > last_end:
            last_id, last_end = tensor_id, begin + size_bytes
    return unshared


def _storages(tensors: Iterable[torch.Tensor]) -> Iterable[tuple[torch.Tensor, torch.UntypedStorage]]:
    """Each tensor with its storage."""
    return ((tensor, tensor.untyped_storage()) for tensor in tensors)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense, on the CPU, and has elements."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    if tensor.is_nested or tensor.is_quantized or torch.nn.parameter.is_lazy(tensor):
        return False
    return tensor.numel() > 0


def _takes_bytes_of(tensor: torch.Tensor, entry: TensorEntry) -> bool:
    """Whether the bytes of a stored tensor can be read into this tensor's memory as they are."""
    # Booleans are checked before they are copied, because only 0 and 1 are valid.
    if tensor.dtype is not DTYPES[entry.code] or tensor.dtype is torch.bool:
        return False
    is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return is_plain and tuple(tensor.shape) == entry.shape
