"""The samples of a batch that hold NaN."""

from __future__ import annotations

from typing import Any

from trainer_cli.batches.contents import is_dense, tensors_of
from trainer_cli.dtensor import local_of
from trainer_cli.leaves import walk


def rows_with_nan(batch: Any, size: int | None) -> dict[str, list[int]]:
    """The names of the tensors in a batch that hold NaN, each with the rows that do. An infinity is none: a mask may
    consist of it. A tensor is without rows if its leading size is not `size`, the number of samples, and if all of them
    hold NaN, as padded targets do: then none is to blame. A tensor that is not dense is left out."""
    rows: dict[str, list[int]] = {}
    for name, leaf in walk(batch):
        for value in tensors_of(leaf):
            values = local_of(value).detach()
            if is_dense(values) and (values.is_floating_point() or values.is_complex()) and bool(values.isnan().any()):
                has_rows = values.ndim > 0 and values.shape[0] == size
                found = values.isnan().reshape(len(values), -1).any(1).nonzero().flatten().tolist() if has_rows else []
                rows[name] = found if len(found) != size else []
    return rows
