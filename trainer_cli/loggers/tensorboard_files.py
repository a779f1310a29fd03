"""Edit the event files of earlier attempts on a resume: drop later events, and describe the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from trainer_cli.core.files import replace
from trainer_cli.loggers.base import RunFacts

CONFIG_TAG = "config"
_FRAME_BYTES = 16
"""Bytes of length and checksums around each record."""
_NAME = re.compile(r"(events\.out\.tfevents\.)(\d+)(\..*)")


class Kept(NamedTuple):
    """The events of earlier attempts that a resume keeps: those before these steps."""

    scalars_before: int
    others_before: int

    @classmethod
    def of(cls, first_step: int, start_step: int) -> Kept:
        """For a logger that was rewound to just before `first_step`, in an attempt that starts at `start_step`.

        If an evaluation is pending, the metrics of the start step are logged again, but not its texts and images.
        """
        return cls(first_step, max(first_step, start_step + 1) if first_step > 0 else first_step)


def event_files(folder: Path) -> list[Path]:
    """The event files of a folder, in the order in which TensorBoard reads them."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def move_back(folder: Path, now: int) -> None:
    """Rename files so that one created `now` (unix seconds) sorts last, although the clock may have been set back.

    The files keep their order, even after a crash. A running TensorBoard must then be restarted, because it reads no
    file that sorts before one that it has read.
    """
    files = event_files(folder)
    for number, path in enumerate(files, now - len(files)):
        if (parts := _NAME.fullmatch(path.name)) and int(parts[2]) > number:
            path.rename(folder / f"{parts[1]}{number:010d}{parts[3]}")


def described(facts: RunFacts) -> dict[str, Summary]:
    """Events that describe the run: tag -> content. These are the config as text, and the hyperparameters."""
    events: dict[str, Summary] = {}
    if facts.config:
        # Markdown shows an indented block as it is.
        events[CONFIG_TAG] = text_pb(CONFIG_TAG, "".join(f"    {line}\n" for line in facts.config.splitlines()))
    if facts.hparams:
        # TensorBoard merges trials of one id, and the runs of a sweep share their name.
        trial = facts.name if facts.run_dir is None else f"{facts.run_dir.name} ({facts.run_dir.parent})"
        events[SESSION_START_INFO_TAG] = hparams_pb(dict(facts.hparams), trial, facts.start_time)
    return events


def cut_back(path: Path, kept: Kept, description: Mapping[str, Summary]) -> dict[str, bool]:
    """Drop later events and a truncated last one from a file. Hyperparameters that differ are dropped too.

    TensorBoard shows the first hyperparameters that it reads, but a text for each step, so a config stays.

    Returns:
        Tags of the description that stay -> whether their last content is the one described.
    """
    is_current: dict[str, bool] = {}

    def is_kept(event: Event) -> bool:
        if event.HasField("file_version"):
            return True
        value = event.summary.value[0] if event.summary.value else None
        if value is None or value.HasField("simple_value"):
            return bool(event.step < kept.scalars_before)
        if event.step >= kept.others_before:
            return False
        if (new := description.get(value.tag)) is not None:
            is_same = _content(value) == _content(new.value[0])
            if value.tag == SESSION_START_INFO_TAG and not is_same:
                return False
            is_current[value.tag] = is_same
        return True

    def records() -> Iterator[bytes]:
        for record in RawEventFileLoader(str(path)).Load():
            if is_kept(Event.FromString(record)):
                yield record

    # Rewritten only if an event is dropped: the checksums of a frame are slow to compute.
    if sum(len(record) + _FRAME_BYTES for record in records()) < path.stat().st_size:
        # Read twice instead of kept in memory: a file may hold images of a whole run.
        replace(path, map(_framed, records()))
    return is_current


def _content(value: Summary.Value) -> object:
    """The content to compare: a text, or hyperparameters without the start time of the attempt."""
    if value.tag != SESSION_START_INFO_TAG:
        return value.tensor
    return dict(HParamsPluginData.FromString(value.metadata.plugin_data.content).session_start_info.hparams)


def _framed(record: bytes) -> bytes:
    buffer = BytesIO()
    RecordWriter(buffer).write(record)
    return buffer.getvalue()
