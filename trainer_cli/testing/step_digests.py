"""A callback that writes digests of all that steps begin with and compute, in the order of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainer_cli.checkpoint.model_state import capture_rng, unwrapped
from trainer_cli.core.patterns import matches
from trainer_cli.core.policy import Occasion
from trainer_cli.runs.replay_records import CLOCKED
from trainer_cli.runs.step_view import watch_modules
from trainer_cli.testing.digests import Digests
from trainer_cli.testing.divergence import OF_RANK, Stage
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.metrics import leading_size, tensors_of
from trainer_cli.trainer.state import capture

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer.trainer import Trainer

_OPTIMIZERS = ("optimizer", "optimizers")
NOT_COMPARED = ("progress", "loop", "microbatch")
"""Parts of a state that count, or follow from what is compared."""


class StepDigests(Callback):
    """Writes a line for each of some steps, and one for the state after the last. Changes nothing. Collective.

    Args:
        file: of JSON lines, which `divergence.read_moments` reads; rank 0 appends to it.
        first, last: the steps, counted from 1.
    """

    def __init__(self, file: Path, first: int, last: int) -> None:
        self._file, self._first, self._last = file, first, last
        self._digests = Digests()
        self._entry: dict[str, Any] | None = None
        self._values: dict[str, dict[str, str]] = {}
        self._watched = ExitStack()
        self._has_ended = False

    def next_step(self, trainer: Trainer) -> int | None:
        return self._last if trainer.progress.step < self._last else None

    def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        progress = trainer.progress
        if self._entry is None and self._first <= progress.step + 1 <= self._last:
            self._entry = {"step": progress.step + 1, "samples": progress.samples, "batches": 0, "rows": {}}
            self._values = self._state(trainer)
            watch_modules(model, self._note_outputs, self._watched)

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        if self._entry is None:
            return
        self._entry["batches"] += 1
        rows: dict[str, list[str]] = self._entry["rows"]
        for name, digests in self._rows_of(batch, "batch", leading_size(batch) or 1):
            rows.setdefault(name, []).extend(digests)

    def on_before_forward(
        self, trainer: Trainer, model: nn.Module, batch: Any, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        if self._entry is not None:
            self._note(Stage.inputs, self._digests.tree([*args, *kwargs.values()], "input"))

    def on_after_forward(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        if self._entry is not None:
            self._note(Stage.drawn, self._random(capture_rng()))

    def on_before_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        if self._entry is not None:
            self._note(Stage.loss, self._digests.tree(loss, "loss"))

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        self._note_gradients(Stage.gradients, model, optimizer)

    def on_before_optimizer_zero_grad(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        self._note_gradients(Stage.clipped, model, optimizer)

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._entry is not None and trainer.is_step_complete:
            self._watched.close()
            self._write(trainer)

    def on_save_opportunity(self, trainer: Trainer, occasion: Occasion) -> None:
        # Here and not at the end of the batch: teardowns of other callbacks, as with an average, come later.
        progress = trainer.progress
        if progress.step == self._last and not self._has_ended:
            self._has_ended = True
            self._entry = {"step": progress.step + 1, "samples": progress.samples, "batches": 0, "rows": {}}
            self._values = self._state(trainer)
            self._write(trainer)

    def finalize(self) -> None:
        # After an error inside a step.
        self._watched.close()

    def _write(self, trainer: Trainer) -> None:
        group = trainer.strategy.group
        entries = group.gather({**(self._entry or {}), "values": self._values})
        self._entry, self._values = None, {}
        if group.is_main:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(merge_ranks(entries)) + "\n")

    def _note(self, stage: Stage, leaves: Iterator[tuple[str, str]]) -> None:
        """Add digests; those of a second batch, or a second call of a module, under names of their own."""
        values = self._values.setdefault(stage, {})
        for name, digest in leaves:
            free, count = name, 1
            while free in values:
                count += 1
                free = f"{name} (call {count})"
            values[free] = digest

    def _note_gradients(self, stage: Stage, model: nn.Module, optimizer: Optimizer) -> None:
        if self._entry is None:
            return
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        named = [(name, value) for name, value in unwrapped(model).named_parameters() if value in stepped]
        # From the loss backwards, as they are computed.
        self._note(stage, ((name, str(self._digests.digest(value.grad))) for name, value in reversed(named)))

    def _note_outputs(self, name: str, outputs: Any) -> None:
        digest = " ".join(str(self._digests.digest(value)) for value in tensors_of(outputs))
        self._note(Stage.outputs, iter([(name, digest)]))

    def _rows_of(self, batch: Any, name: str, size: int) -> Iterator[tuple[str, list[str]]]:
        """The digest of each sample in each leaf of a batch; of a leaf that is not divided by samples, one for all."""
        if isinstance(batch, Mapping):
            for key, value in batch.items():
                yield from self._rows_of(value, f"{name}.{key}", size)
        elif isinstance(batch, list | tuple) and any(isinstance(value, Tensor | Mapping) for value in batch):
            for number, value in enumerate(batch):
                yield from self._rows_of(value, f"{name}[{number}]", size)
        elif isinstance(batch, list | tuple) or (isinstance(batch, Tensor) and batch.dim() and len(batch) == size):
            yield name, [self._digests.digest(row) or self._digests.whole(row) for row in batch]
        else:
            yield name, [self._digests.whole(batch)] * size

    def _random(self, state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for generator, value in state.items():
            yield f"random.{generator}", self._digests.whole(value)

    def _state(self, trainer: Trainer) -> dict[str, dict[str, str]]:
        """Digests of all state that a checkpoint holds, and of buffers that it does not hold, by stage."""
        state = capture(trainer, with_data=False)
        stages: dict[str, dict[str, str]] = {Stage.random: dict(self._random(state["rng"]))}
        parameters = {name for name, _ in unwrapped(trainer.model).named_parameters(remove_duplicate=False)}
        for section, value in state.items():
            if section in (*NOT_COMPARED, "rng"):
                continue
            for name, digest in self._digests.tree(value, section):
                if not any(matches(name, pattern) for pattern in CLOCKED):
                    stages.setdefault(_stage_of(name, parameters), {})[name.removeprefix("model.")] = digest
        for name, buffer in unwrapped(trainer.model).named_buffers():
            stages.setdefault(Stage.buffers, {}).setdefault(name, self._digests.whole(buffer))
        return stages


def merge_ranks(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The entries of all ranks as one: samples by rank, and what differs from rank 0 under a name with the rank."""
    merged = {**entries[0], "ranks": len(entries)}
    for rank, entry in enumerate(entries[1:], 1):
        merged["batches"] += entry["batches"]
        for leaf, rows in entry["rows"].items():
            merged["rows"].setdefault(leaf, []).extend(rows)
        for stage, values in entry["values"].items():
            first = merged["values"].setdefault(stage, {})
            first.update({f"{name}{OF_RANK}{rank})": text for name, text in values.items() if first.get(name) != text})
    return merged


def _stage_of(name: str, parameters: set[str]) -> Stage:
    section, _, rest = name.partition(".")
    if section == "model":
        return Stage.weights if rest in parameters else Stage.buffers
    if section in _OPTIMIZERS:
        return Stage.settings if ".groups[" in name else Stage.optimizer
    return Stage.callbacks if section == "callbacks" else Stage.other
