"""The data of a run, built from its stored config, and the order of its samples by the train loader."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from trainer_cli.addons.exact.epoch_orders import KeyOrder, WalkOrder, has_indices
from trainer_cli.addons.exact.replayed_batches import replay_batches
from trainer_cli.addons.exact.sample_order import OrderedSteps
from trainer_cli.addons.exact.samples import Batch, Sample, StepSamples
from trainer_cli.addons.exact.step_positions import Attempt, DataFacts, StepPositions, StepRecords, needs_resolving
from trainer_cli.config import Composed, from_yaml
from trainer_cli.data import Loader, SharedLoader, length_of
from trainer_cli.errors import UserError
from trainer_cli.layout import class_name
from trainer_cli.messages import to_console
from trainer_cli.origin import TRAIN, DataAndSource, compare_forked, naming_project, use_kept_source
from trainer_cli.parallel import imitate_group
from trainer_cli.running import Builder, Data

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunData:
    """The data of one attempt of a run."""

    records: StepRecords
    attempt: Attempt
    builder: Builder
    data: Data
    uncertainty: str | None = None
    """Why the order of the samples is another than in the training."""
    overrides: tuple[str, ...] = ()
    """With which it was opened, as are the data of other attempts."""
    config_dir: Path | None = None

    @property
    def loader(self) -> Any:
        """The train loader, as rank 0 has it."""
        loader: Any = self.data.train
        return loader

    @property
    def inner(self) -> Any:
        """The train loader before it is divided among ranks."""
        return self.loader.loader if isinstance(self.loader, SharedLoader) else self.loader

    @property
    def dataset(self) -> Any:
        """The dataset of the train loader; None if the loader is not over a map-style dataset."""
        if isinstance(self.inner, Loader):
            return self.inner.source.dataset
        return self.inner.loader.dataset if has_indices(self.inner) else None

    @cached_property
    def ordered(self) -> OrderedSteps | None:
        """The steps by their indices; None if the loader does not tell indices, or its epochs have no known length."""
        inner = self.inner
        if isinstance(inner, Loader):
            # The batches of a loader that our config does not make are its own.
            is_own = self.data.source.train is inner
            batch_size, drop_last = (inner.batch_size, inner.drop_last) if is_own else (None, None)
            length, counts_batches, whole_batches = inner.length, False, isinstance(self.loader, SharedLoader)
        elif has_indices(inner) and (
            (known_length := length_of(inner) if inner.length is None else inner.length) is not None
        ):
            batch_size, drop_last = inner.batch_size, bool(inner.loader.drop_last)
            length, counts_batches, whole_batches = known_length, inner.length is None, True
        else:
            return None
        if whole_batches and drop_last and batch_size is not None:
            # Dropped by the loader, before ranks share its batches.
            length, drop_last = length - length % batch_size, False
        facts = DataFacts(
            length=length,
            batch_size=batch_size,
            drop_last=drop_last,
            counts_batches=counts_batches,
            whole_batches=whole_batches,
        )
        positions = StepPositions(self.records, facts)
        if isinstance(inner, Loader):
            # A subset of ours, which `data.overfit_batches` made.
            is_few = (self.builder.config.data or {}).get("overfit_batches") is not None
            return OrderedSteps(positions, KeyOrder(inner, is_few=is_few))
        most = max(stretch.layout.epoch_batches * stretch.layout.world_size for stretch in positions.stretches)
        return OrderedSteps(positions, WalkOrder(inner, most, counts_samples=not counts_batches))

    def load(self, step: StepSamples, batch: Batch) -> Iterator[tuple[Sample | None, Any]]:
        """Each sample of a batch with its content, made with the random numbers of the training; or None and the whole
        batch, if the loader tells no indices."""
        if batch.content is not None:
            yield None, batch.content
        if batch.samples and self.ordered is not None:
            order, positions = self.ordered.order, [sample.position or 0 for sample in batch.samples]
            assert isinstance(order, KeyOrder | WalkOrder), "the data is built"
            yield from zip(batch.samples, order.load(step.epoch, positions[0], positions[-1] + 1), strict=True)

    def describe(self, sample: Sample) -> str | None:
        """The dataset's own description of a sample, if it has a method `describe`."""
        describe = getattr(self.dataset, "describe", None)
        return (str(describe(sample.key)) or None) if callable(describe) else None

    def steps(self, first: int, last: int) -> Iterator[StepSamples]:
        """The samples of the steps from `first` to `last`.

        Raises:
            UserError: the loader divides samples among ranks by itself.
        """
        ranks = self.builder.group.data_size
        if ranks > 1 and getattr(self.inner, "per_rank", False):
            raise UserError(
                f"{class_name(self.inner.loader)} divides samples among {ranks} ranks by itself, "
                "so one process cannot tell which samples the others have",
                where="data",
            )
        if self.ordered is not None:
            for step in self.ordered.steps(first, last):
                yield replace(step, uncertainty=step.uncertainty or self.uncertainty)
            return
        for _, steps in groupby(range(first, last + 1), self.records.attempt_of):
            numbers = list(steps)
            attempt = self.records.attempt_of(numbers[0])
            # By number: the config of one has its interpolations replaced.
            if attempt.number == self.attempt.number:
                data = self
            else:
                data = open_data(self.records, self.overrides, config_dir=self.config_dir, attempt=attempt)
            yield from replay_batches(data, numbers[0], numbers[-1])


def open_data(
    records: StepRecords,
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | None = None,
    attempt: Attempt | None = None,
) -> RunData:
    """Build the data of a run from its stored config, as `train validate` does.

    Args:
        attempt: the attempt whose config is used; None: the last one.

    Raises:
        ConfigError: the config names a class that is not trusted, or the data cannot be built.
    """
    attempt = records.attempts[-1] if attempt is None else attempt
    is_of_run = attempt.config == records.config
    source = records.run.config_file if is_of_run else yaml.safe_dump(dict(attempt.config), sort_keys=False)
    use_kept_source(records.run, attempt.number, overrides, config_dir)
    with naming_project(records.run.path, config_dir):
        composed = from_yaml(source, overrides, config_dir=config_dir, sections=("data",))
        to_console("warning")
        with composed.placing():
            composed.check_targets(("data",))
            group = imitate_group(attempt.processes, composed.config.parallel.tensor_size)
            builder = Builder(composed.config, composed.trust, group)
            data = builder.data()
    run_data = RunData(
        _resolve(records, config_dir), attempt, builder, data, overrides=tuple(overrides), config_dir=config_dir
    )
    return replace(run_data, uncertainty=_warn_of_other_data(run_data, composed))


def _resolve(records: StepRecords, config_dir: Path | None) -> StepRecords:
    """The records with interpolations replaced by their values in the configs of the attempts."""
    attempts = []
    for attempt in records.attempts:
        if needs_resolving(attempt.config):
            text = yaml.safe_dump(dict(attempt.config), sort_keys=False)
            raw = from_yaml(text, trusted=True, config_dir=config_dir, missing_ok=True, sections=()).raw
            config: Any = OmegaConf.to_container(OmegaConf.create(raw), resolve=True)
            attempt = replace(attempt, config=config)
        attempts.append(attempt)
    return replace(records, attempts=attempts)


def _warn_of_other_data(run_data: RunData, composed: Composed) -> str | None:
    """Warn if the data, or the project's source, is not what the run was trained with.

    Returns what differs in a way that changes the order of the samples.
    """
    state, inner = run_data.records.data_state, run_data.inner
    differing = [
        f"{name} was {state[name]!r} and is {now!r}"
        for name in ("order", "length", "fingerprint")
        if name in state and (now := _identity(inner, name)) is not None and state[name] != now
    ]
    if differing:
        message = f"the data is not what {run_data.records.run.path} was trained with: {'; '.join(differing)}"
        log.warning("%s", message)
        return message
    for _, newest in list(run_data.records.checkpoints.values())[-1:]:
        compare_forked(composed, newest, DataAndSource.of({TRAIN: run_data.loader}, composed.project_root))
    return None


def _identity(loader: Any, name: str) -> Any:
    if isinstance(loader, Loader):
        return {"order": loader.source.order_name, "length": loader.length, "fingerprint": loader.fingerprint}[name]
    return getattr(loader, name, None)
