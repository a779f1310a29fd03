"""Static: the mask stays as it was made."""

from __future__ import annotations

from trainer_cli.sparsity.base import Sparsity


class Static(Sparsity):
    """Static sparse training: the weights that are zero at the start stay so. The arguments are those of `Sparsity`."""
