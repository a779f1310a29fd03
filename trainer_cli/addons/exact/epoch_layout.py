"""At which positions of an epoch the batches of each step and rank begin, as pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer_cli.steps import Progress, StepCounts, find_first_step, limit_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLayout:
    """The batches and steps of an epoch. Positions count samples, or batches if the loader does not count samples."""

    length: int
    """Number of samples in an epoch."""
    batch_size: int
    """Number of samples in a batch of one rank."""
    world_size: int = 1
    """Number of ranks among which samples are divided."""
    grad_accum_steps: int = 1
    limit_train_batches: int | float | None = None
    drop_last: bool = False
    whole_batches: bool = False
    """Whether ranks take whole batches of the loader in turn, as from a `SharedLoader`. Otherwise the samples at the
    end of an epoch are divided evenly among them, as by `Loader`."""

    @property
    def per_batch(self) -> int:
        """Number of samples in a batch of all ranks."""
        return self.batch_size * self.world_size

    @property
    def epoch_batches(self) -> int:
        """Number of batches of each rank that an epoch trains on."""
        batches = limit_batches(self.batches_after(0), self.limit_train_batches)
        assert batches is not None, "the number of batches is known"
        return batches

    def batches_after(self, position: int) -> int:
        """Number of batches of each rank after the first `position` samples of an epoch, without the limit."""
        full, remainder = divmod(max(0, self.length - position), self.per_batch)
        return full + (remainder > 0 and not self.drop_last)

    def enter(self, at: Progress) -> Progress:
        """A position in batches of this layout, as a resume converts it; at the end of an epoch, that of the next."""
        batch = self.batches_after(0) - self.batches_after(at.epoch_samples)
        if batch >= self.epoch_batches:
            return replace(at, epoch=at.epoch + 1, batch=0, epoch_samples=0)
        return replace(at, batch=batch)

    def position_after(self, start: Progress, step: int) -> Progress:
        """The position after a step, from an entered `start`."""
        dropped = self.length % self.per_batch if self.drop_last else 0
        counts = StepCounts(
            start=start,
            grad_accum_steps=self.grad_accum_steps,
            epoch_batches=self.epoch_batches,
            batch_size=self.per_batch,
            epoch_samples=self.length - dropped,
        )
        return counts.at(step)

    def pass_over(self, at: Progress, samples: int) -> Progress:
        """The position after skipped samples, as for `SkipSamples`."""
        # An epoch may be cut by the limit on batches.
        epoch_samples = min(self.length, self.epoch_batches * self.per_batch)
        epochs, position = divmod(at.epoch_samples + samples, epoch_samples)
        return self.enter(replace(at, epoch=at.epoch + epochs, epoch_samples=position))

    def batches_of(self, start: Progress, step: int) -> tuple[int, list[int]]:
        """The epoch of a step, and the position at which each of its batches begins, from an entered `start`."""
        before = self.position_after(start, step - 1)
        count = min(self.grad_accum_steps, self.epoch_batches - before.batch)
        return before.epoch, [before.epoch_samples + number * self.per_batch for number in range(count)]

    def share(self, position: int, rank: int) -> tuple[int, int]:
        """The (first, end) positions of one rank in the batch of all ranks that begins at `position`."""
        count = min(self.per_batch, self.length - position)
        if self.whole_batches:
            return position + min(rank * self.batch_size, count), position + min((rank + 1) * self.batch_size, count)
        # Rounded up by the negation, as `Loader` does: the first ranks have more.
        first, end = (position - (-count * number) // self.world_size for number in (rank, rank + 1))
        return first, end

    def first_step_past(self, start: Progress, epoch: int, position: int) -> int:
        """The first step at whose end the training has passed a position of an epoch, from an entered `start`."""

        def is_past(step: int) -> bool:
            after = self.position_after(start, step)
            return (after.epoch, after.epoch_samples) > (epoch, position)

        step = find_first_step(is_past, start.step + 1)
        assert step is not None, "each step takes samples"
        return step
