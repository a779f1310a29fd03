"""The samples of the steps of a run, from the positions of the steps and the order of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainer_cli.addons.exact.samples import Batch, Sample, StepSamples, Use
from trainer_cli.addons.exact.step_positions import StepPositions, Stretch
from trainer_cli.data import sample_indices, sample_position
from trainer_cli.errors import UserError
from trainer_cli.terminal import format_count


class EpochOrder(Protocol):
    """The order of the samples of an epoch. Positions count samples, or batches if the loader counts only these."""

    def read(self, epoch: int, first: int, end: int) -> Sequence[Sample]:
        """The samples at these positions."""
        ...

    def find(self, epoch: int, name: str) -> Sequence[int]:
        """The positions of a sample, named by its index or by `SOURCE:INDEX`."""
        ...


class ComputedOrder:
    """The order of `Loader`, for a dataset without an order of its own: neither torch nor the dataset is needed."""

    def __init__(self, seed: int, length: int, *, shuffle: bool) -> None:
        self._seed, self._length, self._shuffle = seed, length, shuffle

    def read(self, epoch: int, first: int, end: int) -> Sequence[Sample]:
        """See `EpochOrder`."""
        positions = range(first, end)
        shuffled = sample_indices(self._seed, epoch, first, end, self._length) if self._shuffle else positions
        return [Sample(index, position, key=index) for index, position in zip(shuffled, positions, strict=True)]

    def find(self, epoch: int, name: str) -> Sequence[int]:
        """See `EpochOrder`."""
        index = int(name) if name.isdecimal() else -1
        if not 0 <= index < self._length:
            raise UserError(
                f"there is no sample {name!r}",
                cure=f"The train data has {format_count(self._length, 'sample')}, from 0 on.",
            )
        return [sample_position(self._seed, epoch, index, self._length) if self._shuffle else index]


@dataclass(frozen=True, slots=True)
class OrderedSteps:
    """The steps of a run whose samples are known by their indices."""

    positions: StepPositions
    order: EpochOrder

    def steps(self, first: int, last: int) -> Iterator[StepSamples]:
        """The samples of the steps from `first` to `last`."""
        for step in range(first, last + 1):
            yield self._step(self.positions.stretch_of(step), step)

    def find(self, name: str) -> Iterator[Use]:
        """All uses of a sample up to the end of the run; up to the last step that was trained if the end is unknown."""
        records = self.positions.records
        end = records.newest_step if records.end is None else records.end
        for stretch in self.positions.stretches:
            last = end if stretch.last_step is None else min(end, stretch.last_step)
            if last <= stretch.start.step:
                continue
            last_epoch, _ = stretch.layout.batches_of(stretch.start, last)
            for epoch in range(stretch.start.epoch, last_epoch + 1):
                for position in self.order.find(epoch, name):
                    use = self._find_use(stretch, epoch, position)
                    if use is not None and use.step <= last:
                        yield use

    def _find_use(self, stretch: Stretch, epoch: int, position: int) -> Use | None:
        """The use of the sample at a position of an epoch; None if no step of the stretch trains on it."""
        layout = stretch.layout
        step = layout.first_step_past(stretch.start, epoch, position)
        step_epoch, begins = layout.batches_of(stretch.start, step)
        number = (position - begins[0]) // layout.per_batch
        if step_epoch != epoch or not 0 <= number < len(begins):
            return None
        shares = [layout.share(begins[number], rank) for rank in range(layout.world_size)]
        rank = next(rank for rank, (first, end) in enumerate(shares) if first <= position < end)
        is_past = step <= self.positions.records.newest_step
        return Use(step=step, epoch=epoch, rank=rank, batch=number + 1, attempt=stretch.attempt, past=is_past)

    def _step(self, stretch: Stretch, step: int) -> StepSamples:
        layout = stretch.layout
        epoch, begins = layout.batches_of(stretch.start, step)
        batches = [
            Batch(rank=rank, number=number, size=len(samples), samples=samples)
            for number, begin in enumerate(begins, 1)
            for rank in range(layout.world_size)
            for samples in [self.order.read(epoch, *layout.share(begin, rank))]
        ]
        return StepSamples(step, epoch, stretch.attempt, batches, stretch.uncertainty)
