"""What all ways of sparse training share: masks, where they are applied, their state, and what is logged.

The numbers of kept weights and the steps at which masks change are arithmetic without tensors. A mask is a tensor of
ones and zeros with the shape and type of its parameter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_cli.data import sample_seed
from trainer_cli.dtensor import Target, is_dtensor, local_of, part_of, whole_of
from trainer_cli.errors import ConfigError
from trainer_cli.layout import STEP_MODULES
from trainer_cli.patterns import matches
from trainer_cli.state import clean_name, unwrap
from trainer_cli.terminal import format_count, format_first
from trainer_cli.torch_compat import foreach_mul_
from trainer_cli.trainer import Callback
from trainer_cli.values import check_choice

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer import Trainer, TrainingLoop

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


def erdos_renyi_kernel(shapes: Shapes, sparsity: float) -> dict[str, float]:
    """The sparsity of each parameter, so that all together have `sparsity`, by the Erdős-Rényi-Kernel rule of RigL
    (Evci et al., 2020, arXiv:1911.11134): the density is proportional to the sum of a parameter's sizes over their
    product, and at most 1.
    """
    raw = {name: sum(shape) / math.prod(shape) for name, shape in shapes.items()}
    # Numbers of weights from here on: all that are kept, and those of the parameters that are not dense.
    total = (1 - sparsity) * sum(map(math.prod, shapes.values()))
    dense: set[str] = set()
    # A density above 1 is cut to 1, and the rest shares what that parameter cannot take.
    while True:
        kept = total - sum(math.prod(shapes[name]) for name in dense)
        unscaled = sum(raw[name] * math.prod(shapes[name]) for name in shapes if name not in dense)
        scale = kept / unscaled if unscaled else 0.0
        full = {name for name in shapes if name not in dense and raw[name] * scale > 1}
        if not full:
            break
        dense |= full
    return {name: 0.0 if name in dense else 1 - raw[name] * scale for name in shapes}


def cubic(step: int, start: int, stop: int, initial: float, final: float) -> float:
    """The sparsity at a step of gradual magnitude pruning: it rises from `initial` at `start` to `final` at `stop`,
    fast first (Zhu & Gupta, 2017, arXiv:1710.01878, equation 1).
    """
    if step >= stop:
        return final
    remaining = 1 - max(0, step - start) / (stop - start)
    return final + (initial - final) * remaining**3


def cosine(step: int, stop: int) -> float:
    """The part of its drop fraction that RigL uses at a step: from 1, along a cosine, to 0 at `stop`."""
    return (1 + math.cos(math.pi * min(step, stop) / stop)) / 2


def kept(size: int, sparsity: float) -> int:
    """How many of `size` weights are kept; at least one."""
    return max(1, size - round(size * sparsity))


def put(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor; of plain values into a sharded one this rank's part."""
    if is_dtensor(tensor) and not is_dtensor(values):
        values = Target(tensor, part_of("mask", tensor).shard).narrowed(values)
    local_of(tensor).copy_(local_of(values))


def largest(scores: Tensor, count: int) -> Tensor:
    """A mask of the `count` largest scores."""
    mask = torch.zeros_like(scores)
    mask.view(-1)[torch.topk(scores.reshape(-1), count).indices] = 1
    return mask


def random_scores(like: Tensor, seed: int) -> Tensor:
    """Random numbers from 0 to 1 for each weight, that depend on the seed and the type of device alone."""
    # On the device: a mask of a large matrix is neither drawn on the host nor copied.
    generator = torch.Generator(like.device).manual_seed(seed % 2**63)
    return torch.rand(like.shape, generator=generator, device=like.device)


def replaced(mask: Tensor, weight: Tensor, growth: Tensor, drop: int, grow: int, active: int) -> Tensor:
    """A mask without the `drop` smallest of the `active` weights, and with `grow` others that have the largest growth
    scores (of at least 0). Weights just dropped may grow again, as in RigL.
    """
    # Scores are at least 0, so -1 is never among the largest of those that count.
    remaining = largest(torch.where(mask > 0, weight.abs().float(), -1.0), active - drop)
    return (remaining + largest(torch.where(remaining > 0, -1.0, growth.float()), grow)).to(mask.dtype)


class Init(StrEnum):
    """Which weights are kept at first."""

    random = "random"
    magnitude = "magnitude"
    zeros = "zeros"


class Distribution(StrEnum):
    """How sparse each parameter is."""

    uniform = "uniform"
    erk = "erk"


class Sparsity(Callback):
    """Holds weights at zero by a mask, which is constant here (static sparse training); subclasses change it.

    Gradients are masked before they are clipped, weights after each optimizer step, and the optimizer's state when
    the mask changes, so that a weight that grows begins with 0 and no momentum. Masks are in every checkpoint, as
    booleans. `train/sparsity` is logged: the share of masked weights among those that have a mask. Masks are the same
    on all processes. Of a sharded parameter each has its part; to change a mask, one parameter at a time is gathered.

    Args:
        sparsity: the share of weights that are zero; or a mapping of globs of names to shares, the first that matches.
        parameters, exclude: globs of parameter names, or `re:` and a regular expression. Of those that match, trained
            parameters of at least two dimensions have a mask.
        init: `magnitude` keeps the largest weights; `random` any; `zeros` those that are not zero already, as in a
            sparse model that is fine-tuned (`sparsity` is not used then).
        distribution: `uniform`: each parameter has this sparsity; `erk`: all together have, large ones more (Evci et
            al., 2020, arXiv:1911.11134).
        per_layer: log `train/sparsity/NAME` too.
    """

    least_dimensions = 2
    """Of a parameter that has a mask."""

    def __init__(
        self,
        sparsity: float | Mapping[str, float],
        parameters: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        init: str = "random",
        distribution: str = "uniform",
        per_layer: bool = False,
    ) -> None:
        self.sparsity = {"*": sparsity} if not isinstance(sparsity, Mapping) else dict(sparsity)
        for value in self.sparsity.values():
            check_share("sparsity", value)
        check_choice("init", init, Init)
        check_choice("distribution", distribution, Distribution)
        if distribution == Distribution.erk and isinstance(sparsity, Mapping):
            raise ConfigError("distribution is erk, which needs one number as sparsity", location="distribution")
        self.parameters = [parameters] if isinstance(parameters, str) else list(parameters)
        self.exclude = [exclude] if isinstance(exclude, str) else list(exclude)
        self.init, self.distribution, self.per_layer = Init(init), Distribution(distribution), per_layer
        self._weights: dict[str, nn.Parameter] = {}
        self._masks: dict[str, Tensor] = {}
        self._targets: dict[str, float] = {}
        self._active: dict[str, int] = {}
        """How many weights of each are not masked."""
        self._begun = False
        """Whether the first masks were made, here or in the checkpoint."""
        self._seed = 0
        self._names_of: dict[int, list[str]] = {}
        """By id of an optimizer: the names of its masked parameters."""

    def setup(self, trainer: Trainer) -> None:
        """Find the parameters that have a mask, how sparse each is to be, and the optimizer of each."""
        self._seed = trainer.seed or 0
        can_be_sparse = {
            clean_name(name): parameter
            for name, parameter in unwrap(trainer.model).named_parameters()
            if parameter.requires_grad and parameter.ndim >= self.least_dimensions
        }
        self._weights = {
            name: parameter
            for name, parameter in can_be_sparse.items()
            # What a step holds, such as a loss with a matrix, is no part of the model that is to be sparse.
            if not name.startswith(f"{STEP_MODULES}.")
            and any(matches(name, glob) for glob in self.parameters)
            and not any(matches(name, glob) for glob in self.exclude)
        }
        if not self._weights:
            raise ConfigError(
                "no parameter has a mask",
                location="sparsity.parameters",
                hint=f"They could be: {list(can_be_sparse)[:20]}.",
            )
        if self.distribution is Distribution.erk:
            shapes = {name: tuple(weight.shape) for name, weight in self._weights.items()}
            self._targets = erdos_renyi_kernel(shapes, self.sparsity["*"])
        else:
            self._targets = {name: self._share_of(name) for name in self._weights}
        self._masks = {name: torch.ones_like(weight, requires_grad=False) for name, weight in self._weights.items()}
        for optimizer in trainer.optimizers.values():
            parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            self._names_of[id(optimizer)] = [name for name, weight in self._weights.items() if id(weight) in parameters]

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Make the first masks unless a checkpoint had them, and mask the weights where they are new to them."""
        # Masks of a checkpoint are loaded before; new ones would take their place.
        is_new = not self._begun
        if is_new:
            self._begun = True
            self.begin()
        self._count_active()
        # New masks do not hold for the weights yet. Those of a training that continues do, unless another callback
        # writes weights behind them: a straight run trains with these until the next optimizer step masks them.
        if is_new or not trainer.resumed:
            for optimizer in trainer.optimizers.values():
                self._apply(optimizer)

    def on_fit_end(self, trainer: Trainer, loop: TrainingLoop) -> None:
        """Warn of weights that are masked and not zero."""
        differing = {
            name: count
            for name, weight in self._weights.items()
            if (count := int(((whole_of(weight.detach()) != 0) & (whole_of(self._masks[name]) == 0)).sum()))
        }
        if differing:
            log.warning(
                "sparsity: %s of %s are not zero though they are masked: a callback or a step writes weights after the "
                "optimizer step. Let it leave weights that are zero alone",
                format_count(sum(differing.values()), "weight"), format_first(list(differing), 3),
            )  # fmt: skip

    def begin(self) -> None:
        """Make the first masks, of the weights that the training begins with."""
        for index, (name, weight) in enumerate(self._weights.items()):
            count = kept(weight.numel(), self._targets[name])
            if self.init is Init.zeros:
                mask = whole_of(weight.detach()) != 0
            elif self.init is Init.magnitude:
                mask = largest(whole_of(weight.detach()).abs(), count)
            else:
                mask = largest(random_scores(weight, sample_seed(self._seed, 0, index)), count)
            put(self._masks[name], mask)

    def change(self, step: int, names: Sequence[str]) -> bool:
        """Change the masks of these parameters of an optimizer before its step `step`; their gradients are those of
        all weights. True if it did."""
        return False

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        """Change the masks that are due, and mask the gradients."""
        if self.change(trainer.progress.step + 1, self._names_of[id(optimizer)]):
            self._apply(optimizer)
        names = [name for name in self._names_of[id(optimizer)] if self._weights[name].grad is not None]
        grads = [local_of(grad) for name in names if (grad := self._weights[name].grad) is not None]
        # Before clipping, which is of the norm of what is trained.
        foreach_mul_(grads, self._local_masks(names))

    def on_after_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        """Mask the weights."""
        # Weight decay and momentum move weights without a gradient, too.
        names = self._names_of[id(optimizer)]
        with torch.no_grad():
            foreach_mul_([local_of(self._weights[name]) for name in names], self._local_masks(names))

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Log the share of weights that are masked."""
        sizes = {name: mask.numel() for name, mask in self._masks.items()}
        values = {"train/sparsity": 1 - sum(self._active.values()) / sum(sizes.values())}
        if self.per_layer:
            values |= {f"train/sparsity/{name}": 1 - self._active[name] / size for name, size in sizes.items()}
        trainer.log_metrics(values)

    def state_dict(self) -> dict[str, Any]:
        """The masks by parameter name, as booleans."""
        return {"begun": self._begun, "masks": {name: mask.bool() for name, mask in self._masks.items()}}

    def check_state(self, state: dict[str, Any]) -> Iterable[str]:
        """Say which masks of a checkpoint do not fit the parameters."""
        saved = {clean_name(name, self._masks): mask for name, mask in state["masks"].items()}
        for name, mask in saved.items():
            if name not in self._masks:
                yield f"{name}: has a mask in the checkpoint, but none here"
            elif mask.shape != self._masks[name].shape:
                yield f"{name}: its mask has shape {tuple(mask.shape)} in the checkpoint"
        yield from (f"{name}: has no mask in the checkpoint" for name in self._masks if name not in saved)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the masks."""
        self._begun = bool(state["begun"])
        for name, mask in state["masks"].items():
            put(self._masks[clean_name(name, self._masks)], mask)
        self._count_active()

    def _count_active(self) -> None:
        """Count the weights that are not masked."""
        self._active = {name: int(whole_of(mask).count_nonzero()) for name, mask in self._masks.items()}

    def _local_masks(self, names: Sequence[str]) -> list[Tensor]:
        """The masks of these parameters, of a sharded one the part of this rank."""
        return [local_of(self._masks[name]) for name in names]

    def _share_of(self, name: str) -> float:
        """The sparsity of a parameter, by the first glob that matches. Raises ConfigError if none does."""
        share_of_name = next((share for glob, share in self.sparsity.items() if matches(name, glob)), None)
        if share_of_name is None:
            raise ConfigError(
                f"no glob of sparsity matches {name}", location="sparsity.sparsity", hint="Add '*', or exclude it."
            )
        return float(share_of_name)

    def _apply(self, optimizer: Optimizer) -> None:
        """Mask the weights of an optimizer, and its state of them."""
        with torch.no_grad():
            for name in self._names_of[id(optimizer)]:
                weight, mask = self._weights[name], self._masks[name]
                local_of(weight).mul_(local_of(mask))
                # States of the weight's shape, such as moments; a step count has another.
                for state in optimizer.state.get(weight, {}).values():
                    if isinstance(state, Tensor) and state.shape == mask.shape:
                        local_of(state).mul_(local_of(mask))


def check_share(key: str, value: object) -> None:
    """Refuse what is no share from 0 to below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{key} is {value!r}, but it must be at least 0 and below 1", location=key)
