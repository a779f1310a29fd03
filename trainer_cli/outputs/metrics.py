"""Weighted means of what a model returns for batches, summed on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_cli.outputs.live_loss import LiveLoss
from trainer_cli.outputs.returned import OutputKind
from trainer_cli.parallel import ALONE, ProcessGroup, check_same_losses


class WeightedMeans:
    """Weighted means of scalars, summed on the device. The host waits only in `means`.

    After `reset` a metric stays in the state as zero, so that the layout of a checkpoint does not change.

    Args:
        only_finite: do not count batches with a loss that is not finite.
    """

    def __init__(self, device: torch.device, *, only_finite: bool = False) -> None:
        self._device, self._only_finite = device, only_finite
        # Exact for counts of samples and tokens, and the sum of a long training loses no digits. MPS lacks it.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float | Tensor] = {}
        self._counted: dict[str, None] = {}
        """Names counted since the last reset, in order of appearance; a dict used as an ordered set."""
        self._names: list[str] | None = None
        """Names of the metrics of all ranks when names were last gathered; None: never."""
        self._rank_names: list[str] = []
        """The names that this rank had counted then."""
        self.gathering: dict[str, Any] = {}
        """Metrics in the outputs that accumulate over batches themselves, by name. They are not averaged here."""
        self.live_loss = LiveLoss()
        self.loss_is_finite = True
        """Whether all losses in the last `means` were finite. The mean is also NaN if all weights are 0."""

    def add(self, loss: Tensor | None, outputs: Mapping[str, Any], weight: float | Tensor) -> None:
        """Count a batch: its loss, and every number or tensor without dimensions in its outputs.

        With a weight of 0 it adds nothing, even if a value is NaN.

        Args:
            loss: None for an evaluation whose model returned none.
        """
        if loss is not None:
            loss = loss.detach()
            if loss.ndim:
                loss = loss.reshape(())
        is_finite: Tensor | None = None
        if self._only_finite and loss is not None:
            # By torch.where, because a test on the host would wait for the device.
            is_finite = torch.isfinite(loss)
            weight, loss = is_finite * weight, torch.where(is_finite, loss, 0)
        if isinstance(weight, Tensor):
            weight = weight.to(self._device, self._dtype, non_blocking=True)
        if loss is not None:
            self._count("loss", loss, weight)
            if self.live_loss.requested:
                self.live_loss.answer(self._sums["loss"], self._weights["loss"])
        for name, value in outputs.items():
            kind = OutputKind.of(name, value)
            if kind is OutputKind.mean:
                if is_finite is not None:
                    value = torch.where(is_finite, value, 0)
                self._count(name, value.detach() if isinstance(value, Tensor) else float(value), weight)
            elif kind is OutputKind.metric:
                self.gathering[name] = value

    def _count(self, name: str, value: float | Tensor, weight: float | Tensor) -> None:
        """Add a value times its weight to the sum of a metric. A tensor as weight is on the device already."""
        total = self._sums.get(name)
        if total is None:
            total = self._sums[name] = torch.zeros((), dtype=self._dtype, device=self._device)
            self._weights[name] = 0
        self._counted[name] = None
        # A Python number becomes an argument of a kernel. As a tensor it would be copied, and the host would wait.
        if not isinstance(weight, Tensor):
            if weight != 0:
                total.add_(value, alpha=weight)
        elif isinstance(value, Tensor):
            value = value.to(self._device, self._dtype, non_blocking=True)
            # They are masked: NaN times a weight of 0 is NaN.
            total.addcmul_(value.masked_fill(weight == 0, 0), weight)
        elif math.isfinite(value):
            total.add_(weight, alpha=value)
        else:
            total.add_(weighted(value, weight))
        self._weights[name] = self._weights[name] + weight

    @property
    def names(self) -> list[str]:
        """Names of the counted metrics."""
        return list(self._counted)

    @property
    def empty(self) -> bool:
        """Whether nothing has been counted."""
        return not self._counted

    def means(self, group: ProcessGroup = ALONE) -> dict[str, float]:
        """The means over the batches of all ranks. Collective; waits for the device once."""
        if group.world_size > 1:
            return self._means_of_all(group)
        if not self._counted:
            return {}
        values = [self._sums[name] / self._weights[name] for name in self._counted]
        # They are stacked, so that one copy to the host brings them all.
        *means, loss_sum = torch.stack([*values, self._sums.get("loss", values[0])]).tolist()
        self.loss_is_finite = "loss" not in self._counted or math.isfinite(loss_sum)
        return dict(zip(self._counted, means, strict=True))

    def _means_of_all(self, group: ProcessGroup) -> dict[str, float]:
        """`means` for several ranks: one sum of numbers, unless a rank has counted other metrics than last time."""
        counted = list(self._counted)
        sums = None if self._names is None else self._sums_of_all(group, has_other_names=counted != self._rank_names)
        if sums is None:
            # A rank may lack a metric, or have counted no batch.
            names = dict.fromkeys(name for rank_names in group.gather(counted) for name in rank_names)
            self._names, self._rank_names = list(names), counted
            sums = self._sums_of_all(group, has_other_names=False)
        assert self._names is not None and sums is not None
        if group.tensor_size > 1:
            check_same_losses(group, group.gather(float(self._sums.get("loss", 0))))
        totals, weights = sums
        loss = self._names.index("loss") if "loss" in self._names else None
        self.loss_is_finite = loss is None or math.isfinite(totals[loss])
        return dict(zip(self._names, (totals / weights).tolist(), strict=True))

    def _sums_of_all(self, group: ProcessGroup, *, has_other_names: bool) -> Tensor | None:
        """The sums and weights over all ranks, by the gathered names; None if some rank has counted other names."""
        assert self._names is not None
        numbers = [float(values.get(name, 0)) for values in (self._sums, self._weights) for name in self._names]
        total = group.sum(torch.tensor([*numbers, has_other_names], dtype=torch.float64))
        return None if total[-1] > 0 else total[:-1].reshape(2, len(self._names))

    def reset(self) -> None:
        """Start the means anew."""
        self._counted.clear()
        for name, total in self._sums.items():
            total.zero_()
            weight = self._weights[name]
            self._weights[name] = torch.zeros_like(weight) if isinstance(weight, Tensor) else 0

    def state_dict(self) -> dict[str, Any]:
        """The sums and weights, from which a resume continues the means."""
        return {"sums": dict(self._sums), "weights": dict(self._weights), "counted": list(self._counted)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved sums."""
        self._sums = {name: total.to(self._device, self._dtype, copy=True) for name, total in state["sums"].items()}
        self._weights = {
            name: weight.to(self._device) if isinstance(weight, Tensor) else weight
            for name, weight in state["weights"].items()
        }
        # Old states hold only counted metrics.
        self._counted = dict.fromkeys(state.get("counted", self._sums))

    @staticmethod
    def merge(first: Mapping[str, Any], states: Sequence[Mapping[str, Any]], *, empty: bool) -> dict[str, Any]:
        """Merge the saved states of ranks into one.

        Args:
            first: state of the first rank.
            states: those of the other ranks.
            empty: keep only the names, for a rank that adds nothing to the means.
        """
        sums, weights = dict(first["sums"]), dict(first["weights"])
        counted = dict.fromkeys(first.get("counted", first["sums"]))
        for state in states:
            for name, total in state["sums"].items():
                sums[name] = sums[name] + total if name in sums else total
                weights[name] = weights.get(name, 0) + state["weights"][name]
            counted |= dict.fromkeys(state["counted"])
        if empty:
            sums = {name: torch.zeros_like(total) for name, total in sums.items()}
            weights, counted = dict.fromkeys(weights, 0), {}
        return {"sums": sums, "weights": weights, "counted": list(counted)}


def weighted(value: Any, weight: float | Tensor) -> Any:
    """A number or tensor times its weight; 0 for a weight of 0, even if the value is NaN."""
    # A tensor is masked: to test its weight here would make the host wait for the device.
    if not isinstance(weight, Tensor):
        return value * weight if weight != 0 else 0
    if not isinstance(value, Tensor):
        value = torch.full_like(weight, value, dtype=torch.float32)
    product: Tensor = value * weight
    return product.masked_fill((weight == 0).to(product.device, non_blocking=True), 0)


def is_known_zero(weight: float | Tensor) -> bool:
    """Whether a weight is 0. False for a weight on a device, which the host would have to wait for."""
    is_on_device = isinstance(weight, Tensor) and weight.device.type != "cpu"
    return not is_on_device and bool(weight == 0)


def join_outputs(results: list[tuple[Tensor, Mapping[str, Any], Any]]) -> dict[str, Any]:
    """Join the (loss, outputs, weight) of microbatches: weighted means, and sums of `tokens` and `weight`."""
    weights = [weight for _, _, weight in results]
    total = sum(weights)

    def mean(values: Iterable[Any]) -> Any:
        if is_known_zero(total):
            return torch.tensor(math.nan)
        return sum(map(weighted, values, weights)) / total

    joined: dict[str, Any] = {"loss": mean(loss.detach() for loss, _, _ in results)}
    for name in results[0][1]:
        values = [outputs[name] for _, outputs, _ in results if name in outputs]
        kinds = {OutputKind.of(name, value) for value in values}
        if kinds == {OutputKind.total}:
            joined[name] = sum(values)
        elif kinds == {OutputKind.mean}:
            joined[name] = mean(values)
    return joined
