"""Edit the event files of earlier attempts on a resume: drop later events, and describe the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb

from trainer_cli.files import keep_spans
from trainer_cli.loggers.base import RunFacts
from trainer_cli.loggers.marks import LogEnd, Mark

CONFIG_TAG = "config"
_DESCRIPTION = (CONFIG_TAG, SESSION_START_INFO_TAG)
_HEADER_BYTES = 12
"""The length of a record in 8 bytes, and a checksum of these. Another checksum follows the record."""
_CRC_BYTES = 4
_FILE_STEP = -1
"""No rewind drops the first event of a file."""
_NAME = re.compile(r"(events\.out\.tfevents\.)(\d+)(\..*)")


class FolderMarks(NamedTuple):
    """The marks of the files of a folder when a checkpoint was saved."""

    files: Mapping[str, Mark]
    described: Mapping[str, str]
    """Digests of what describes the run in these files, by tag."""

    @classmethod
    def parse(cls, state: Mapping[str, Any], renamed: Mapping[str, str]) -> FolderMarks:
        """Read the state of a `TensorBoardLogger`; one of another version marks no file.

        Args:
            renamed: earlier name -> present name of each file that was renamed since.
        """
        files, described = state.get("files"), state.get("described")
        if isinstance(files, Mapping) and isinstance(described, Mapping):
            marks = {renamed.get(name, name): Mark.parse(mark) for name, mark in files.items()}
            return cls({name: mark for name, mark in marks.items() if mark is not None}, described)
        return cls({}, {})

    def has_other_hparams(self, described: Mapping[str, str]) -> bool:
        """Whether the hyperparameters in these files differ from those to describe, by their digests."""
        tag = SESSION_START_INFO_TAG
        return tag in described and described[tag] != self.described.get(tag)

    def fit(self, folder: Path, kept: Kept) -> bool:
        """Whether all marked files are unchanged up to their marks, and all records before the marks are kept."""
        try:
            return bool(self.files) and all(
                mark.fits(folder / name, kept.scalars_before - 1) for name, mark in self.files.items()
            )
        except OSError:
            return False


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


def move_back(folder: Path, now: int) -> dict[str, str]:
    """Rename files so that one created `now` (unix seconds) sorts last, although the clock may have been set back.

    The files keep their order, even after a crash. A running TensorBoard must then be restarted, because it reads no
    file that sorts before one that it has read.

    Returns:
        Earlier name -> name, of the renamed files.
    """
    renamed: dict[str, str] = {}
    files = event_files(folder)
    for number, path in enumerate(files, now - len(files)):
        if (parts := _NAME.fullmatch(path.name)) and int(parts[2]) > number:
            renamed[path.name] = f"{parts[1]}{number:010d}{parts[3]}"
            path.rename(folder / renamed[path.name])
    return renamed


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


def cut_back(
    path: Path, kept: Kept, description: Mapping[str, Summary], end: LogEnd, *, other_hparams: bool = False
) -> dict[str, bool]:
    """Drop later events and a truncated last one from a file. Hyperparameters that differ are dropped too.

    TensorBoard shows the first hyperparameters that it reads, but a text for each step, so a config stays.

    Args:
        end: the beginning of the file, whose records are kept without being read; each kept event after it is added.
        other_hparams: the beginning may contain other hyperparameters, before its first record: read it up to there.

    Returns:
        Tags of the description that stay -> whether their last content is the one described.
    """
    is_current: dict[str, bool] = {}

    def is_kept(event: Event) -> bool:
        """Whether an event stays: it is before the resumed step, or describes the run as it is now."""
        if event.HasField("file_version"):
            return True
        value = event.summary.value[0] if event.summary.value else None
        if value is None or value.HasField("simple_value"):
            return bool(event.step < kept.scalars_before)
        if event.step >= kept.others_before:
            return False
        if (described_event := description.get(value.tag)) is not None:
            is_same = _content(value) == _content(described_event.value[0])
            if value.tag == SESSION_START_INFO_TAG and not is_same:
                return False
            is_current[value.tag] = is_same
        return True

    def spans() -> Iterator[tuple[int, int]]:
        """The positions of the events that stay, while their counts are taken over into `end`."""
        mark, read_to, dropped_bytes = end.end, 0, 0
        if other_hparams and mark.size_bytes:
            for start, stop, record in _read_records(path, 0):
                event = Event.FromString(record)
                if stop > mark.size_bytes or any(value.tag not in _DESCRIPTION for value in event.summary.value):
                    break
                if is_kept(event):
                    yield start, stop
                else:
                    dropped_bytes += stop - start
                read_to = stop
        if dropped_bytes:
            # The bytes have moved, so their digest is computed again.
            end.end = end.before_newest = replace(mark, size_bytes=mark.size_bytes - dropped_bytes, digest="")
        yield read_to, mark.size_bytes
        for start, stop, record in _read_records(path, mark.size_bytes):
            event = Event.FromString(record)
            if is_kept(event):
                end.add(stop - start, _FILE_STEP if event.HasField("file_version") else event.step, {})
                yield start, stop

    keep_spans(path, spans())
    return is_current


def _read_records(path: Path, start: int) -> Iterator[tuple[int, int, bytes]]:
    """The (first byte, end, content) of each record from byte `start` on, up to a damaged or truncated one. tensorboard
    itself reads only whole files."""
    with open(path, "rb") as file:
        file.seek(start)
        while len(header := file.read(_HEADER_BYTES)) == _HEADER_BYTES and _has_length(header):
            length = int.from_bytes(header[:8], "little")
            content = file.read(length + _CRC_BYTES)
            record = content[:length]
            if len(content) < length + _CRC_BYTES or masked_crc32c(record).to_bytes(4, "little") != content[length:]:
                return
            stop = start + len(header) + len(content)
            yield start, stop, record
            start = stop


@lru_cache(maxsize=1024)
def _has_length(header: bytes) -> bool:
    """Whether the checksum of a record's length is right. Cached, because checksums are slow and records alike."""
    return bool(masked_crc32c(header[:8]).to_bytes(4, "little") == header[8:])


def description_digests(description: Mapping[str, Summary]) -> dict[str, str]:
    """Digests of what describes the run, by tag."""
    return {tag: _digest(_content(event.value[0])) for tag, event in description.items()}


def _digest(content: object) -> str:
    """A digest of a message, or of messages by name, that depends on their content alone."""
    if isinstance(content, dict):
        content = sorted((name, value.SerializeToString(deterministic=True)) for name, value in content.items())
        return xxhash.xxh3_128_hexdigest(repr(content).encode())
    assert hasattr(content, "SerializeToString")
    return xxhash.xxh3_128_hexdigest(content.SerializeToString(deterministic=True))


def _content(value: Summary.Value) -> object:
    """The content to compare: a text, or hyperparameters without the start time of the attempt."""
    if value.tag != SESSION_START_INFO_TAG:
        return value.tensor
    return dict(HParamsPluginData.FromString(value.metadata.plugin_data.content).session_start_info.hparams)
