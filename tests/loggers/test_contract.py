"""What every logger promises, whatever it writes to."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer_cli.loggers.base import Logger, Record, RunFacts, Table
from trainer_cli.loggers.console import ConsoleLogger
from trainer_cli.loggers.media import MediaLogger
from trainer_cli.loggers.tensorboard import TensorBoardLogger
from trainer_cli.loggers.text_files import CsvLogger, JsonlLogger

MAKERS: dict[str, Callable[[], Logger]] = {
    "jsonl": JsonlLogger,
    "csv": CsvLogger,
    "media": MediaLogger,
    "tensorboard": TensorBoardLogger,
    "console-plain": lambda: ConsoleLogger("plain", io.StringIO()),
    "console-rich": lambda: ConsoleLogger("rich", io.StringIO()),
    "console-off": lambda: ConsoleLogger("off", io.StringIO()),
}


@pytest.fixture(params=list(MAKERS))
def logger(request: pytest.FixtureRequest) -> Iterator[Logger]:
    made = MAKERS[request.param]()
    yield made
    made.close()


def a_record(step: int = 1, **metrics: float) -> Record:
    return Record(step, step / 10, 1e9 + step, metrics or {"train/loss": 0.5}, samples=32 * step)


def test_a_logger_can_be_closed_twice_and_without_a_start(logger: Logger, tmp_path: Path) -> None:
    logger.close()
    logger.start(RunFacts(run_dir=tmp_path))
    logger.log(a_record())
    logger.close()
    before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    logger.close()
    logger.flush(durable=True)
    logger.log(a_record(2))
    assert {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_logger_takes_numbers_that_are_not_finite(logger: Logger, tmp_path: Path) -> None:
    logger.start(RunFacts(run_dir=tmp_path, total_steps=10))
    logger.log(a_record(train=float("nan"), up=float("inf"), down=float("-inf"), huge=1e300))
    logger.flush(durable=True)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.stat().st_size for path in written), "a record with them is written like any other"


def test_a_logger_takes_texts_images_and_histograms_or_leaves_them_out(logger: Logger, tmp_path: Path) -> None:
    media: dict[str, Any] = {
        "texts": {"a": "b"}, "images": {"c": np.zeros((2, 2, 3), dtype=np.uint8)}, "histograms": {"d": np.ones(3)},
        "tables": {"e": Table(("x", "y"), ((1, "a|b"),))},
    }  # fmt: skip
    logger.start(RunFacts(run_dir=tmp_path, total_steps=10))
    logger.log(Record(1, 0.1, 1e9, {}, **media))
    logger.flush(durable=True)
    written = {path.name.partition(".")[0]: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    if isinstance(logger, ConsoleLogger):
        stream = logger._given_stream
        assert isinstance(stream, io.StringIO)
        assert "step" not in stream.getvalue()
    # Event files, media.jsonl, and its images.
    kept = {name for name, content in written.items() if content}
    assert all(name in ("events", "media") or name.startswith("step1-") for name in kept)
    logger.log(Record(2, 0.1, 1e9, {"train/loss": 0.5}, **media))


def test_rewinding_and_making_a_logger_write_nothing(logger: Logger, tmp_path: Path) -> None:
    logger.rewind(tmp_path, 5)
    assert list(tmp_path.iterdir()) == []
    logger.rewind(tmp_path / "run", -1)
    assert not (tmp_path / "run").exists()
    logger.start(RunFacts(run_dir=tmp_path / "run"))


def test_importing_loggers_imports_nothing_heavy() -> None:
    modules = ", ".join(
        f"trainer_cli.loggers.{name}" for name in ("base", "console", "text_files", "media", "tensorboard")
    )
    code = f"import sys; import {modules}\nassert not {{'torch', 'tensorboard', 'rich', 'numpy'}} & set(sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
