"""SelectiveGrad: train chosen elements of parameters, by a constant mask on their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from trainer_cli.errors import ConfigError
from trainer_cli.sparsity.base import Sparsity

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer.trainer import Trainer


class SelectiveGrad(Sparsity):
    """Sets the gradient of all but a share of a parameter's elements to zero, from the first step to the last. The
    mask is in every checkpoint. Parameters whose names do not match are trained as usual. Elements without a gradient
    still shrink by the optimizer's weight decay, if it has any.

    Args:
        share: of the elements that have a gradient; or a mapping of globs of names to shares, the first that matches.
        parameters, exclude: globs of parameter names, or `re:` and a regular expression.
        init: `random` elements; `magnitude`: the largest at the start; `zeros`: those that are not zero at the start
            (`share` is not used then).
    """

    least_dimensions = 0

    def __init__(
        self,
        share: float | Mapping[str, float] = 0.5,
        parameters: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        init: str = "random",
    ) -> None:
        for one in share.values() if isinstance(share, Mapping) else (share,):
            if isinstance(one, bool) or not isinstance(one, int | float) or not 0 < one <= 1:
                raise ConfigError(f"share is {one!r}, but it is above 0 and at most 1", location="share")
        zeros = {glob: 1 - one for glob, one in share.items()} if isinstance(share, Mapping) else 1 - share
        super().__init__(zeros, parameters, exclude, init)

    def on_after_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        """Weights are not masked."""

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Nothing changes, so nothing is logged."""

    def _apply(self, optimizer: Optimizer) -> None:
        """Neither are they at the start."""
