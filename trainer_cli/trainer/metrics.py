"""Read loss, weight and metrics from a model's outputs, and average them.

Batches: find and move the tensors in any container, and the number of samples.

How many samples a batch holds: as its loader says, else the leading size of its first tensor.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from trainer_cli.errors import UserError
from trainer_cli.parallel.process_group import ALONE, ProcessGroup
from trainer_cli.parallel.same import check_same_losses


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on `device`.

    Containers keep their type: mappings, lists, tuples, named tuples, dataclasses, PackedSequence, and whatever has a
    method `to`. Everything else stays as it is.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if type(batch) is dict:
        return {key: to_device(value, device) for key, value in batch.items()}
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return _mapping_like(batch, {key: to_device(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    if _is_dataclass(batch):
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # A frozen dataclass too.
            object.__setattr__(moved, field.name, to_device(getattr(batch, field.name), device))
        return moved
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor in a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for part in parts_of_batch(batch):
            yield from tensors_of(part)


def leading_size(batch: Any) -> int | None:
    """The leading size of the first tensor in a batch that has one: how many samples it holds. None without any."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, PackedSequence):
        # Packed by time step, and the first step has every sequence. These sizes are in host memory.
        return int(batch.batch_sizes[0])
    return next((size for size in map(leading_size, parts_of_batch(batch)) if size is not None), None)


def parts_of_batch(batch: Any) -> Iterable[Any]:
    """What a container of a batch holds; nothing for other objects."""
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    if _is_dataclass(batch):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return vars(batch).values() if hasattr(batch, "to") and hasattr(batch, "__dict__") else ()


def _is_dataclass(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def _mapping_like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same type and attributes with other values."""
    if not hasattr(batch, "__setitem__"):
        return type(batch)(values)  # type: ignore[call-arg]
    moved: Any = copy.copy(batch)
    for key, value in values.items():
        moved[key] = value
    return moved


log = logging.getLogger(__name__)


def sample_count(batch: Any, known: int | None = None) -> int:
    """Samples in a batch.

    Args:
        known: what the loader says; None: it does not say, so that the leading size of the first tensor counts.

    Raises:
        UserError: the loader does not say, and the batch holds no tensor with a leading dimension.
    """
    size = leading_size(batch) if known is None else known
    if size is None:
        raise UserError(
            f"cannot tell how many samples a batch of type {type(batch).__name__} holds: it has no tensor with a "
            "leading dimension",
            cure="Give batches as tensors, or as lists, tuples, mappings or dataclasses of them.",
        )
    return size


class SampleCheck:
    """Warns, once for each loader, of a batch whose form contradicts the number of samples that it counts as.

    Each batch is looked at if its loader says how many samples it has, up to the first contradiction: a `collate_fn`
    may drop samples now and then. Of another loader only the first batch is.
    """

    def __init__(self) -> None:
        self._done: set[str] = set()

    def check(self, loader: Any, name: str, batch: Any, size: int, outputs: Mapping[str, Any]) -> None:
        """Check a batch that counts as `size` samples. The model may say otherwise by `weight`."""
        if name in self._done:
            return
        known = loader.batch_samples is not None
        if known and leading_size(batch) == size:
            return
        stated = getattr(loader, "stated_batch_size", None)
        reason = _contradiction(batch, size) if known else _ambiguity(batch, size, stated)
        if not known or reason is not None:
            self._done.add(name)
        if reason is not None and "weight" not in outputs:
            log.warning(
                "a batch of '%s' counts as %d samples in means and accumulated gradients, but %s. Return 'weight' from "
                "the model, such as the number of samples in the batch, if it should count as another number.",
                name, size, reason,
            )  # fmt: skip


def _contradiction(batch: Any, size: int) -> str | None:
    """Why a batch may not hold as many samples as its loader took, or None."""
    items = list(_items(batch))
    if any(_rows(item) == size or (isinstance(item, list | tuple) and len(item) == size) for item in items):
        return None
    rows = next(filter(None, map(_rows, items)), None)
    return None if rows is None else f"its first tensor has {rows} rows"


def _ambiguity(batch: Any, size: int, batch_size: int | None) -> str | None:
    """Why the leading size of the first tensor may not be the number of samples, or None."""
    rows = sorted({rows for item in _items(batch) if (rows := _rows(item)) is not None})
    if len(rows) > 1:
        return f"its tensors have {', '.join(map(str, rows[:5]))} rows"
    if batch_size is not None and batch_size != size:
        return f"its loader has batch_size={batch_size}"
    if isinstance(batch, list | tuple) and len(batch) != size and _are_samples(batch):
        return f"it is a list of {len(batch)} mappings with the same keys"
    return None


def _are_samples(batch: list[Any] | tuple[Any, ...]) -> bool:
    return len(batch) > 1 and all(isinstance(item, Mapping) and item.keys() == batch[0].keys() for item in batch)


def _items(batch: Any) -> Iterator[Any]:
    """A batch and all that it contains, each object once, in order."""
    left, seen = [batch], set[int]()
    while left:
        item = left.pop()
        if id(item) not in seen:
            seen.add(id(item))
            yield item
            if _rows(item) is None:
                left.extend(reversed(list(parts_of_batch(item))))


def _rows(item: Any) -> int | None:
    """The leading size of a tensor, or the number of packed sequences."""
    return leading_size(item) if isinstance(item, Tensor | PackedSequence) else None


Number = int | float


def batch_weight(outputs: Mapping[str, Any], size: int) -> Number | Tensor:
    """The weight of a batch in means and gradients: `weight` in the outputs, else its number of samples."""
    weight: Number | Tensor = outputs.get("weight", size)
    if not isinstance(weight, Tensor):
        return weight
    # 16-bit sums of weights would be wrong by whole samples.
    weight = weight.detach().reshape(())
    return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight


_LOSS = "Compute it in forward, such as `return torch.nn.functional.cross_entropy(outputs, labels)`."


def read_outputs(outputs: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """Loss and other outputs of a model: a scalar tensor, `(loss, outputs)`, or a mapping with `loss`.

    Raises:
        UserError: the outputs are of none of these forms.
    """
    rest: Mapping[str, Any] = {}
    if isinstance(outputs, Tensor):
        loss = outputs
    elif isinstance(outputs, Mapping):
        if "loss" not in outputs:
            found = sorted(map(str, outputs))
            raise UserError(f"the model returned a mapping without 'loss'; it has {found}", cure=_LOSS)
        loss, rest = outputs["loss"], outputs
    elif isinstance(outputs, tuple) and len(outputs) == 2:
        loss, rest = outputs[0], outputs[1] if isinstance(outputs[1], Mapping) else rest
    else:
        raise UserError(
            f"the model returned {type(outputs).__name__}, expected a loss, (loss, outputs), or a mapping with 'loss'",
            cure=_LOSS,
        )
    if not _is_scalar(loss):
        if isinstance(outputs, tuple) and _is_scalar(outputs[1]):
            what = "the model returned a pair whose second part is the loss, expected (loss, outputs)"
            raise UserError(what, cure="Return the loss first: `return loss, outputs`.")
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"the model's loss is {what}, expected a scalar tensor", cure=_LOSS)
    return loss, rest


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def is_metric(value: Any) -> bool:
    """Whether it gathers over batches itself, as the metrics of torchmetrics do."""
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


def gather_among(metric: Any, group: ProcessGroup) -> None:
    """Let a metric of torchmetrics gather over the ranks that have different samples, unless it has a group."""
    if group.data_group is not None and isinstance(metric, nn.Module):
        for part in metric.modules():
            if getattr(part, "process_group", group) is None:
                part.process_group = group.data_group  # type: ignore[assignment]


def check_gathers(name: str, metric: Any, processes: int) -> None:
    """Refuse a metric that knows the samples of its own process alone, if there are several.

    Raises:
        UserError: it is none of torchmetrics, whose `compute` gathers over the processes.
    """
    if processes > 1 and not any(hasattr(metric, name) for name in ("sync", "compute_groups")):
        raise UserError(
            f"the metric '{name}' is a {type(metric).__name__}, which has the samples of one of {processes} processes",
            cure="Use a metric of torchmetrics, or return sums or means from the model's forward.",
        )


def scalars(name: str, value: Any) -> dict[str, float | Tensor]:
    """What a metric computed, by name: a number, or a mapping of names to numbers; whatever else is left out."""
    if isinstance(value, Mapping):
        return {key: one for part, own in value.items() for key, one in scalars(f"{name}/{part}", own).items()}
    if isinstance(value, Tensor):
        return {name: value.detach().reshape(())} if value.numel() == 1 else {}
    return {name: float(value)} if isinstance(value, _NUMBERS) else {}


_NUMBERS = (int, float, np.integer, np.floating)
_NOT_METRICS = frozenset({"loss", "weight", "tokens"})


class WeightedMeans:
    """Weighted means of scalars, summed on the device; the host waits only in `means`.

    `only_finite`: a batch whose loss is not finite is not counted.

    A metric stays in the state after `reset`, as zero, so that the layout of a checkpoint does not change.
    """

    def __init__(self, device: torch.device, *, only_finite: bool = False) -> None:
        self._device, self._only_finite = device, only_finite
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Number | Tensor] = {}
        self._counted: dict[str, None] = {}
        """Names since the last reset, in order of appearance."""
        self.gathering: dict[str, Any] = {}
        """Metrics in the outputs that gather over batches themselves, by name. They are not averaged here."""
        self.loss_is_finite = True
        """Whether all losses in the last `means` were finite; a mean is NaN also if all weights are zero."""

    def add(self, loss: Tensor, outputs: Mapping[str, Any], weight: Number | Tensor) -> None:
        """Count one batch: its loss, and every other number of its outputs, as a tensor without dimensions or not. With
        a weight of 0 it adds nothing, NaN or not."""
        loss = loss.detach().reshape(())
        if self._only_finite:
            counts = torch.isfinite(loss)
            weight, loss = counts * weight, torch.where(counts, loss, 0)
            outputs = {name: _zero_unless(counts, value) for name, value in outputs.items() if name not in _NOT_METRICS}
        if isinstance(weight, Tensor):
            weight = weight.to(self._device, self._dtype, non_blocking=True)
        self._count("loss", loss, weight)
        for name, value in outputs.items():
            if name in _NOT_METRICS:
                continue
            if isinstance(value, Tensor):
                if value.ndim == 0 and not value.is_complex() and value.dtype is not torch.bool:
                    self._count(name, value.detach(), weight)
            elif isinstance(value, _NUMBERS):
                if not isinstance(value, bool):
                    self._count(name, float(value), weight)
            elif is_metric(value):
                self.gathering[name] = value

    def _count(self, name: str, value: float | Tensor, weight: Number | Tensor) -> None:
        total = self._sums.get(name)
        if total is None:
            total = self._sums[name] = torch.zeros((), dtype=self._dtype, device=self._device)
            self._weights[name] = 0
        self._counted[name] = None
        # A Python number is a kernel argument; a tensor would be copied, with a wait.
        if not isinstance(weight, Tensor):
            if weight != 0:
                total.add_(value, alpha=weight)
        elif isinstance(value, Tensor):
            value = value.to(self._device, self._dtype, non_blocking=True)
            # NaN times 0 is NaN.
            total.addcmul_(value.masked_fill(weight == 0, 0), weight)
        elif math.isfinite(value):
            total.add_(weight, alpha=value)
        else:
            total.add_(weighted(value, weight))
        self._weights[name] = self._weights[name] + weight

    @property
    def names(self) -> list[str]:
        """What has been counted."""
        return list(self._counted)

    @property
    def empty(self) -> bool:
        """Whether nothing has been counted."""
        return not self._counted

    def means(self, group: ProcessGroup = ALONE) -> dict[str, float]:
        """The means so far, over the batches of all ranks; with one wait for the device. Collective."""
        if group.world_size > 1:
            return self._means_of_all(group)
        if not self._counted:
            return {}
        values = [self._sums[name] / self._weights[name] for name in self._counted]
        *means, loss_sum = torch.stack([*values, self._sums["loss"]]).tolist()
        self.loss_is_finite = math.isfinite(loss_sum)
        return dict(zip(self._counted, means, strict=True))

    def _means_of_all(self, group: ProcessGroup) -> dict[str, float]:
        # A rank may lack a metric, or have counted no batch.
        found = group.gather((list(self._counted), float(self._sums.get("loss", 0))))
        if group.tensor_size > 1:
            check_same_losses(group, [loss for _, loss in found])
        names = list(dict.fromkeys(name for own, _ in found for name in own))
        own = [[float(values.get(name, 0)) for name in names] for values in (self._sums, self._weights)]
        sums, weights = group.sum(torch.tensor(own, dtype=torch.float64))
        loss = names.index("loss") if "loss" in names else None
        self.loss_is_finite = loss is None or math.isfinite(sums[loss])
        return dict(zip(names, (sums / weights).tolist(), strict=True))

    def reset(self) -> None:
        """Forget everything counted."""
        self._counted.clear()
        for name, total in self._sums.items():
            total.zero_()
            weight = self._weights[name]
            self._weights[name] = torch.zeros_like(weight) if isinstance(weight, Tensor) else 0

    def state_dict(self) -> dict[str, Any]:
        """The sums and weights, so that a resume continues the mean."""
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


def weighted(value: Any, weight: Number | Tensor) -> Any:
    """A number or tensor times its weight; 0 for a weight of 0, NaN or not. Does not wait for the device."""
    if not isinstance(weight, Tensor):
        return value * weight if weight != 0 else 0
    if not isinstance(value, Tensor):
        value = torch.full_like(weight, value, dtype=torch.float32)
    product: Tensor = value * weight
    return product.masked_fill((weight == 0).to(product.device, non_blocking=True), 0)


def is_known_zero(weight: Number | Tensor) -> bool:
    """Whether a weight is 0, as far as is known without a wait for a device."""
    return bool(weight == 0) if not isinstance(weight, Tensor) or weight.device.type == "cpu" else False


def _zero_unless(counts: Tensor, value: Any) -> Any:
    """A metric of a batch, as a tensor: zero if the batch does not count."""
    number = isinstance(value, _NUMBERS) and not isinstance(value, bool)
    return torch.where(counts, value, 0) if number or (isinstance(value, Tensor) and value.ndim == 0) else value


def merged(first: Mapping[str, Any], others: Sequence[Mapping[str, Any]], *, empty: bool) -> dict[str, Any]:
    """The saved sums of several ranks as those of one; `empty`: only their names, of a rank that adds nothing."""
    sums, weights, counted = (
        dict(first["sums"]),
        dict(first["weights"]),
        dict.fromkeys(first.get("counted", first["sums"])),
    )
    for one in others:
        for name in one["sums"]:
            sums[name] = sums[name] + one["sums"][name] if name in sums else one["sums"][name]
            weights[name] = weights.get(name, 0) + one["weights"][name]
        counted |= dict.fromkeys(one["counted"])
    if empty:
        sums = {name: torch.zeros_like(total) for name, total in sums.items()}
        weights, counted = dict.fromkeys(weights, 0), {}
    return {"sums": sums, "weights": weights, "counted": list(counted)}
