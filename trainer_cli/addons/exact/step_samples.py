"""Which samples each optimizer step of a run used, or will use, by rank and batch.

read_step_samples(run, first, last)
    the position of each step in the data (`step_positions`)
    the order of the samples, in one of three ways
        computed     an order of `data/order`: from seed, epoch and length alone, without torch (`sample_order`)
        keys         an order of the dataset's own, as with a mixture: from the dataset (`epoch_orders`)
        walked       a DataLoader of the project: from its sampler, without loading samples (`epoch_orders`)
    any other loader is replayed: its batches are made, and known by their digests (`replayed_batches`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.addons.exact.sample_order import ComputedOrder, OrderedSteps
from trainer_cli.addons.exact.samples import StepSamples, Use
from trainer_cli.addons.exact.step_positions import (
    DataFacts,
    StepPositions,
    StepRecords,
    needs_resolving,
    read_records,
)
from trainer_cli.data import ORDER_VERSION
from trainer_cli.errors import TrainError, UserError
from trainer_cli.leaves import walk

if TYPE_CHECKING:
    from trainer_cli.addons.exact.run_data import RunData

_COMPUTED = (ORDER_VERSION, "sequential")
_WITH_PARTS = ("trainer_cli.Packing", "trainer_cli.addons.text.text.Packing")


def read_step_samples(
    path: Path,
    first: int,
    last: int | None = None,
    *,
    data: RunData | None = None,
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
) -> Iterator[StepSamples]:
    """Yield the samples of the steps from `first` to `last` of a run.

    Args:
        path: the directory of the run.
        last: None: `first`.
        data: the data of the run, if it is built already. Otherwise it is built if its files do not tell the order.
        overrides: of the stored config, if the data is built: where its files are, `trust=[PACKAGE]`.
        config_dir: the `configs/` of the project, if the data is built; None: that of the current directory.

    Raises:
        UserError: there is no such step, or one process cannot tell its samples.
    """
    records = read_records(path)
    last = first if last is None else last
    for step in (first, last):
        records.check_step(step)
    if data is None:
        ordered = read_order(records)
        if ordered is not None and ordered.positions.are_certain(first, last):
            yield from ordered.steps(first, last)
            return
        from trainer_cli.addons.exact.run_data import open_data

        data = open_data(records, overrides, config_dir=config_dir)
    yield from data.steps(first, last)


def find_known_samples(
    path: Path,
    first: int,
    last: int,
    *,
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> dict[int, StepSamples]:
    """The samples of the steps from `first` to `last` of a run, by step; none if they cannot be named.

    Args:
        overrides: of a replay. Those are used that say where the data is, and what is trusted.
        show: called with the reason if there are none.
    """
    needed = [override for override in overrides if override.startswith(("data.", "source=", "trust="))]
    try:
        steps = read_step_samples(path, first, last, overrides=needed, config_dir=config_dir)
        return {step.step: step for step in steps}
    except TrainError as error:
        show(f"the samples are not shown: {error.what}")
        return {}


def find_sample(
    path: Path, name: str, *, overrides: Sequence[str] = (), config_dir: Path | None = None
) -> Iterator[Use]:
    """Yield the uses of a sample in the steps of a run, by step.

    Args:
        name: its index in the train dataset, or `SOURCE:INDEX` in a mixture.
        overrides, config_dir: as in `read_step_samples`.

    Raises:
        UserError: there is no such sample, or the loader tells no indices.
    """
    records = read_records(path)
    order = read_order(records)
    if order is None:
        from trainer_cli.addons.exact.run_data import open_data

        order = open_data(records, overrides, config_dir=config_dir).ordered
    if order is None:
        raise UserError(
            "the train loader does not tell the indices of its samples, so none can be found",
            where="data",
            cure="`train data RUN STEP` shows the batches of a step.",
        )
    yield from order.find(name)


def read_order(records: StepRecords) -> OrderedSteps | None:
    """The order of the samples from the files of a run alone; None if the data is needed.

    It is used only if a checkpoint or a record confirms the position that is computed from it.
    """
    state = records.data_state
    length, seed, order = state.get("length"), state.get("seed"), state.get("order")
    configs = [attempt.config for attempt in records.attempts]
    if order not in _COMPUTED or "sample_offset" not in state or any(map(needs_resolving, configs)):
        return None
    if not isinstance(length, int) or not isinstance(seed, int) or any(map(_has_parts, configs)):
        return None
    positions = StepPositions(records, DataFacts(length))
    if not positions.confirmed or not _fits_record(positions):
        return None
    return OrderedSteps(positions, ComputedOrder(seed, length, shuffle=order == ORDER_VERSION))


def _has_parts(config: Mapping[str, Any]) -> bool:
    """Whether the indices alone do not say enough: rows are packed, or few samples are repeated."""
    data = config.get("data")
    if not isinstance(data, Mapping) or data.get("overfit_batches") is not None:
        return True
    return any(str(value) in _WITH_PARTS for key, value in walk(data) if key.rpartition(".")[2] == "_target_")


def _fits_record(positions: StepPositions) -> bool:
    """Whether the last record has the epoch that the positions give: a loader of the project's own may drop samples."""
    record = positions.records.last_record
    layouts = {stretch.layout for stretch in positions.stretches}
    if len(layouts) != 1 or record is None:
        return False
    layout = layouts.pop()
    step, epoch = record
    return abs(step / -(-layout.epoch_batches // layout.grad_accum_steps) - epoch) < 6e-5
