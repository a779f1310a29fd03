"""The callback that compares a rerun with the run while it trains, and ends it with the steps of the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from trainer_cli.addons.exact.replay_saver import find_first_difference
from trainer_cli.checkpoint import make_sync_checkpointer
from trainer_cli.dtensor import is_dtensor
from trainer_cli.format import RANKS
from trainer_cli.leaves import map_leaves
from trainer_cli.parallel import ALONE
from trainer_cli.policy import Occasion, Stop
from trainer_cli.tensor_files import bytes_of
from trainer_cli.trainer import Callback

if TYPE_CHECKING:
    from trainer_cli.addons.exact.rerun import Rerun
    from trainer_cli.parallel import ProcessGroup
    from trainer_cli.trainer import Trainer

log = logging.getLogger(__name__)


def digest_checkpoint(path: Path) -> Sequence[Any]:
    """What each rank has saved in a checkpoint, with digests in place of tensors; of other ranks than 0 what they
    saved for themselves.

    Raises:
        CheckpointError: it is gone, or damaged.
    """
    state = make_sync_checkpointer(group=ALONE).read(path)
    ranks = state.pop(RANKS, [])
    return [map_leaves(_digest, rank) for rank in (state, *ranks[1:])]


def _digest(leaf: Any) -> str | None:
    """A text that is equal where every bit is. Collective for a tensor that is divided among ranks."""
    if not isinstance(leaf, torch.Tensor | np.ndarray):
        return None if leaf is None else str(leaf)
    tensor: Any = leaf
    if is_dtensor(tensor):
        tensor = tensor.full_tensor()
    content: Any = bytes_of(tensor) if 0 not in tensor.shape else b""
    return f"{tensor.dtype}{tuple(tensor.shape)} {xxhash.xxh3_128_hexdigest(content)}"


class RerunObserver(Callback):
    """Compares states with those of the run, and records at these and at more and more distant steps; stops at the
    first that differs, or after the last step.

    Made on every rank, before anything is built: it sets the number of threads that the run had.

    Args:
        rerun: what compares, on rank 0.
    """

    measures_only = True

    def __init__(self, rerun: Rerun | None, group: ProcessGroup) -> None:
        self._rerun = rerun
        plan: tuple[list[int], int, object] = [], 0, None
        if rerun is not None:
            plan = [*rerun.original.states], rerun.original.last, rerun.environment.get("threads")
        self._steps, self._last, threads = group.broadcast(plan)
        self._compared_step: int | None = None
        # Sums are made in another order by another number.
        if isinstance(threads, int) and threads > 0:
            torch.set_num_threads(threads)

    def next_step(self, trainer: Trainer) -> int | None:
        step = trainer.progress.step
        # Twice as far each time: each comparison of the records reads all.
        return min(later for later in (*self._steps, self._last, 2 * step or 1) if later > step)

    def on_save_opportunity(self, trainer: Trainer, occasion: Occasion) -> None:
        """Compare what there is at this step, and stop if it is the last."""
        step, group = trainer.progress.step, trainer.strategy.group
        # Once: where a save in the background has ended, a step is offered again, after the next stretch has begun.
        if step in self._steps and step != self._compared_step:
            self._compared_step = step
            ranks = group.on_main(lambda: self._rerun and self._rerun.original.digests(step)) or []
            live = map_leaves(_digest, trainer.checkpoint_state())
            # A rank that the run did not have has nothing to compare.
            own = ranks[group.data_rank] if group.data_rank < len(ranks) else {}
            difference = find_first_difference(own, live, group)
            if self._rerun is not None:
                self._rerun.note_state(step, difference)
        trainer.metric_logger.write_out()
        found = group.on_main(lambda: self._rerun and self._rerun.find_difference(min(step, self._last)))
        if trainer.stop_request is None and occasion in (Occasion.pre_train, Occasion.step):
            # At the end that its config gives it stops by itself.
            if found is not None:
                trainer.requests.stop_on_all(Stop("the rerun is not equal", finished=False, comes_again=True))
            elif step >= self._last:
                trainer.requests.stop_on_all(
                    Stop(f"the run is made again up to step {step}", finished=False, comes_again=True)
                )
