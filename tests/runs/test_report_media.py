"""The media of runs in a report: which steps and names are shown, bounded, and whatever the file holds."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reported import BEGAN, make_run

from trainer_cli.addons.view import report_media
from trainer_cli.addons.view.report_media import media
from trainer_cli.loggers.base import Record, RunFacts, Table
from trainer_cli.loggers.media import MEDIA_FILE, MediaLogger
from trainer_cli.runs.record import RunRecord
from trainer_cli.runs.run import Run

MATRIX = Table(("class", "a", "b"), (("a", 3, 1), ("b", 0, 5)), is_matrix=True)


def read(path: Path) -> RunRecord:
    return Run(path).record(BEGAN)


def shown(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The items of each medium of a run, by name."""
    return {medium["name"]: medium["items"] for block in media([read(path)], ["run"]) for medium in block["media"]}


def write(path: Path, lines: list[Any]) -> None:
    (path / MEDIA_FILE).write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", steps=20).path


def test_what_a_run_has_logged_is_shown_with_a_matrix_in_place_of_its_picture(run: Path) -> None:
    logger = MediaLogger()
    logger.start(RunFacts(run_dir=run))
    image = np.full((2, 2, 3), 7, np.uint8)
    for step in (1, 2):
        logger.log(
            Record(
                step, 0.1, BEGAN, {}, texts={"words": f"text {step}"}, images={"picture": image, "confusion": image},
                histograms={"weights": np.arange(5.0)}, tables={"confusion": MATRIX},
            )
        )  # fmt: skip
    logger.close()
    found = shown(run)
    assert [(item["step"], item["text"]) for item in found["words"]] == [(1, "text 1"), (2, "text 2")]
    assert base64.b64decode(found["picture"][1]["image"].partition(",")[2]).startswith(b"\x89PNG")
    assert sum(found["weights"][0]["counts"]) == 5
    assert len(found["confusion"]) == 2
    assert found["confusion"][0]["rows"] == [["a", "3", "1"], ["b", "0", "5"]]
    assert found["confusion"][0]["matrix"] is True


def test_numbers_of_a_table_have_few_digits(run: Path) -> None:
    write(
        run,
        [
            {
                "step": 1,
                "tables": {"t": {"columns": ["a", "b", "c", "d"], "rows": [[1 / 3, 12345678, "0.123456789", None]]}},
            }
        ],
    )
    assert shown(run)["t"][0]["rows"] == [["0.333333", "12345678", "0.123456789", ""]]


def test_of_many_steps_the_first_the_last_and_some_between_are_shown(run: Path) -> None:
    write(run, [{"step": step, "texts": {"t": "x"}} for step in range(0, 1000, 10)])
    steps = [item["step"] for item in shown(run)["t"]]
    assert (steps[0], steps[-1], len(steps)) == (0, 990, 12)
    assert steps == sorted(set(steps))


def test_histograms_have_more_steps_and_each_item_its_time(run: Path) -> None:
    histogram = {"histograms": {"h": {"counts": [1, 2], "edges": [0, 1, 2]}}}
    write(run, [{"step": step, "time": BEGAN + step, **histogram} for step in range(0, 1000, 10)])
    items = shown(run)["h"]
    assert (items[0]["step"], items[-1]["step"], len(items)) == (0, 990, 50)
    assert items[-1]["time"] == "2023-11-14 22:29:50"
    # Not the time of a record of a run.
    write(run, [{"step": 1, "time": 1e300, **histogram}, {"step": 2, **histogram}])
    assert [(item["step"], item["time"]) for item in shown(run)["h"]] == [(2, "")]


def test_the_newest_of_each_name_come_first_where_there_is_no_room_for_all(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_media, "_MOST_BYTES", 4000)
    write(run, [{"step": step, "texts": {"a": "x" * 900, "b": "y" * 900}} for step in (1, 2, 3, 4)])
    assert {name: [item["step"] for item in items] for name, items in shown(run).items()} == {"a": [3, 4], "b": [3, 4]}


@pytest.mark.parametrize(
    "line",
    [
        "{torn", "[]", "null", '{"step": "1", "texts": {"t": "x"}}', '{"step": 1}', '{"step": 1, "texts": []}',
        '{"step": 1, "images": {"i": "media/missing.png"}}', '{"step": 1, "images": {"i": "../config.yaml/.."}}',
        '{"step": 1, "images": {"i": 5}}', '{"step": 1, "tables": {"t": {"columns": ["a"], "rows": [[1, 2]]}}}',
        '{"step": 1, "tables": {"t": {"columns": 1, "rows": [[1, 2]]}}}', '{"step": 1, "tables": {"t": 3}}',
        '{"step": 1, "histograms": {"h": {"counts": ["a"], "edges": [1, 2]}}}',
        '{"step": 1, "histograms": {"h": {"counts": [1], "edges": [1]}}}', '{"step": 1, "histograms": {"h": [1]}}',
        '{"step": 1, "histograms": {"h": {"counts": [NaN], "edges": [1, 1e999]}}}',
    ],
)  # fmt: skip
def test_a_line_that_is_not_of_this_program_is_left_out(run: Path, line: str) -> None:
    write(run, [line, {"step": 2, "texts": {"kept": "x"}}])
    assert list(shown(run)) == ["kept"]


def test_an_image_outside_of_the_run_is_never_read(run: Path) -> None:
    secret = run.parent / "secret.png"
    secret.write_bytes(b"secret")
    write(run, [{"step": 1, "images": {"up": "media/../../secret.png", "root": str(secret)}, "texts": {"t": "x"}}])
    assert list(shown(run)) == ["t"]


def test_runs_without_media_have_no_block_and_of_many_runs_the_first_are_shown(tmp_path: Path) -> None:
    records = []
    for number in range(10):
        path = make_run(tmp_path / str(number), steps=10).path
        if number:
            write(path, [{"step": 1, "texts": {"t": "x"}}])
        records.append(read(path))
    assert [block["title"] for block in media(records, [f"run {number}" for number in range(10)])] == [
        f"run {number}" for number in range(1, 9)
    ]
    assert list(media(records[:1], ["alone"])) == []


def test_only_images_become_part_of_the_page(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a key")
    (run / "media").mkdir()
    (run / "media/link.png").symlink_to(secret)
    write(run, [{"step": 1, "images": {"i": "media/link.png"}}])
    assert shown(run) == {}
