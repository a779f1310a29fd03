"""Files with the predictions of a model: parts that are written one after the other, and then joined.

A part holds the samples of consecutive batches. It has its final name once it is whole and on the disk, so a command
that was killed continues with the missing parts, and processes that write parts need not communicate.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer_cli.addons.predict.prediction_writers import PredictionWriter
from trainer_cli.errors import DISK_CURES, OF_ONE_FILE, TrainError, UserError, disk_cure
from trainer_cli.files import locked_file, replace, staged_path, sync

_FACTS = "predictions.json"
_SUFFIX = ".parts"


class PredictionFile:
    """The file with the predictions of one checkpoint on one loader, and the parts of it that are there.

    Args:
        count: number of parts.
        facts: what the predictions depend on. Parts that were written with other facts are refused.
    """

    def __init__(self, folder: Path, name: str, writer: PredictionWriter, count: int, facts: Mapping[str, Any]) -> None:
        self.path = folder / f"{name}{writer.suffix}"
        # By the name of the file: another writer may write into the same folder.
        self._parts_folder = folder / f".{self.path.name}{_SUFFIX}"
        self._facts_file = folder / f"{self.path.name}.{_FACTS}"
        self._writer, self._count = writer, count
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._locked(folder):
                self._check_facts(facts)
                self.is_done = self.path.exists()
                if not self.is_done:
                    self._parts_folder.mkdir(exist_ok=True)
        except PermissionError as error:
            message = f"{folder} cannot be written: {error.strerror}"
            raise UserError(message, cure="Set predict.folder to another folder.") from error

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """Hold the lock of the folder in the block."""
        # Other processes write parts of the same file.
        with locked_file(folder, os.O_RDONLY | os.O_DIRECTORY):
            yield

    def _check_facts(self, facts: Mapping[str, Any]) -> None:
        """Write the facts; if there are some of an earlier command, compare them.

        Raises:
            UserError: what is in the folder was made with other facts, or without any.
        """
        text = json.dumps(facts, sort_keys=True, indent=1)
        if not self._facts_file.exists():
            if self.path.exists():
                raise UserError(
                    f"{self.path} exists, but there is no {self._facts_file.name} that describes it",
                    cure="Set predict.folder to another folder, or remove the file.",
                )
            replace(self._facts_file, [text.encode()])
        elif (old_text := self._facts_file.read_text("utf-8")) != text:
            if not self.path.exists() and not any(self._parts_folder.glob("[!.]*")):
                # Of a command that failed before its first part.
                replace(self._facts_file, [text.encode()])
                return
            old = json.loads(old_text)
            changed = sorted(name for name in {*old, *facts} if old.get(name) != facts.get(name))
            raise UserError(
                f"{self.path.parent} has predictions of '{self.path.stem}' that were made with another "
                f"{' and '.join(changed)}",
                cure=f"Set predict.folder to another folder, or remove {self._facts_file}, {self.path.name} and "
                f"{self._parts_folder.name}.",
            )

    def part(self, number: int) -> Path:
        """The file of a part."""
        return self._parts_folder / f"{number:08d}{self._writer.suffix}"

    def missing(self, rank: int = 0, world_size: int = 1) -> list[int]:
        """The parts that a process has to write: its share of all, without those that exist."""
        # In one stretch, so that a loader is entered once.
        begin, end = (self._count * rank_count // world_size for rank_count in (rank, rank + 1))
        return [] if self.is_done else [number for number in range(begin, end) if not self.part(number).exists()]

    def write(self, number: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a part. It has its name only once it is whole and on the disk."""
        path = self.part(number)
        # By the process, so that two that write the same part, as after a change of their number, do not mix.
        staged = path.with_name(f".tmp.{os.getpid()}.{path.name}")
        try:
            with _naming_file(self.path):
                self._writer.write(staged, rows)
                self._check_written(staged, "write")
                _publish(staged, path)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise

    def finish(self) -> bool:
        """Join the parts once all exist. False: another process has still to write some."""
        with self._locked(self.path.parent):
            if self.path.exists():
                return True
            parts = [self.part(number) for number in range(self._count)]
            if not all(file.exists() for file in parts):
                return False
            staged = staged_path(self.path)
            try:
                with _naming_file(self.path):
                    self._writer.join(parts, staged)
                    self._check_written(staged, "join")
                    _publish(staged, self.path)
            except BaseException:
                staged.unlink(missing_ok=True)
                raise
            # Only now: a crash before it joins them again.
            shutil.rmtree(self._parts_folder)
            return True

    def _check_written(self, path: Path, method: str) -> None:
        """Raise UserError if the method of a user's writer has not written the file."""
        if not path.is_file():
            raise UserError(
                f"{type(self._writer).__name__}.{method} has not written the file that it was called with",
                where="predict.writer",
                cure="Write to the argument `path`, whose name is temporary.",
            )


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Name the file of predictions in the error of a full or broken disk, which says nothing of it itself."""
    try:
        yield
    except OSError as error:
        # The dataset and the model run in the block, too, and may meet a file of their own.
        if error.errno not in DISK_CURES or error.errno in OF_ONE_FILE:
            raise
        cure = f"{disk_cure(error)} Then run the same command again: it continues with the parts that are missing."
        raise TrainError(f"cannot write predictions: {error.strerror}", where=str(path), cure=cure) from error


def _publish(staged: Path, path: Path) -> None:
    """Give a whole file its name. Both are durable."""
    sync(staged)
    os.replace(staged, path)
    sync(path.parent)
