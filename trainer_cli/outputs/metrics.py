"""Batches, the outputs of a model for them, and weighted means of these outputs.

A batch may be any container of tensors. It counts as many samples as its loader says, else as the leading size of its
first tensor. Its outputs are a loss, and metrics that are averaged with the weight of the batch.
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
from trainer_cli.outputs.live_loss import LiveLoss
from trainer_cli.parallel import ALONE, ProcessGroup, check_same_losses
from trainer_cli.terminal import format_count

log = logging.getLogger(__name__)

Number = int | float
_NUMBERS = (int, float, np.integer, np.floating)
_NOT_METRICS = frozenset({"loss", "weight", "tokens"})
_LOSS = "Compute it in forward, such as `return torch.nn.functional.cross_entropy(outputs, labels)`."


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy every tensor in a batch to `device`.

    Containers keep their type: mappings, lists, tuples, named tuples, dataclasses, and objects with a method `to`, such
    as PackedSequence. Other objects are returned as they are.
    """
    if isinstance(batch, Tensor):
        # From pinned memory the host does not wait for the copy.
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
            # setattr would fail for a frozen dataclass.
            object.__setattr__(moved, field.name, to_device(getattr(batch, field.name), device))
        return moved
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for value in _contents(batch):
            yield from tensors_of(value)


def is_dense(tensor: Tensor) -> bool:
    """Whether each value of a tensor can be looked at: it is not sparse, not nested, and not on the device `meta`."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def named_leaves(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value in the mappings and sequences of a batch or sample with its name: `image`, `views[0].image`."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from named_leaves(value, f"{name}.{key}".lstrip("."))
    elif isinstance(batch, list | tuple):
        for index, value in enumerate(batch):
            yield from named_leaves(value, f"{name}[{index}]")
    elif _is_dataclass(batch):
        yield from named_leaves(vars(batch), name)
    else:
        yield name, batch


def leading_size(batch: Any) -> int | None:
    """The leading size of the first tensor in a batch, or None if no tensor has one."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, PackedSequence):
        # Packed by time step, and every sequence has a first step. These sizes are in host memory.
        return int(batch.batch_sizes[0])
    return next((size for size in map(leading_size, _contents(batch)) if size is not None), None)


def _contents(batch: Any) -> Iterable[Any]:
    """The values in a container of a batch; empty for other objects."""
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
    """Make a mapping with other values, and with the type and attributes of `batch`."""
    if not hasattr(batch, "__setitem__"):
        return type(batch)(values)  # type: ignore[call-arg]
    moved: Any = copy.copy(batch)
    for key, value in values.items():
        moved[key] = value
    return moved


def sample_count(batch: Any, loader_count: int | None = None) -> int:
    """The number of samples in a batch.

    Args:
        loader_count: the number that the loader states; None: it states none, so the leading size of the first tensor
            is used.

    Raises:
        UserError: the loader states no number, and the batch has no tensor with a leading dimension.
    """
    size = leading_size(batch) if loader_count is None else loader_count
    if size is None:
        raise UserError(
            f"cannot tell how many samples a batch of type {type(batch).__name__} holds: it has no tensor with a "
            "leading dimension",
            cure="Give batches as tensors, or as lists, tuples, mappings or dataclasses of them.",
        )
    return size


class SampleCheck:
    """Warn once for each loader if the shape of a batch contradicts its number of samples.

    If the loader states the number, all batches are checked up to the first contradiction, because a `collate_fn` may
    drop samples now and then. Otherwise only the first batch is checked.
    """

    def __init__(self) -> None:
        self._done: set[str] = set()
        """Names of the loaders that need no more checks."""

    def check(self, loader: Any, name: str, batch: Any, size: int, outputs: Mapping[str, Any]) -> None:
        """Check a batch that counts as `size` samples. A `weight` in the model's outputs takes precedence."""
        if name in self._done:
            return
        is_stated = loader.batch_samples is not None
        if is_stated and leading_size(batch) == size:
            return
        batch_size = getattr(loader, "stated_batch_size", None)
        reason = _contradiction(batch, size) if is_stated else _ambiguity(batch, size, batch_size)
        if not is_stated or reason is not None:
            self._done.add(name)
        if reason is not None and "weight" not in outputs:
            log.warning(
                "a batch of '%s' counts as %s in means and accumulated gradients, but %s. Return 'weight' from "
                "the model, such as the number of samples in the batch, if it should count as another number.",
                name, format_count(size, "sample"), reason,
            )  # fmt: skip


def _contradiction(batch: Any, size: int) -> str | None:
    """Why a batch may not hold as many samples as its loader states, or None."""
    values = list(_walk(batch))
    if any(_rows(value) == size or (isinstance(value, list | tuple) and len(value) == size) for value in values):
        return None
    rows = next(filter(None, map(_rows, values)), None)
    return None if rows is None else f"its first tensor has {format_count(rows, 'row')}"


def _ambiguity(batch: Any, size: int, batch_size: int | None) -> str | None:
    """Why the leading size of the first tensor may not be the number of samples, or None."""
    rows = sorted({rows for value in _walk(batch) if (rows := _rows(value)) is not None})
    if len(rows) > 1:
        return f"its tensors have {', '.join(map(str, rows[:5]))} rows"
    if batch_size is not None and batch_size != size:
        return f"its loader has batch_size={batch_size}"
    if isinstance(batch, list | tuple) and len(batch) != size and _are_samples(batch):
        return f"it is a list of {format_count(len(batch), 'mapping')} with the same keys"
    return None


def _are_samples(batch: list[Any] | tuple[Any, ...]) -> bool:
    return len(batch) > 1 and all(isinstance(item, Mapping) and item.keys() == batch[0].keys() for item in batch)


def _walk(batch: Any) -> Iterator[Any]:
    """Yield a batch and all that it contains, each object once, in order."""
    stack, seen = [batch], set[int]()
    while stack:
        value = stack.pop()
        # Objects of a user may refer to each other.
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            if _rows(value) is None:
                stack.extend(reversed(list(_contents(value))))


def _rows(value: Any) -> int | None:
    """The leading size of a tensor, or the number of packed sequences."""
    return leading_size(value) if isinstance(value, Tensor | PackedSequence) else None


def returned_weight(outputs: Any) -> Number | Tensor | None:
    """The `weight` in outputs of a model, or in those of a pair `(loss, outputs)`; None without one.

    Raises:
        UserError: it is a tensor of several elements.
    """
    if type(outputs) is tuple and len(outputs) == 2:
        outputs = outputs[1]
    weight: Number | Tensor | None = outputs.get("weight") if isinstance(outputs, Mapping) else None
    if not isinstance(weight, Tensor):
        return weight
    if weight.numel() != 1:
        raise UserError(
            f"the weight in the outputs has the shape {tuple(weight.shape)}, expected a number for the batch",
            cure="Call that output by another name.",
        )
    # A sum of weights in 16 bits would be wrong by whole samples.
    weight = weight.detach().reshape(())
    return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight


def read_outputs(outputs: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """The loss and the named outputs of a model that returns a loss, `(loss, outputs)`, or a mapping with `loss`.

    Raises:
        UserError: the outputs are something else, or the loss is not a scalar tensor.
    """
    named: Mapping[str, Any] = {}
    if isinstance(outputs, Tensor):
        loss = outputs
    elif isinstance(outputs, Mapping):
        if "loss" not in outputs:
            names = sorted(map(str, outputs))
            raise UserError(f"the model returned a mapping without 'loss'; it has {names}", cure=_LOSS)
        loss, named = outputs["loss"], outputs
    elif isinstance(outputs, tuple) and len(outputs) == 2:
        loss, named = outputs[0], outputs[1] if isinstance(outputs[1], Mapping) else named
    else:
        raise UserError(
            f"the model returned {type(outputs).__name__}, expected a loss, (loss, outputs), or a mapping with 'loss'",
            cure=_LOSS,
        )
    if not _is_scalar(loss):
        if isinstance(outputs, tuple) and _is_scalar(outputs[1]):
            raise UserError(
                "the model returned a pair whose second part is the loss, expected (loss, outputs)",
                cure="Return the loss first: `return loss, outputs`.",
            )
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"the model's loss is {kind}, expected a scalar tensor", cure=_LOSS)
    return loss, named


def read_evaluation(outputs: Any) -> tuple[Tensor | None, Mapping[str, Any]]:
    """The loss and the named outputs of a model in an evaluation, where it need not return a loss.

    Without one it returns a mapping without `loss`, a list (as detectors of torchvision, a mapping for each image), or
    `(None, outputs)`.

    Raises:
        UserError: as from `read_outputs`.
    """
    if isinstance(outputs, Mapping) and outputs.get("loss") is None:
        return None, outputs
    if isinstance(outputs, list):
        return None, {}
    if isinstance(outputs, tuple) and len(outputs) == 2 and outputs[0] is None:
        return None, outputs[1] if isinstance(outputs[1], Mapping) else {}
    return read_outputs(outputs)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def is_metric(value: Any) -> bool:
    """Whether a value is a metric that accumulates over batches itself, as those of torchmetrics do."""
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


def gather_among(metric: Any, group: ProcessGroup) -> None:
    """Let a metric of torchmetrics gather over the ranks with different samples, unless it has a process group."""
    # Over all ranks the samples of a tensor parallel group would count once for each of its ranks.
    if group.data_group is not None and isinstance(metric, nn.Module):
        for module in metric.modules():
            if getattr(module, "process_group", group) is None:
                module.process_group = group.data_group  # type: ignore[assignment]


def check_gathers(name: str, metric: Any, processes: int) -> None:
    """Raise UserError for a metric that has the samples of its process alone, if there are several processes.

    The `compute` of a metric of torchmetrics gathers over the processes.
    """
    if processes > 1 and not any(hasattr(metric, name) for name in ("sync", "compute_groups")):
        raise UserError(
            f"the metric '{name}' is a {type(metric).__name__}, which has the samples of one of {processes} processes",
            cure="Use a metric of torchmetrics, or return sums or means from the model's forward.",
        )


def scalars(name: str, value: Any) -> dict[str, float | Tensor]:
    """The numbers in the result of a metric, by name. Nested mappings are flattened, and other values left out."""
    if isinstance(value, Mapping):
        numbers: dict[str, float | Tensor] = {}
        for key, entry in value.items():
            numbers |= scalars(f"{name}/{key}", entry)
        return numbers
    if isinstance(value, Tensor):
        return {name: value.detach().reshape(())} if value.numel() == 1 else {}
    return {name: float(value)} if isinstance(value, _NUMBERS) else {}


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
        self._weights: dict[str, Number | Tensor] = {}
        self._counted: dict[str, None] = {}
        """Names counted since the last reset, in order of appearance; a dict used as an ordered set."""
        self._names: list[str] | None = None
        """Names of the metrics of all ranks when they were gathered last; None: never."""
        self._rank_names: list[str] = []
        """Those that this rank had counted then."""
        self.gathering: dict[str, Any] = {}
        """Metrics in the outputs that accumulate over batches themselves, by name. They are not averaged here."""
        self.live_loss = LiveLoss()
        self.loss_is_finite = True
        """Whether all losses in the last `means` were finite. The mean is also NaN if all weights are 0."""

    def add(self, loss: Tensor | None, outputs: Mapping[str, Any], weight: Number | Tensor) -> None:
        """Count a batch: its loss, and every number or tensor without dimensions in its outputs.

        With a weight of 0 it adds nothing, even if a value is NaN.

        Args:
            loss: None for an evaluation whose model returned none.
        """
        if loss is not None:
            loss = loss.detach()
            if loss.ndim:
                loss = loss.reshape(())
        if self._only_finite and loss is not None:
            # By torch.where, because a test on the host would wait for the device.
            counts = torch.isfinite(loss)
            weight, loss = counts * weight, torch.where(counts, loss, 0)
            outputs = {name: _zero_unless(counts, value) for name, value in outputs.items() if name not in _NOT_METRICS}
        if isinstance(weight, Tensor):
            weight = weight.to(self._device, self._dtype, non_blocking=True)
        if loss is not None:
            self._count("loss", loss, weight)
            if self.live_loss.requested:
                self.live_loss.answer(self._sums["loss"], self._weights["loss"])
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
        # A Python number becomes an argument of a kernel. As a tensor it would be copied, and the host would wait.
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
        # Stacked, so that one copy to the host brings them all.
        *means, loss_sum = torch.stack([*values, self._sums.get("loss", values[0])]).tolist()
        self.loss_is_finite = "loss" not in self._counted or math.isfinite(loss_sum)
        return dict(zip(self._counted, means, strict=True))

    def _means_of_all(self, group: ProcessGroup) -> dict[str, float]:
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


def weighted(value: Any, weight: Number | Tensor) -> Any:
    """A number or tensor times its weight; 0 for a weight of 0, even if the value is NaN."""
    # A tensor is masked: to test its weight here would make the host wait for the device.
    if not isinstance(weight, Tensor):
        return value * weight if weight != 0 else 0
    if not isinstance(value, Tensor):
        value = torch.full_like(weight, value, dtype=torch.float32)
    product: Tensor = value * weight
    return product.masked_fill((weight == 0).to(product.device, non_blocking=True), 0)


def is_known_zero(weight: Number | Tensor) -> bool:
    """Whether a weight is 0. False for a weight on a device, which the host would have to wait for."""
    return bool(weight == 0) if not isinstance(weight, Tensor) or weight.device.type == "cpu" else False


def _zero_unless(counts: Tensor, value: Any) -> Any:
    """A metric of a batch, or zero if the batch does not count. Values other than scalars are not changed."""
    is_number = isinstance(value, _NUMBERS) and not isinstance(value, bool)
    return torch.where(counts, value, 0) if is_number or (isinstance(value, Tensor) and value.ndim == 0) else value


def merge_sums(first: Mapping[str, Any], states: Sequence[Mapping[str, Any]], *, empty: bool) -> dict[str, Any]:
    """Merge the saved `WeightedMeans` of ranks into one.

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
