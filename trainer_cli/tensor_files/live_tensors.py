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
            shared: names of tensors whose memory others share. Several tensors are copied from a tied one, and views
                reach into their base: memory of their own is simpler.
        """
        pairs: list[tuple[str, torch.Tensor]] = []
        all_tensors: list[torch.Tensor] = []
        _collect(self._state, names, pairs, all_tensors)
        alone = _without_shared_memory(all_tensors)
        uses = Counter(name for name, _ in pairs)
        self._by_name = {
            name: tensor for name, tensor in pairs if uses[name] == 1 and name not in shared and id(tensor) in alone
        }

    def select(self, layout: Iterable[TensorEntry], file_bytes: int) -> dict[str, torch.Tensor]:
        """The live tensors, by stored name, that a second reading of a file should fill; none if it would not pay."""
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
    alone: set[int] = set()
    previous, previous_end = 0, 0
    for begin, size_bytes, identity in ranges:
        if begin < previous_end:
            alone.discard(previous)
        else:
            alone.add(identity)
        if begin + size_bytes > previous_end:
            previous, previous_end = identity, begin + size_bytes
    return alone


def _storages(tensors: Iterable[torch.Tensor]) -> Iterable[tuple[torch.Tensor, torch.UntypedStorage]]:
    return ((tensor, tensor.untyped_storage()) for tensor in tensors)


def _has_memory(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or torch.nn.parameter.is_lazy(tensor))
        and tensor.numel() > 0
    )


def _takes_bytes_of(tensor: torch.Tensor, entry: TensorEntry) -> bool:
    """Whether the bytes of a stored tensor are those of this tensor's memory."""
    return (
        tensor.dtype is DTYPES[entry.code]
        # Only 0 and 1 are valid booleans: they are checked before they are copied.
        and tensor.dtype is not torch.bool
        and tuple(tensor.shape) == entry.shape
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )
