"""Texts, images, histograms and tables in a run directory: a line of `media.jsonl` for each record that has some.

Images are PNG files in the folder `media` beside it, named `stepN-DIGEST.png` by their step and name; a line names its
files. They are written before their line, so a line never names a file that was not written. A rewind drops the lines
of later steps, and then their files.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from trainer_cli.files import naming, sync
from trainer_cli.loggers.base import Record, RunFacts, in_run_dir
from trainer_cli.loggers.text_files import FileLogger, Line, read_record
from trainer_cli.png import encode_png
from trainer_cli.strict_json import strict_json

log = logging.getLogger(__name__)

MEDIA_FILE = "media.jsonl"
MEDIA_FOLDER = "media"
_FILE = re.compile(r"step(\d+)-[0-9a-f]+\.png")


class MediaLogger(FileLogger):
    """Appends what records have besides metrics. Nothing is created before the first of it.

    Args:
        path: the file; the images are in the folder `media` beside it.
        most_bytes: once lines and images are this large, later records are left out, with a warning.
    """

    def __init__(self, path: str = MEDIA_FILE, most_bytes: int = 2**30) -> None:
        super().__init__(path)
        self.most_bytes = most_bytes
        self._facts: RunFacts | None = None
        self._size_bytes = 0
        self._unsynced: deque[Path] = deque()
        """Images that are written and may not be on the disk yet."""
        self._is_full = False

    @property
    def _folder(self) -> Path:
        return self._full_path.parent / MEDIA_FOLDER

    def read_line(self, line: bytes, start: int) -> Line | None:
        content = read_record(line)
        return None if content is None else Line(content.step)

    def rewind(self, run_dir: Path, step: int) -> None:
        """Drop the lines of later steps, and then their images."""
        super().rewind(run_dir, step)
        for file in list(_images(in_run_dir(self.path, run_dir).parent / MEDIA_FOLDER)):
            if int(_FILE.fullmatch(file.name)[1]) > step:  # type: ignore[index]
                file.unlink(missing_ok=True)
        self._unsynced = deque(file for file in self._unsynced if file.exists())

    def start(self, facts: RunFacts) -> None:
        """Remember the run; nothing is opened yet."""
        # The file is opened by the first record that has something for it.
        self._facts, self._is_full = facts, False
        self._full_path = in_run_dir(self.path, facts.run_dir)

    def log(self, record: Record) -> None:
        """Write the images of a record, and then its line; open the file at the first one."""
        if self._facts is None or not record.has_media:
            return
        if self._file is None:
            super().start(self._facts)
            self._size_bytes = self._full_path.stat().st_size
            self._size_bytes += sum(file.stat().st_size for file in _images(self._folder))
        images = {self._image_file(record.step, name): encode_png(image) for name, image in record.images.items()}
        files = {name: f"{MEDIA_FOLDER}/{file.name}" for name, file in zip(record.images, images, strict=True)}
        line = _encode(record, files)
        size_bytes = len(line) + sum(map(len, images.values()))
        if self._size_bytes + size_bytes > self.most_bytes:
            self._refuse()
            return
        for file, content in images.items():
            self._write_image(file, content)
        self._append(line, record.step, {})
        self._size_bytes += size_bytes

    def flush(self, durable: bool = False) -> None:
        """If `durable`, sync images, their folder and the file."""
        if durable and self._file is not None:
            synced_images = bool(self._unsynced)
            while self._unsynced:
                sync(self._unsynced[0])
                # Only now: one whose sync fails is synced again by the next flush.
                self._unsynced.popleft()
            if synced_images:
                sync(self._folder)
        super().flush(durable)

    def close(self) -> None:
        self._facts = None
        super().close()

    def _image_file(self, step: int, name: str) -> Path:
        return self._folder / f"step{step}-{xxhash.xxh3_64_hexdigest(name.encode())}.png"

    def _write_image(self, file: Path, content: bytes) -> None:
        """Write an image, or leave no part of it."""
        try:
            file.parent.mkdir(exist_ok=True)
            with naming(file):
                file.write_bytes(content)
        except OSError:
            file.unlink(missing_ok=True)
            raise
        self._unsynced.append(file)

    def _refuse(self) -> None:
        """Warn once that records are left out."""
        if not self._is_full:
            self._is_full = True
            log.warning(
                "%s and its images hold %d MB, so later texts, images, histograms and tables are left out of them",
                self._full_path, self._size_bytes // 10**6,
            )  # fmt: skip


def _images(folder: Path) -> Iterator[Path]:
    """The files of images in the folder, which may not exist."""
    return (file for file in folder.glob("step*.png") if _FILE.fullmatch(file.name))


def _encode(record: Record, files: Mapping[str, str]) -> bytes:
    """The line of a record, with its newline; `files`: name of an image -> its file."""
    line: dict[str, Any] = {"step": record.step, "epoch": record.epoch, "time": round(record.time, 3)}
    tables = {
        name: {"columns": table.columns, "rows": table.rows, **({"matrix": True} if table.is_matrix else {})}
        for name, table in record.tables.items()
    }
    histograms = {
        name: {"counts": counts.tolist(), "edges": [float(f"{edge:.6g}") for edge in edges.tolist()]}
        for name, (counts, edges) in record.binned().items()
    }
    kinds = {"texts": record.texts, "images": files, "histograms": histograms, "tables": tables}
    line.update({kind: values for kind, values in kinds.items() if values})
    return strict_json(line).encode() + b"\n"
