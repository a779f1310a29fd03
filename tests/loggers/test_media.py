"""What is kept of texts, images, histograms and tables: exactly once, bounded, and readable by others."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainer_cli.loggers.base import Record, RunFacts, Table
from trainer_cli.loggers.media import MEDIA_FILE, MediaLogger

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
TABLE = Table(("class", "a", "b"), (("a", 3, 1), ("b", 0, 5)), is_matrix=True)


def record(step: int, **media: Any) -> Record:
    return Record(step, step / 10, 1e9 + step, {"train/loss": 0.5}, **(media or {"texts": {"t": f"text {step}"}}))


def started(folder: Path, keep: int = -1, **settings: Any) -> MediaLogger:
    """A logger of an attempt that keeps the records up to a step."""
    logger = MediaLogger(**settings)
    logger.rewind(folder, keep)
    logger.start(RunFacts(run_dir=folder))
    return logger


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / MEDIA_FILE).read_text().splitlines()]


def test_every_kind_is_in_the_line_of_its_step_and_images_are_files_beside_it(tmp_path: Path) -> None:
    logger = started(tmp_path)
    histograms = {"h": np.array([0.0, 0.5, 1.0, 1.0]), "empty": np.zeros(0)}
    logger.log(record(7, texts={"t": "<b>"}, images={"i/1": GREY}, histograms=histograms, tables={"m": TABLE}))
    logger.log(Record(8, 0.8, 1e9, {"train/loss": 0.5}))
    logger.close()
    (line,) = lines(tmp_path)
    assert line["step"] == 7
    assert line["texts"] == {"t": "<b>"}
    assert line["tables"] == {"m": {"columns": ["class", "a", "b"], "rows": [["a", 3, 1], ["b", 0, 5]], "matrix": True}}
    assert list(line["histograms"]) == ["h"]
    assert sum(line["histograms"]["h"]["counts"]) == 4
    assert line["histograms"]["h"]["edges"][::64] == [0, 1]
    assert "train/loss" not in line
    assert np.array_equal(np.asarray(Image.open(tmp_path / line["images"]["i/1"])), GREY[..., 0])


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_images_of_all_channels_are_read_back_bit_for_bit(channels: int, mode: str, tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 9, channels)).astype(np.uint8)
    logger = started(tmp_path)
    logger.log(record(1, images={"i": image}))
    content = (tmp_path / lines(tmp_path)[0]["images"]["i"]).read_bytes()
    logger.close()
    read = Image.open(io.BytesIO(content))
    assert read.mode == mode
    assert np.array_equal(np.asarray(read).reshape(image.shape), image)


def test_nothing_is_created_before_the_first_medium(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log(Record(1, 0.1, 1e9, {"train/loss": 0.5}))
    logger.flush(durable=True)
    logger.close()
    assert list(tmp_path.iterdir()) == []


def test_a_resume_drops_what_is_later_than_its_checkpoint_and_writes_it_once(tmp_path: Path) -> None:
    logger = started(tmp_path)
    for step in (1, 2, 3):
        logger.log(record(step, texts={"t": str(step)}, images={"i": GREY + step}))
        logger.flush(durable=True)
        if step == 2:
            state = logger.state_dict()
    logger.close()
    # What a crash tears off, and an image whose line was not written.
    with open(tmp_path / MEDIA_FILE, "a") as file:
        file.write('{"step": 4, "te')
    (tmp_path / "media" / "step4-0123456789abcdef.png").write_bytes(b"torn")
    (tmp_path / "media" / "mine.png").write_bytes(b"of the user")
    resumed = MediaLogger()
    resumed.load_state_dict(state)
    resumed.rewind(tmp_path, 2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert len(list((tmp_path / "media").glob("step*"))) == 2
    assert (tmp_path / "media" / "mine.png").exists()
    resumed.start(RunFacts(run_dir=tmp_path))
    resumed.log(record(3, texts={"t": "3"}, images={"i": GREY + 3}))
    resumed.close()
    assert [line["texts"]["t"] for line in lines(tmp_path)] == ["1", "2", "3"]
    for line in lines(tmp_path):
        assert np.array_equal(np.asarray(Image.open(tmp_path / line["images"]["i"])), GREY[..., 0] + line["step"])


def test_media_are_bounded_with_one_warning_also_over_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for attempt in (0, 1):
        logger = started(tmp_path, keep=attempt * 9, most_bytes=2000)
        for step in range(10 * attempt, 10 * attempt + 10):
            logger.log(record(step, texts={"t": "x" * 200}))
        logger.close()
    size = (tmp_path / MEDIA_FILE).stat().st_size
    assert 1500 < size <= 2000
    assert caplog.text.count("are left out of them") == 2, "once in each attempt"


def test_an_image_that_cannot_be_written_leaves_no_line(tmp_path: Path) -> None:
    (tmp_path / "media").write_text("a file where the folder should be")
    logger = started(tmp_path)
    with pytest.raises(OSError, match="media"):
        logger.log(record(1, images={"i": GREY}))
    assert (tmp_path / MEDIA_FILE).read_bytes() == b""
    logger.close()
