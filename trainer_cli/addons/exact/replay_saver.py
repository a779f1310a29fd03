"""The callback that saves in a replay: compares states with kept checkpoints, writes replayed ones, and ends it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer_cli.addons.exact.replay_plan import ReplayPlan
from trainer_cli.addons.exact.replay_records import RecordComparison
from trainer_cli.callbacks import RunIdentity
from trainer_cli.catalog import Catalog
from trainer_cli.checkpoint import Checkpointer
from trainer_cli.dtensor import is_dtensor, local_of
from trainer_cli.errors import UserError
from trainer_cli.layout import PER_RANK
from trainer_cli.leaves import walk
from trainer_cli.loads import LOG_MARKS
from trainer_cli.policy import CheckpointKind, Occasion, Stop
from trainer_cli.runs import RunDir
from trainer_cli.tensor_files import bytes_of
from trainer_cli.trainer import Callback

if TYPE_CHECKING:
    from trainer_cli.parallel import ProcessGroup
    from trainer_cli.trainer import Trainer

log = logging.getLogger(__name__)

_NOT_COMPARED = (
    "progress.seconds", "progress.last_seconds", "loop.ended", "loop.owed_record", "loop.owed_at_end", LOG_MARKS,
)  # fmt: skip
"""Begins of the names of parts of a state that depend on the clock, or on how the run was stopped and logged."""
_BEFORE_EVALUATION = ("model", "optimizer", "optimizers", "rng", "data")
"""Keys of a state that a pending evaluation does not change."""


class ReplaySaver(Callback):
    """Compares the state at each kept checkpoint of a plan, saves at the steps of `keep`, and stops at the last step.

    Args:
        comparison: of the records. Rank 0 alone has them.
        needs_proof: whether a state is saved only after a record or a kept checkpoint was compared.
    """

    save_requested = False
    tolerates_errors = False

    def __init__(
        self,
        plan: ReplayPlan,
        run: RunDir,
        checkpointer: Checkpointer,
        identity: RunIdentity,
        comparison: RecordComparison,
        *,
        keep: Collection[int],
        needs_proof: bool,
    ) -> None:
        self._plan, self.checkpointer, self._identity, self._comparison = plan, checkpointer, identity, comparison
        self.folder, self._replayed = run.stored_checkpoints(), run.replayed_folder
        self._keep = {step for step in keep if plan.start_step <= step <= plan.last}
        self._needs_proof = needs_proof
        self.states: dict[int, str | None] = {}
        """Step of each kept checkpoint -> the first part of the state that differs; None: all is equal."""
        self.kept: dict[int, Path] = {}
        """Step -> the checkpoint that was written."""

    def setup(self, trainer: Trainer) -> None:
        self.checkpointer.join(trainer.strategy.group)

    def newest(self) -> Path | None:
        return self._plan.start

    newest_finite = newest

    def go_back(self, trainer: Trainer) -> Path | None:
        """The newest checkpoint before the present step, as the run had it unless it has been removed since."""
        kept = [step for step in self._plan.kept if step < trainer.progress.step]
        return self._plan.kept[max(kept)] if kept else self._plan.start

    def save_now(self, trainer: Trainer) -> Path:
        raise UserError("a replay saves no checkpoint by hand", cure="Give a path.")

    def next_step(self, trainer: Trainer) -> int | None:
        steps = {*self._plan.kept, *self._keep, self._plan.last}
        return min((step for step in steps if step > trainer.progress.step), default=None)

    def on_save_opportunity(self, trainer: Trainer, occasion: Occasion) -> None:
        step = trainer.progress.step
        if step in self._plan.kept and step not in self.states:
            self._compare(trainer, self._plan.kept[step])
        if step in self._keep and step not in self.kept:
            self._save(trainer)
        if step >= self._plan.last and trainer.stop_request is None:
            trainer.requests.stop_on_all(Stop(f"replayed up to step {step}", finished=False))

    def _compare(self, trainer: Trainer, path: Path) -> None:
        """Find the first part of the state that differs from a kept checkpoint on some rank. Collective."""
        with ExitStack() as stack:

            def hold() -> bool:
                # The run may be in training: its retention removes nothing that rank 0 holds.
                with suppress(FileNotFoundError):
                    stack.enter_context(Catalog.of(path.parent).storage.reading(path.name))
                    return True
                log.info("%s has been removed meanwhile, so it is not compared", path)
                return False

            if trainer.strategy.group.on_main(hold):
                self.states[trainer.progress.step] = find_first_difference(
                    trainer.loading.read_state(path), trainer.checkpoint_state(), trainer.strategy.group
                )

    def _may_keep(self, step: int) -> bool:
        """Whether the state after a step may be kept as that of the run. Called on rank 0."""
        if any(self.states.values()) or any(self._comparison.differences(step, ended=False)):
            return False
        return not self._needs_proof or bool(self.states or self._comparison.steps(step))

    def _save(self, trainer: Trainer) -> None:
        """Write the present state, unless a record or a kept state up to this step differs. Collective."""
        group, step = trainer.strategy.group, trainer.progress.step
        # On a device records wait for later ones.
        trainer.metric_logger.settle()
        if group.on_main(lambda: self._may_keep(step)):
            self.kept[step] = self._replayed / f"step{step}"
            reason = f"replayed from {self._plan.began_with}"
            metadata = self._identity.describe(trainer, CheckpointKind.replayed, reason)
            self.checkpointer.save(
                trainer.checkpoint_state, self.kept[step], metadata=metadata, trained=trainer.trained
            )


def find_first_difference(kept: Mapping[str, Any], live: Mapping[str, Any], group: ProcessGroup) -> str | None:
    """The first part of a state that differs on some rank, of keys that both have; None without any. Collective."""
    keys = kept.keys() & live.keys()
    if any(state.get("loop", {}).get("owed_record") is not None for state in (kept, live)):
        # One was stopped before the evaluation of this step, which the other has made.
        keys &= set(_BEFORE_EVALUATION)
    names = (name for key in sorted(keys) for name in find_differences(kept[key], live[key], key, rank=group.rank))
    return next(filter(None, group.gather(next(names, None))), None)


def find_differences(expected: Any, value: Any, key: str, *, rank: int = 0) -> Iterator[str]:
    """The names of the leaves that are not equal bit for bit, of what a state has under a top-level key.

    What ranks share is that of rank 0 in a checkpoint: others are compared only in what each saves for itself.
    """
    leaves, other_leaves = dict(walk(expected, key)), dict(walk(value, key))
    compares_all = rank == 0 or key in PER_RANK
    for name, leaf in {**leaves, **other_leaves}.items():
        if name.startswith(_NOT_COMPARED) or not (compares_all or is_dtensor(leaf)):
            continue
        if not (name in leaves and name in other_leaves and _is_equal_leaf(leaves[name], leaf)):
            yield name


def _is_equal_leaf(expected: Any, value: Any) -> bool:
    if isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor):
        first, second = (local_of(tensor).detach().cpu() for tensor in (expected, value))
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        # By their bytes: NaN equals NaN, and -0 is not 0.
        return first.numel() == 0 or np.array_equal(bytes_of(first), bytes_of(second))
    if isinstance(expected, np.ndarray) and isinstance(value, np.ndarray):
        return expected.dtype == value.dtype and expected.tobytes() == value.tobytes()
    # NaN is the only value that differs from itself.
    return bool(expected == value) or (expected != expected and value != value)
