"""Read whole tensors from a tensor file, into new tensors or into live ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from trainer_cli.manifest import Manifest
from trainer_cli.tensor_files.elements import check_booleans, memory_of, new_tensor
from trainer_cli.tensor_files.header import TensorEntry
from trainer_cli.tensor_files.verified_file import Destination, VerifiedFile

if TYPE_CHECKING:
    from trainer_cli.storage import ReadableFolder
    from trainer_cli.tensor_files.live_tensors import LiveTensors


def read_tensors(
    folder: ReadableFolder, manifest: Manifest, file_name: str, names: Collection[str], live: LiveTensors | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a file that have one of these names. The whole file is digested.

    Args:
        live: tensors that are in the result instead of new ones; `live.read` fills them.
    """

    with VerifiedFile(folder, manifest, file_name) as file:
        layout = file.read_entries()
        in_place = {} if live is None else live.select(layout, file.size_bytes)
        new = [entry for entry in layout if entry.name in names and entry.name not in in_place]
        tensors = {entry.name: new_tensor(file, entry, entry.shape) for entry in new}
        file.read(_destinations(layout, tensors))
    # After the digest was compared, so that a damaged file is reported as one whose digest differs.
    for name, tensor in tensors.items():
        check_booleans(file.path, name, tensor)
    if live is not None and in_place:
        live.read_later(partial(_read_again, folder, manifest, file_name, in_place))
    return tensors | in_place


def _read_again(
    folder: ReadableFolder, manifest: Manifest, file_name: str, in_place: Mapping[str, torch.Tensor]
) -> None:
    """Read the content of live tensors into them. The whole file is digested a second time."""
    with VerifiedFile(folder, manifest, file_name) as file:
        file.read(_destinations(file.read_entries(), in_place))


def _destinations(layout: Iterable[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> Iterator[Destination]:
    """The destinations of the bytes of a file, in order; bytes of other tensors are only digested."""
    for entry in layout:
        if entry.size_bytes:
            yield memory_of(tensors[entry.name]) if entry.name in tensors else entry.size_bytes
