"""The report of a comparison, in a real browser: the verdict, the interval after each pair, and mean curves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, needs_chromium, page
from reported import BEGAN, HOSTILE, make_run

from trainer_cli.errors import UserError

pytestmark = pytest.mark.addon("view")

ROWS = """
Object.fromEntries([...document.querySelectorAll("h3")].filter((title) => title.parentNode.querySelector("tr")).map(
  (title) => [title.innerText, [...title.parentNode.querySelectorAll("tr")].map((row) =>
    [...row.cells].map((cell) => cell.innerText))]))
"""
CHART = "[...charts.values()].find((chart) => chart.block.title.startsWith({!r}))"
INTERVAL, CURVES = CHART.format("How much better"), CHART.format("val/loss: mean")


def compared(folder: Path, *, low: list[float | None], high: list[float | None], **more: Any) -> Path:
    """A comparison of two pairs; the runs of A were trained by another one."""
    pairs = [
        {
            "seed": seed, "a": 0.3 + seed, "b": 0.2, "difference": 0.1 + seed, "mean": (0.6, 1.1, 1.6)[seed - 1],
            "a_run": f"runs/compare/other/b-seed{seed}", "b_run": f"gone/compare/mine/b-seed{seed}",
            "low": low[seed - 1], "high": high[seed - 1],
        }
        for seed in (1, 2, 3)
    ]  # fmt: skip
    verdict = {
        "verdict": "better", "sentence": "B is better than A: mean difference 1.6, after 3 pairs.", "a": "digits",
        "b": f"b={HOSTILE}", "metric": "val/loss", "mode": "min", "margin": 0.5, "seeds": 5, "noise": 0.25,
        "length": "40steps", "same_batches": True, "differs": {HOSTILE: {"a": None, "b": [1, 2]}},
        "source_differs": ["mine/parts.py"], "pairs": pairs, **more,
    }  # fmt: skip
    (folder / "mine").mkdir(parents=True)
    (folder / "mine/verdict.json").write_text(json.dumps(verdict))
    for seed in (1, 2, 3):
        make_run(folder / f"other/b-seed{seed}", lr=seed, steps=40)
        make_run(folder / f"mine/b-seed{seed}", lr=10 * seed, steps=40)
    # Not one of the pairs.
    make_run(folder / "mine/a-seed1", steps=40)
    return folder / "mine"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with page(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_says_the_verdict_and_draws_the_intervals_and_the_means(
    dark: bool, chromium: Page, tmp_path: Path
) -> None:
    from trainer_cli.addons.view.report import report

    folder = compared(tmp_path / "compare", low=[None, -0.5, 1], high=[None, 2.5, 2])
    assert report([folder], tmp_path / "r.html", now=BEGAN).problems == []
    chromium.open((tmp_path / "r.html").as_uri(), dark=dark)
    chromium.wait_for(f"{INTERVAL}?.view && {CURVES}?.view")
    assert chromium.run("document.title") == f"A: digits, B: b={HOSTILE}"
    banner = "document.querySelector('.banner')"
    assert chromium.run(f"{banner}.innerText") == "B is better than A: mean difference 1.6, after 3 pairs."
    assert chromium.run(f"{banner}.getBoundingClientRect().bottom") < 300
    colours = chromium.run("['--good', '--bad'].map((name) => getComputedStyle(document.body).getPropertyValue(name))")
    assert chromium.run(f"getComputedStyle({banner}).color") == rgb(colours[0])
    facts = chromium.run("[...document.querySelectorAll('.facts div')].map((one) => one.innerText.split('\\n'))")
    assert {tuple(fact) for fact in facts} >= {
        ("decides", "the smallest val/loss of each run"), ("pairs", "3 of at most 5"),
        ("batches", "the same for A and B"), ("least difference that matters (margin)", "0.5"),
    }  # fmt: skip
    assert "config" not in dict(facts)

    # The interval: a line, a bar at each pair that has one, and lines at zero and the margins.
    assert chromium.run(f"{INTERVAL}.view.lines.map((line) => [line.x, line.y, line.low])") == [
        [[1, 2, 3], [0.6, 1.1, 1.6], [None, -0.5, 1]]
    ]
    plot = f"{INTERVAL}.plot"
    assert chromium.run(f"{plot}.querySelectorAll('.band').length") == 1
    assert chromium.run(f"[...{plot}.querySelectorAll('path.curve')].length") == 3
    levels = "[...{}.querySelectorAll('line.restart')].map((line) => +line.getAttribute('y1'))"
    at = f"[-0.5, 0.5, 0].map((y) => {INTERVAL}.view.ys.at(y))"
    assert chromium.run(levels.format(plot)) == chromium.run(at)
    texts = f"[...{plot}.querySelectorAll('text.halo')].map((one) => one.textContent)"
    assert chromium.run(texts) == ["-margin", "margin", "no difference"]
    ends = f"[{INTERVAL}.view.ys.low <= -0.5, {INTERVAL}.view.ys.high >= 2.5, {INTERVAL}.view.xs.ticks]"
    assert chromium.run(ends) == [True, True, [1, 2, 3]]
    chromium.run(f"{plot}.focus()")
    for key, tip in (("Home", "pairs 1 mean difference 0.6"), ("End", "pairs 3 mean difference 1.6 (1 to 2)")):
        chromium.press(key)
        assert chromium.run("byId('said').textContent.replaceAll(';', '')") == tip

    # The curves: the mean of the three runs of each side. Each loss is lr + 2 / step.
    lines = chromium.run(f"{CURVES}.view.lines.map((line) => [line.owner, line.x, line.y, line.low, line.high])")
    assert [line[0] for line in lines] == ["A: digits (3 runs)", f"B: b={HOSTILE} (3 runs)"]
    for (_, x, *values), rates in zip(lines, ([2, 1, 3], [20, 10, 30]), strict=True):
        assert x == [10, 20, 30, 40]
        for column, rate in zip(values, rates, strict=True):
            assert column == pytest.approx([rate + 2 / step for step in x], rel=1e-5)

    rows = chromium.run(ROWS)
    assert rows["Pairs"][1:3] == [
        ["1", "1.3", "0.2", "1.1", "0.6", "", ""], ["2", "2.3", "0.2", "2.1", "1.1", "-0.5", "2.5"]
    ]  # fmt: skip
    assert rows["Config keys that differ"][1:] == [[HOSTILE, "None", "[1, 2]"]]
    assert rows["Source files that differ"][1:] == [["mine/parts.py"]]
    runs = "[...document.querySelectorAll('.runs tbody tr')].map((row) => row.cells[0].title)"
    assert sorted(chromium.run(runs)) == [f"{side} seed {seed}" for side in "AB" for seed in (1, 2, 3)]
    assert chromium.run("[document.images.length, byId('problem').textContent]") == [0, ""]
    assert chromium.run("performance.getEntriesByType('resource').filter((one) => !one.name.startsWith('data:'))") == []
    assert chromium.run("document.documentElement.scrollWidth - innerWidth") <= 0
    assert chromium.complaints == []


def rgb(colour: str) -> str:
    """A colour as a browser computes it."""
    return f"rgb({', '.join(str(int(colour.strip()[at : at + 2], 16)) for at in (1, 3, 5))})"


def test_a_comparison_without_a_pair_or_runs_is_reported_and_a_damaged_one_says_so(tmp_path: Path) -> None:
    from trainer_cli.addons.view.report import report

    folder = compared(tmp_path / "compare", low=[None] * 3, high=[None] * 3)
    shutil.rmtree(folder.parent / "other")
    assert report([folder], tmp_path / "r.html", now=BEGAN).runs == 3
    verdict = json.loads((folder / "verdict.json").read_text())
    (folder / "verdict.json").write_text(json.dumps({**verdict, "pairs": [], "metric": None, "noise": None}))
    # Those that the comparison has begun.
    assert report([folder], tmp_path / "r.html", now=BEGAN).runs == 4
    for run in folder.glob("*-seed*"):
        shutil.rmtree(run)
    assert report([folder], tmp_path / "r.html", now=BEGAN).runs == 0
    assert verdict["sentence"] in (tmp_path / "r.html").read_text()
    for damaged in ("{", json.dumps({**verdict, "pairs": [1]})):
        (folder / "verdict.json").write_text(damaged)
        with pytest.raises(UserError, match="holds no run"):
            report([folder], tmp_path / "r.html", now=BEGAN)
    make_run(folder / "a-seed1", steps=40)
    [problem] = report([folder], tmp_path / "r.html", now=BEGAN).problems
    assert "verdict.json is damaged" in problem
