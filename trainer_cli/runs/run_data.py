"""The data of a run, built from its stored config, and the order of its samples by the train loader."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from trainer_cli.config.compose import Composed, from_yaml
from trainer_cli.core.naming import class_name
from trainer_cli.data.adapt import AnyLoader
from trainer_cli.data.loader import Loader, SharedLoader
from trainer_cli.data.mixture import MixedDataset
from trainer_cli.data.position import length_of
from trainer_cli.data.text import PackedRows
from trainer_cli.data.user_loader import UserLoader
from trainer_cli.data.walk_indices import IndexWalk, has_indices
from trainer_cli.errors import UserError
from trainer_cli.parallel.process_group import group_without_processes
from trainer_cli.runs.build import Builder, Data
from trainer_cli.runs.course import Attempt, Course, DataFacts, RunRecords, needs_resolving
from trainer_cli.runs.origin import TRAIN, compare_forked, origin_of
from trainer_cli.runs.replayed_batches import replay_batches
from trainer_cli.runs.samples import Document, Sample, SampleOrder, StepSamples

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of one attempt of a run."""

    records: RunRecords
    attempt: Attempt
    builder: Builder
    data: Data

    @property
    def loader(self) -> AnyLoader:
        """The train loader, as rank 0 has it."""
        loader: AnyLoader = self.data.train
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

    def order(self) -> SampleOrder | None:
        """The order of the samples; None if the loader does not tell indices, or its epochs have no known length."""
        inner, is_shared = self.inner, isinstance(self.loader, SharedLoader)
        if isinstance(inner, Loader):
            # The batch size of a loader that our config does not make is its own.
            is_own = self.data.source.train is inner
            facts = DataFacts(
                inner.length, inner.batch_size if is_own else None, inner.drop_last, whole_batches=is_shared
            )
            return SampleOrder(self._course(facts), self._read_keys)
        if not has_indices(inner) or (length := length_of(inner) if inner.length is None else inner.length) is None:
            return None
        assert isinstance(inner, UserLoader)
        drop_last = bool(inner.loader.drop_last)
        facts = DataFacts(length, inner.batch_size, drop_last, counts_batches=inner.length is None, whole_batches=True)
        course = self._course(facts)
        most = max(stretch.layout.epoch_batches * stretch.layout.world_size for stretch in course.stretches)
        return SampleOrder(course, _Walked(IndexWalk(inner, most), self.dataset, counts=inner.length is not None).read)

    def steps(self, first: int, last: int) -> Iterator[StepSamples]:
        """The samples of the steps from `first` to `last`.

        Raises:
            UserError: the loader divides samples among ranks by itself.
        """
        if self.attempt.processes > 1 and getattr(self.inner, "per_rank", False):
            raise UserError(
                f"{class_name(self.inner.loader)} divides samples among its {self.attempt.processes} ranks by itself, "
                "so one process cannot tell which samples the others have",
                where="data",
            )
        if (order := self.order()) is not None:
            yield from order.steps(first, last)
            return
        for _, steps in groupby(range(first, last + 1), lambda step: attempt_of(self.records, step)):
            numbers = list(steps)
            attempt = attempt_of(self.records, numbers[0])
            data = self if attempt == self.attempt else open_data(self.records, attempt=attempt)
            yield from replay_batches(data, numbers[0], numbers[-1])

    def _course(self, facts: DataFacts) -> Course:
        return Course(self.records, facts)

    def _read_keys(self, epoch: int, first: int, end: int) -> Sequence[Sequence[Sample]]:
        keys, _ = self.inner.source.order(epoch, first, end)
        dataset = self.dataset
        if (self.builder.config.data or {}).get("overfit_batches") is not None:
            # The few samples are a subset of ours: indices are those of the dataset.
            keys, dataset = [dataset.indices[key] for key in keys], dataset.dataset
        return [[replace(locate(dataset, key), position=first + number) for number, key in enumerate(keys)]]


class _Walked:
    """Samples of a DataLoader by its sampler."""

    def __init__(self, walk: IndexWalk, dataset: Any, *, counts: bool) -> None:
        self._walk, self._dataset, self._counts = walk, dataset, counts

    def read(self, epoch: int, first: int, end: int) -> Sequence[Sequence[Sample]]:
        """The samples at these positions, or of these batches if positions count batches."""
        batches = self._walk.read(epoch)
        if self._counts:
            indices = list(chain.from_iterable(batches))[first:end]
            return [[Sample(index, first + number, key=index) for number, index in enumerate(indices)]]
        starts = [0]
        for batch in batches[:end]:
            starts.append(starts[-1] + len(batch))
        return [
            [Sample(index, starts[number] + offset, key=index) for offset, index in enumerate(batches[number])]
            for number in range(first, end)
        ]


def locate(dataset: Any, key: Any, sources: tuple[str, ...] = ()) -> Sample:
    """A sample by the argument of the dataset's `[]`: its source in mixtures, and its documents in packed rows."""
    if isinstance(dataset, MixedDataset):
        number, inner_key = key
        inner = locate(dataset.datasets[number], inner_key, (*sources, dataset.names[number]))
        return replace(inner, key=key)
    source = "/".join(sources) or None
    if isinstance(dataset, PackedRows):
        documents = tuple(Document(*piece) for piece in dataset.pieces(key))
        return Sample(key, source=source, documents=documents, key=key)
    return Sample(key, source=source, key=key)


def attempt_of(records: RunRecords, step: int) -> Attempt:
    """The attempt that has trained a step, or will."""
    return [attempt for attempt in records.attempts if attempt.start_step < step][-1]


def open_data(
    records: RunRecords,
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
    is_last = attempt is None or attempt.number == records.attempts[-1].number
    attempt = records.attempts[-1] if attempt is None else attempt
    source = records.run.config_file if is_last else yaml.safe_dump(dict(attempt.config), sort_keys=False)
    composed = from_yaml(source, overrides, config_dir=config_dir, sections=("data",))
    with composed.placing():
        composed.check_targets(("data",))
        group = group_without_processes(attempt.processes, composed.config.parallel.tensor_size)
        builder = Builder(composed.config, composed.trust, group)
        data = builder.data()
    run_data = RunData(_resolve(records, config_dir), attempt, builder, data)
    _warn_of_other_data(run_data, composed)
    return run_data


def _resolve(records: RunRecords, config_dir: Path | None) -> RunRecords:
    """The records with interpolations replaced by their values in the configs of the attempts."""

    def resolve(attempt: Attempt) -> Attempt:
        if not needs_resolving(attempt.config):
            return attempt
        text = yaml.safe_dump(dict(attempt.config), sort_keys=False)
        raw = from_yaml(text, trusted=True, config_dir=config_dir, missing_ok=True, sections=()).raw
        config = OmegaConf.to_container(raw, resolve=True)
        assert isinstance(config, dict), "a config is a mapping"
        return replace(attempt, config={str(key): value for key, value in config.items()})

    return replace(records, attempts=[resolve(attempt) for attempt in records.attempts])


def _warn_of_other_data(run_data: RunData, composed: Composed) -> None:
    """Warn if the data, or the project's source, is not what the run was trained with."""
    state, inner = run_data.records.data_state, run_data.inner
    differing = [
        f"{name} was {state[name]!r} and is {now!r}"
        for name in ("order", "length", "fingerprint")
        if name in state and (now := _identity(inner, name)) is not None and state[name] != now
    ]
    if differing:
        log.warning("the data is not what %s was trained with: %s", run_data.records.run.path, "; ".join(differing))
    elif run_data.records.checkpoints:
        newest = run_data.records.paths[run_data.records.checkpoints[-1].step]
        compare_forked(composed, newest, origin_of({TRAIN: run_data.loader}, composed.project_root))


def _identity(loader: Any, name: str) -> Any:
    if isinstance(loader, Loader):
        return {"order": loader.source.order_name, "length": loader.length, "fingerprint": loader.fingerprint}[name]
    return getattr(loader, name, None)
