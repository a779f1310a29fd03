"""The benchmarks' own arithmetic: ratios by round, tables, plots, and what counts as slower."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

import chart
import gpu
import timing
from settings import Settings, Size
from slower import compare
from table import Column, Row, Table

ROOT = Path(__file__).parents[2]
STEADY = [1.0, 1.01, 1.02]


def _table(ours: list[float], bare: list[float] = STEADY, **settings: Any) -> Table:
    rows = [Row("bare", {"step": bare}), Row("ours", {"step": ours})]
    return Table("loop", "A step", "bare", [Column("step", "s", 2)], rows, settings)


def test_no_module_of_the_benchmarks_has_the_name_of_a_helper_of_the_tests() -> None:
    # All are imported by name from folders on one path: the second would be the first. Modules of packages are not.
    scripts = {path.stem for path in (*(ROOT / "scripts" / "bench").glob("*.py"), *Path(__file__).parent.glob("*.py"))}
    helpers = {
        path.stem for path in (ROOT / "tests").rglob("*.py")
        if path.parent != Path(__file__).parent and not path.with_name("__init__.py").exists()
    }  # fmt: skip
    assert scripts & helpers == {"conftest"} & scripts


def test_no_module_of_the_benchmarks_has_the_name_of_a_project_that_a_test_writes() -> None:
    # It would be imported in place of the project's, in a process that runs the tests of both.
    scripts = {path.stem for path in (ROOT / "scripts" / "bench").glob("*.py")}
    written = {
        name for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r'/ "(\w+)\.py"\)\.write_text', path.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert len(written) > 20
    assert scripts & written == set()


def test_a_ratio_is_taken_in_each_round() -> None:
    table = _table([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert table.ratios(table.rows[1], "step") == [2.0, 2.0, 2.0]
    assert table.ratios(table.rows[0], "step") == []


def test_a_ratio_to_a_base_of_other_rounds_is_to_its_median() -> None:
    table = _table([2.0, 4.0], [1.0, 2.0, 30.0])
    assert table.ratios(table.rows[1], "step") == [1.0, 2.0]


def test_a_row_may_have_a_base_of_its_own() -> None:
    table = _table([2.0, 2.0, 2.0])
    table.rows.append(Row("other", {"step": [4.0, 4.0, 4.0]}, base="ours"))
    table.rows.append(Row("itself", {"step": [4.0, 4.0, 4.0]}, base="itself"))
    assert table.ratios(table.rows[2], "step") == [2.0, 2.0, 2.0]
    assert table.ratios(table.rows[3], "step") == []


def test_a_table_shows_medians_spread_ratios_and_who_was_skipped() -> None:
    table = _table([2.0, 2.5, 3.0], [1.0, 1.0, 1.0])
    table.skipped["ignite"] = "it is not installed"
    assert table.to_markdown() == (
        "| A step | step, s | step, × base |\n"
        "| --- | --- | --- |\n"
        "| bare | 1.00 [1.00 to 1.00] |  |\n"
        "| ours | 2.50 [2.00 to 3.00] | 2.50 [2.00 to 3.00] |\n"
        "| ignite | not measured: it is not installed |  |\n\n"
        "Base: bare. Medians [min to max] of 3 samples a row."
    )


def test_a_table_comes_back_from_json() -> None:
    table = _table([2.0, 2.5, 3.0], steps=5)
    table.rows[1].series, table.rows[1].x = "ours", 10.0
    plain = json.loads(json.dumps(table.to_json()))
    assert plain["rows"][1]["figures"]["step"]["median"] == 2.5
    assert Table.from_json(plain) == table
    assert table.points() == {"ours": [(10.0, 2.5)]}


@pytest.mark.parametrize(
    ("before", "after", "slower", "faster"),
    [
        pytest.param([2.0, 2.1, 2.2], [3.0, 3.1, 3.2], True, False, id="half again as long"),
        pytest.param([3.0, 3.1, 3.2], [2.0, 2.1, 2.2], False, True, id="faster"),
        pytest.param([2.0, 2.1, 2.9], [2.6, 2.7, 2.8], False, False, id="within what was seen before"),
        pytest.param([2.0, 2.1, 2.2], [2.15, 2.9, 3.0], False, False, id="one new round is as fast as before"),
        pytest.param([2.0, 2.0, 2.0], [2.05, 2.05, 2.05], False, False, id="steady, but by too little"),
    ],
)
def test_only_what_is_beyond_the_noise_is_slower(
    before: list[float], after: list[float], slower: bool, faster: bool
) -> None:
    found = compare([_table(before, [1.0] * 3)], [_table(after, [1.0] * 3)])
    assert (bool(found.slower), bool(found.faster), found.compared) == (slower, faster, 1)


def test_a_slower_result_is_named_with_both_figures() -> None:
    (change,) = compare([_table([2.0] * 3, [1.0] * 3)], [_table([3.0] * 3, [1.0] * 3)]).slower
    assert str(change) == "loop, ours, step: 2 -> 3 times the base, 1.50 times"


def test_a_slower_machine_is_no_slower_program() -> None:
    found = compare([_table([2.0, 2.1, 2.2], [1.0, 1.05, 1.1])], [_table([4.0, 4.2, 4.4], [2.0, 2.1, 2.2])])
    assert (found.slower, found.compared) == ([], 1)


def test_a_difference_below_the_clocks_resolution_is_none() -> None:
    def stalls(samples: list[float]) -> Table:
        table = _table(samples, [1.0] * 3)
        table.columns = [Column("step", "s", 4, resolution=0.002)]
        return table

    assert not compare([stalls([0.0001] * 3)], [stalls([0.0009] * 3)]).slower
    assert compare([stalls([0.0001] * 3)], [stalls([0.0099] * 3)]).slower


def test_what_cannot_be_compared_is_said() -> None:
    small, large = _table([2.0] * 3, steps=5), _table([2.0] * 3, steps=500)
    assert compare([small], [large]).left_out == ["loop: it was measured with other settings"]
    assert compare([], [small]).left_out == ["loop: it is not in the earlier result"]
    assert "fewer than 3 samples" in compare([small], [_table([9.0], steps=5)]).left_out[0]
    renamed = _table([2.0] * 3, steps=5)
    renamed.rows[1].name = "theirs"
    assert len(compare([small], [renamed]).left_out) == 2


def test_contenders_take_turns_and_one_that_cannot_run_is_skipped() -> None:
    calls: list[str] = []

    def counted(name: str) -> dict[str, float | list[float]]:
        calls.append(name)
        if name == "peer":
            raise timing.Skipped("it is not installed")
        return {"time": float(len(calls)), "many": [1.0, 2.0]}

    contenders = {name: lambda name=name: counted(name) for name in ("first", "second", "peer")}
    samples, skipped = timing.interleaved(contenders, 2)
    assert skipped == {"peer": "it is not installed"}
    assert calls.count("peer") == 1
    rounds = [one for one in calls if one != "peer"]
    assert [sorted(rounds[start : start + 2]) for start in (0, 2, 4)] == [["first", "second"]] * 3
    assert {name: {column: len(own) for column, own in found.items()} for name, found in samples.items()} == {
        name: {"time": 2, "many": 4} for name in ("first", "second")
    }


def test_one_that_is_needed_is_not_skipped() -> None:
    def fails() -> dict[str, float]:
        raise timing.Skipped("failed: no room")

    with pytest.raises(SystemExit, match="ours: failed: no room"):
        timing.interleaved({"ours": fails}, 1, needed=["ours"])


def test_a_failed_process_is_reported_by_its_last_words_without_paths() -> None:
    with pytest.raises(timing.Skipped, match=r"^failed: OSError: no … there$"):
        timing.run([sys.executable, "-c", "raise OSError('no /some/where/else there')"])


def test_a_linear_cost_grows_with_the_first_power() -> None:
    assert chart.exponent([(1, 2.0), (10, 20.0), (100, 200.0)]) == pytest.approx(1)
    assert chart.exponent([(1, 2.0), (10, 200.0), (100, 20_000.0)]) == pytest.approx(2)
    assert chart.exponent([(0, 5.0), (1, 2.0), (10, 20.0), (100, 200.0)]) == pytest.approx(1)
    assert chart.exponent([(0, 5.0), (10, 20.0), (100, 200.0)]) is None


def test_a_plot_is_svg_with_every_series_named_and_what_is_not_above_zero_left_out() -> None:
    drawn = ElementTree.fromstring(
        chart.svg("Saves <of>", "MB", "s", {"ours": [(10, 0.1), (100, 1.0), (0, 5.0)], "no points": []})
    )
    texts = {"".join(one.itertext()) for one in drawn.iter() if one.tag.endswith("text")}
    assert {"Saves <of>", "MB", "s", "ours"} <= texts
    assert "no points" not in texts
    assert sum(one.tag.endswith("circle") for one in drawn.iter()) == 2


@pytest.mark.parametrize(
    ("after", "code", "said"),
    [
        pytest.param([3.0] * 3, 1, "slower: loop, ours, step: 2 -> 3", id="slower"),
        pytest.param([2.0] * 3, 0, "Nothing got slower", id="the same"),
        pytest.param([2.0], 2, "not compared: loop, ours, step: fewer than 3", id="nothing to compare"),
    ],
)
def test_the_exit_code_says_whether_anything_got_slower(
    after: list[float], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    spec = importlib.util.spec_from_file_location("bench_main", ROOT / "scripts" / "bench" / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    earlier = tmp_path / "old.json"
    earlier.write_text(json.dumps({"tables": [_table([2.0] * 3, [1.0] * 3).to_json()]}))
    monkeypatch.setattr(command, "measured", lambda name, settings: [_table(after, [1.0] * 3)])
    arguments = ["--only", "loop", "--out", str(tmp_path / "new"), "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments, "--compare", str(earlier)])
    assert command.main() == code
    assert said in capsys.readouterr().out


def test_a_table_is_measured_in_a_process_of_its_own_and_written(tmp_path: Path) -> None:
    """The whole way, in processes of its own; nothing is said of how long anything took."""
    command = [sys.executable, str(ROOT / "scripts" / "bench"), "--smoke", "--only", "cli"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--out", "results"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "results" / "results.json").read_text())
    assert result["size"] == "smoke"
    assert result["tables"][0]["rows"][0]["figures"]["time"]["count"] == 1
    assert done.stdout == (tmp_path / "results" / "results.md").read_text() + "\n"
    assert "| train --help |" in done.stdout
    assert not {str(tmp_path), os.uname().nodename} & set(done.stdout.split())
    assert [one.name for one in tmp_path.iterdir()] == ["results"]


def test_an_earlier_result_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench"), "--compare", "absent.json"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "there is no file absent.json" in done.stderr


@pytest.mark.addon("text")
def test_a_gpt_is_measured_by_hand_and_by_the_trainer_and_while_it_saves(tmp_path: Path) -> None:
    size = gpu.Size(vocab_size=32, context=8, layers=1, heads=1, width=16, batch=2, warm=1, steps=4)
    names = [gpu.BASE, "trainer", "trainer, saves behind"]
    table = gpu.table(size, torch.device("cpu"), Settings(Size.smoke, None, str(tmp_path)), names)
    assert [row.name for row in table.rows] == names
    assert all(row.samples["step"][0] > 0 for row in table.rows)
    assert [len(list(saves.glob("step*"))) for saves in tmp_path.glob("saves-*")] == [1]


def test_without_a_cuda_device_the_table_of_the_gpu_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.measure(Settings(Size.smoke, None, str(tmp_path))) == []
    assert "gpu is skipped: there is no CUDA device" in capsys.readouterr().err
