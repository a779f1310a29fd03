"""The samples of a batch that hold NaN."""

from __future__ import annotations

from typing import Any

from trainer_cli.batches.contents import is_dense, tensors_of
from trainer_cli.dtensor import local_of
from trainer_cli.leaves import walk


def rows_with_nan(batch: Any, size: int | None) -> dict[str, list[int]]:
    """Name of a tensor in a batch that contains NaN -> the rows that do. Tensors that are not dense are left out.

    Infinities are not counted, because masks contain them. The rows are empty if the leading size of the tensor is not
    `size`, the number of samples, and if all rows contain NaN, as in padded targets: then no sample is to blame.
    """
    rows: dict[str, list[int]] = {}
    for name, leaf in walk(batch):
        for value in tensors_of(leaf):
            values = local_of(value).detach()
            has_numbers = values.is_floating_point() or values.is_complex()
            if is_dense(values) and has_numbers and bool(values.isnan().any()):
                nan_rows: list[int] = []
                if values.ndim > 0 and values.shape[0] == size:
                    nan_rows = values.isnan().reshape(len(values), -1).any(1).nonzero().flatten().tolist()
                rows[name] = nan_rows if len(nan_rows) != size else []
    return rows
