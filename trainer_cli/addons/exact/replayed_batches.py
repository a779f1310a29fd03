"""Make the batches of a train loader again, without the model, where their indices cannot be known.

It begins at the newest checkpoint before the first step, with the state that the loader had there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer_cli.addons.exact.samples import Batch, StepSamples
from trainer_cli.addons.exact.step_positions import StepRecords
from trainer_cli.batches import sample_count
from trainer_cli.catalog import Catalog
from trainer_cli.data import SharedLoader, digest_of
from trainer_cli.format import CheckpointReader
from trainer_cli.steps import Progress
from trainer_cli.trainer import TrainBatches

if TYPE_CHECKING:
    from trainer_cli.addons.exact.run_data import RunData

Round = list[tuple[Any, int]]
"""The batch of each rank with its number of samples; fewer at the end of an epoch."""


class _Rounds(SharedLoader):
    """A loader whose batches are those of all ranks at once."""

    def iterate(self, epoch: int, *, batch: int = 0, samples: int = 0) -> Generator[Round, None, None]:
        batches = self.loader.iterate(epoch, batch=batch * self.world_size, samples=samples)
        rank_batches: Round = []
        try:
            for count, rank_batch in enumerate(batches, batch * self.world_size + 1):
                rank_batches.append((rank_batch, sample_count(rank_batch, self.loader.batch_samples)))
                if count % self.world_size == 0:
                    yield rank_batches
                    rank_batches = []
            if rank_batches:
                self.epoch_end[epoch] = count
                yield rank_batches
        finally:
            batches.close()


def replay_batches(data: RunData, first: int, last: int) -> Iterator[StepSamples]:
    """Yield the batches of the steps from `first` to `last`, all of one attempt."""
    progress, state, uncertainty = _start(data.records, first)
    loader = _Rounds(data.inner, rank=0, world_size=data.builder.group.data_size)
    if state is not None:
        loader.check_state(state)
    loop = data.builder.loop()
    loop.learn_lengths(loader, progress)
    loop.start_at(loader, progress)
    batches = TrainBatches.on_host(loader, loop.epoch_batches)
    try:
        while progress.step < last:
            epoch, position = progress.epoch, progress.batch
            rounds = _next_step(batches, progress, loop.settings.grad_accum_steps)
            if progress.step >= first:
                made = [
                    Batch(rank=rank, number=number, size=size, digest=digest_of(batch), content=batch)
                    for number, round_batches in enumerate(rounds, 1)
                    for rank, (batch, size) in enumerate(round_batches)
                ]
                yield StepSamples(progress.step, epoch, data.attempt.number, made, uncertainty, position)
    finally:
        batches.close()
        loader.close()


def _next_step(batches: TrainBatches, progress: Progress, accumulated: int) -> list[Round]:
    """Take the batches of one step, as the training loop does."""
    rounds: list[Round] = []
    for _ in range(accumulated):
        round_batches: Round = batches.next(progress)
        rounds.append(round_batches)
        size = sum(size for _, size in round_batches)
        progress.batch += 1
        progress.epoch_samples += size if batches.samples_per_batch is None else batches.samples_per_batch
        if batches.is_over(progress):
            progress.epoch, progress.batch, progress.epoch_samples = progress.epoch + 1, 0, 0
            batches.close()
            break
    progress.step += 1
    return rounds


def _start(records: StepRecords, first: int) -> tuple[Progress, Mapping[str, Any] | None, str | None]:
    """The position from which to make batches, the loader's state there, and why the batches are not certain."""
    start = max((step for step in records.checkpoints if step < first), default=0)
    if start == 0:
        return Progress(), None, None
    manifest, path = records.checkpoints[start]
    progress = Progress.of(manifest.progress)
    assert progress is not None, "records hold checkpoints with their progress"
    uncertainty = None
    end = min((step for step in records.checkpoints if step >= first), default=None)
    if end is not None and records.checkpoints[end][0].progress.get("passed_over", 0) != progress.passed_over:
        uncertainty = f"data was skipped between step {start} and step {end}"
    with Catalog.of(path.parent).storage.reading(path.name) as folder:
        state: Mapping[str, Any] = CheckpointReader().read(folder, manifest, ["data"])["data"]
    return progress, state, uncertainty
