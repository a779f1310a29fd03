"""Train a share of the elements of parameters, and keep the gradients of the others at zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from trainer_cli.addons.sparsity.sparsity import Sparsity
from trainer_cli.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer import Trainer


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
        for value in share.values() if isinstance(share, Mapping) else (share,):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise ConfigError(f"share is {value!r}, but it must be above 0 and at most 1", location="share")
        sparsity = {glob: 1 - value for glob, value in share.items()} if isinstance(share, Mapping) else 1 - share
        super().__init__(sparsity, parameters, exclude, init)

    def on_after_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        """Weights are not masked."""

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Nothing changes, so nothing is logged."""

    def _apply(self, optimizer: Optimizer) -> None:
        """Weights are not masked at the start, either."""
