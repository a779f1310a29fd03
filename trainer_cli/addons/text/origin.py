"""Where a sample of a dataset of this add-on comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer_cli.addons.text.mixture import MixedDataset
from trainer_cli.addons.text.text import PackedRows


def find_origin(dataset: Any, key: Any) -> tuple[Any, Sequence[str], Sequence[tuple[Any, ...]]]:
    """Find the source of a sample in a mixture, and the documents in a packed row.

    Args:
        key: argument of the dataset's `[]`.

    Returns:
        The key of the sample in its source, the names of the sources, from the outermost mixture to the innermost, and
        the pieces of documents in it.
    """
    sources = []
    while isinstance(dataset, MixedDataset):
        number, key = key
        sources.append(dataset.names[number])
        dataset = dataset.datasets[number]
    return key, sources, dataset.pieces(key) if isinstance(dataset, PackedRows) else ()
