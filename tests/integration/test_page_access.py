"""The report and the page of `train serve` for everyone: keys alone, contrast, narrow windows, a silent console."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import Page, needs_chromium, page
from reported import BEGAN, make_run, make_sweep, validate
from serving import served

from trainer_cli.addons.view.report import report
from trainer_cli.png import encode_png
from trainer_cli.runs.run_dir import RunDir

pytestmark = needs_chromium

AUDIT = Path(__file__).with_name("audit.js").read_text()
LONG = "a_very_long_name_of_an_experiment_" * 5
FOCUS = """(() => {
  const { activeElement: node } = document, { top, bottom, height } = node.getBoundingClientRect();
  const name = node.id || node.ariaLabel || node.dataset.focus || node.textContent;
  const controls = byId("controls"), bar = controls.getBoundingClientRect();
  const visible = Math.min(height, innerHeight / 2);
  const covered = controls.contains(node) ? 0 : Math.min(bottom, bar.bottom) - Math.max(top, bar.top);
  return {
    name: node === document.body ? "" : name, outline: getComputedStyle(node).outlineStyle,
    isSeen: Math.min(bottom, innerHeight) - Math.max(top, 0) >= visible / 2, isCovered: covered > height - visible / 2,
  };
})()"""

CONTRASTS = """Array.from({ length: 100 }, (_, index) => {
  const light = (text) => luminance(text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)) + 0.05;
  const lights = [colour(index), getComputedStyle(document.body).backgroundColor].map(light).sort((a, b) => a - b);
  return lights[1] / lights[0];
})"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with page(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs, each of another kind."""
    root = tmp_path_factory.mktemp("kinds")
    few: dict[str, Callable[[int], float]] = {
        "train/none": lambda n: math.nan,
        "train/constant": lambda n: 3.5,
        "train/small": lambda n: -n * 1e-8,
    }
    one = make_run(root / "one/run", steps=60, metrics={"train/odd": lambda n: math.nan if n == 7 else n, **few})
    add_media(one)
    machine = [{"step": n, "epoch": 0, "time": BEGAN + n, "cpu_percent": n, "gpu0_memory_bytes": 1e9} for n in range(9)]
    one.system_file.write_text("".join(f"{json.dumps(line)}\n" for line in machine))
    one.log_file.write_text(f"2023-11-14 22:13:20,000 INFO saved {LONG}\n" * 30)
    validate(one.validation_folder, {f"checkpoints/step{step}": (step, 1 / step) for step in (20, 40)})
    make_sweep(root / "sweep", (1.0, 0.3, 0.1, 0.01))
    for at in range(3):
        named = make_run(root / "long" / f"{LONG}{at}", lr=at + 1, steps=20, metrics={f"val/{LONG}{at}": float})
        named.config_file.write_text(f"name: {LONG}\nnotes: {'many words ' * 40}\n{LONG}: /{'deep/' * 30}{at}\n")
    # The table then has a field to find runs, and a tip shows only the first twelve.
    for at in range(14):
        make_run(root / "many" / f"run{at}", lr=at + 1, steps=20)
    make_run(root / "first/run", steps=1, every=1)
    (root / "empty").mkdir()
    began = make_run(root / "began/run", steps=20, status=None)
    began.metrics_file.unlink()
    damaged = make_run(root / "damaged/run", steps=20)
    for file in (damaged.metrics_file, damaged.summary_file, damaged.history_file, damaged.config_file):
        file.write_bytes(b"\x00\xff{]\n" * 30)
    return root


def add_media(run: RunDir) -> None:
    matrix = {"columns": ["class", *"abcdefghi"], "rows": [[f"{r}", *range(9)] for r in range(9)], "matrix": True}
    media = {
        "images": {"picture": "media/step2-1.png"},
        "texts": {"sample": "some text " * 30},
        "tables": {"matrix": matrix, "worst": {"columns": ["a", LONG], "rows": [[1, "x"]]}},
    }
    lines = [
        {
            "step": step,
            "time": BEGAN + step,
            **media,
            "histograms": {"weights": {"counts": [1, step], "edges": [0, 1, step]}},
        }
        for step in (2, 5, 9)
    ]
    (run.path / "media").mkdir()
    pixels = np.full((300, 900, 1), 20, np.uint8)
    (run.path / "media/step2-1.png").write_bytes(encode_png(pixels))
    (run.path / "media.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


KINDS = ("one", "sweep", "long", "many", "first", "empty", "began", "damaged")


@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_legible_in_both_themes_and_fit_narrow_windows_without_complaints(
    kind: str, folder: Path, tmp_path: Path, chromium: Page
) -> None:
    with served(folder / kind) as server:
        addresses = [server.url]
        if kind != "empty":
            report([folder / kind], tmp_path / "report.html", now=BEGAN + 5000)
            addresses.append((tmp_path / "report.html").as_uri())
        chromium.complaints.clear()
        for address in addresses:
            for width, dark in ((1400, False), (400, True)):
                chromium.open(address, width=width, dark=dark)
                chromium.wait_for("byId('made').textContent")
                chromium.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
                # High enough that all charts are in view, and so drawn.
                chromium.resize(width, 1000 + chromium.run("document.documentElement.scrollHeight"))
                chromium.wait_for("[...charts.values()].every((chart) => chart.drawn)")
                chromium.wait_for("[...charts.values()].every((chart) => chart.plot.childElementCount)")
                if (kind, address) == ("one", server.url):
                    assert chromium.run(f"document.body.textContent.includes('INFO saved {LONG}')"), "the log"
                found = chromium.run(AUDIT)
                where = (address, width, dark, found)
                assert chromium.run("matchMedia('(prefers-color-scheme: dark)').matches") is dark
                assert found["text"][0] >= 4.5, where
                assert "drawn" in found or kind in ("empty", "damaged"), where
                assert "drawn" not in found or found["drawn"][0] >= 3, where
                assert (found["unnamed"], found["misplaced"]) == ([], []), where
                # A name of 170 letters is longer than an axis.
                assert kind == "long" or found["cut"] == [], where
                assert chromium.run("document.documentElement.scrollWidth - innerWidth") <= 0, where
                assert chromium.run("byId('problem').textContent") == "", where
        if kind == "empty":
            assert chromium.run("byId('made').textContent") == (
                "No runs are here yet. Each appears by itself once it has begun."
            )
        if kind == "sweep":
            legend = "document.querySelector('.legend').children.length"
            assert chromium.run(legend) == 6, "a legend of four runs and two metrics"
        assert chromium.complaints == []


def test_the_colours_of_a_hundred_curves_can_be_seen_in_both_themes(folder: Path, chromium: Page) -> None:
    with served(folder / "many") as server:
        for dark in (False, True):
            chromium.open(server.url, dark=dark)
            assert min(chromium.run(CONTRASTS)) >= 3


@pytest.mark.parametrize("kind", ["one", "sweep"])
def test_tab_reaches_everything_visibly_and_leaves_the_page(kind: str, folder: Path, chromium: Page) -> None:
    with served(folder / kind) as server:
        chromium.open(server.url)
        chromium.wait_for("charts.size")
        for shift in (False, True):
            names: list[str] = []
            while True:
                chromium.press("Tab", shift=shift)
                focus: dict[str, Any] = chromium.run(FOCUS)
                if not focus["name"]:
                    break
                assert focus["outline"] != "none", focus
                assert (focus["isSeen"], focus["isCovered"]) == (True, False), focus
                names.append(focus["name"])
                assert len(names) < 1000, "a trap"
            plots = chromium.run("[...document.querySelectorAll('.plot[tabindex]')].map((plot) => plot.ariaLabel)")
            assert set(plots) <= set(names)
            boxes = "[...document.querySelectorAll('pre, .box')].filter((box) => box.checkVisibility())"
            assert set(chromium.run(f"{boxes}.map((box) => box.ariaLabel)")) <= set(names)


TIPS = {
    "timeline": ("one", "ArrowRight", "step10\nsaved: every 10 steps\nremoved: ephemeral, and step20 is newer"),
    "scatter": ("sweep", "ArrowRight", "lr=0.01\nlr: 0.01\nbest val/loss: 0.11"),
    "parallel": ("sweep", "ArrowDown", "lr=0.01\nlr: 0.01\nbest val/loss: 0.11"),
}


@pytest.mark.parametrize("kind", TIPS)
def test_arrow_keys_show_and_speak_the_tip_of_each_mark(
    kind: str, folder: Path, tmp_path: Path, chromium: Page
) -> None:
    runs, key, text = TIPS[kind]
    report([folder / runs], tmp_path / "report.html", now=BEGAN + 5000)
    chromium.open((tmp_path / "report.html").as_uri(), height=9000)
    chromium.wait_for(f"document.querySelector('.plot.{kind} [data-tip]')")
    plot = f"document.querySelector('.plot.{kind}')"
    assert "arrow keys" in chromium.run(f"{plot}.ariaLabel")
    chromium.run(f"{plot}.focus()")
    count = chromium.run(f"{plot}.querySelectorAll('[data-tip]').length")
    seen = []
    for _ in range(count + 1):
        chromium.press(key)
        assert chromium.run("!byId('tip').hidden")
        seen.append(chromium.run(f"{plot}.querySelector('.at').dataset.tip"))
        lines = chromium.run("[...byId('tip').children].map((line) => line.textContent)")
        assert lines == seen[-1].split("\n")
        assert chromium.run("byId('said').textContent") == "; ".join(lines)
    assert seen[0].startswith(text)
    assert len(set(seen)) == count, "each mark, and at the end the last one stays"
    chromium.press("Home")
    assert chromium.run(f"{plot}.querySelector('.at').dataset.tip") == seen[0]
    chromium.press("Tab")
    assert chromium.run(f"byId('tip').hidden && !{plot}.querySelector('.at')")


def test_a_curve_is_read_and_zoomed_by_keys(folder: Path, tmp_path: Path, chromium: Page) -> None:
    report([folder / "one"], tmp_path / "report.html", now=BEGAN + 5000)
    chromium.open((tmp_path / "report.html").as_uri(), height=9000)
    chromium.wait_for("charts.get('Metrics/chart/loss').view")
    chromium.run("charts.get('Metrics/chart/loss').plot.focus()")
    shown = "(() => { const { xs } = charts.get('Metrics/chart/loss').view; return [xs.low, xs.high]; })()"
    whole = chromium.run(shown)
    for key in ("End", "ArrowLeft", "+", "+"):
        chromium.press(key)
    low, high = chromium.run(shown)
    assert (high - low) < (whole[1] - whole[0]) / 3
    chromium.press("Home")
    assert chromium.run("byId('said').textContent").startswith(f"step {math.ceil(low)}; "), "the first that is in view"
    assert "train/loss 1.1" not in chromium.run("byId('said').textContent")
    chromium.press("Enter")
    assert chromium.run("byId('step').value") == str(math.ceil(low))
    for _ in range(5):
        chromium.press("-")
    assert chromium.run("zoomed") is None
    assert chromium.run(shown) == whole


def test_media_have_times_brightness_names_to_find_and_histograms_over_steps(
    folder: Path, tmp_path: Path, chromium: Page
) -> None:
    report([folder / "one"], tmp_path / "report.html", now=BEGAN + 5000)
    chromium.open((tmp_path / "report.html").as_uri(), width=400)
    chromium.wait_for("document.querySelector('.medium img').naturalWidth")
    assert chromium.run("document.querySelector('.medium label span').textContent") == "step 9, 2023-11-14 22:13:29"
    image = "getComputedStyle(document.querySelector('.medium img'))"
    assert chromium.run(f"[{image}.filter, parseFloat({image}.width) < 400]") == ["brightness(1) contrast(1)", True]
    field = "document.querySelector('[data-focus^=\"brightness \"]')"
    chromium.run(f"{field}.focus()")
    chromium.press("ArrowRight")
    chromium.run("document.querySelector('[data-focus^=\"full \"]').click()")
    assert chromium.run(f"[{image}.filter, {image}.width]") == ["brightness(1.1) contrast(1)", "900px"]
    assert chromium.run("document.documentElement.scrollWidth - innerWidth") <= 0
    chromium.run("document.querySelector('[data-focus^=\"reset \"]').click()")
    assert chromium.run(f"{image}.filter") == "brightness(1) contrast(1)"
    label = chromium.run("document.querySelector('.distribution svg').ariaLabel")
    # Of counts 1 and 9 over 0, 1 and 9: half of the values are below 1 + 4 / 9 of 8.
    assert label.startswith("weights over 3 steps: median from 1.25 to 4.5556, smallest 0, largest 9")
    assert chromium.run("document.querySelectorAll('.distribution .band').length") == 4
    plot = "document.querySelector('.medium [role=group][aria-label^=weights]')"
    chromium.run(f"{plot}.focus()")
    for text in ("1 from 0 to 1", "9 from 1 to 9"):
        chromium.press("ArrowRight")
        assert chromium.run("byId('said').textContent") == text
    chromium.run("byId('find').value = 'weig'; byId('find').dispatchEvent(new Event('input'))")
    visible = "[...document.querySelectorAll('.medium')].filter((one) => one.checkVisibility())"
    assert chromium.run(f"{visible}.map((one) => one.dataset.name)") == ["weights"]


@pytest.mark.parametrize("logy", [False, True])
def test_outliers_flatten_a_curve_until_they_are_trimmed(logy: bool, tmp_path: Path, chromium: Page) -> None:
    whole = 1000.0
    run = make_run(tmp_path / "run", steps=60, metrics={"train/spike": lambda n: whole if n == 30 else 1 + n / 60})
    report([run.path], tmp_path / "report.html", now=BEGAN + 5000)
    page_of = (tmp_path / "report.html").as_uri()
    chromium.open(f"{page_of}#logy={int(logy)}", height=9000)
    chart = "charts.get('Metrics/chart/spike')"
    top = f"{chart}.view.ys.high"
    chromium.wait_for(f"{chart}.view")
    assert chromium.run(top) >= whole
    assert "trimmed" not in chromium.run(f"{chart}.note.textContent")
    chromium.run("byId('trim').focus()")
    chromium.press(" ")
    chromium.wait_for(f"{top} < 3")
    assert chromium.run(f"{chart}.view.ys.low") > 0.9, "and what is most of the curve fills the chart"
    assert chromium.run(f"{chart}.note.textContent") == "trimmed: values from 1.0167 to 1,000"
    # A link or a reload shows the same.
    chromium.open(chromium.run("location.href"), height=9000)
    chromium.wait_for(f"{chart}.view")
    assert chromium.run(f"byId('trim').checked && {top} < 3")
    chromium.run("byId('trim').focus()")
    chromium.press(" ")
    chromium.wait_for(f"{top} >= {whole}")
    assert "trim" not in chromium.run("location.hash")


@pytest.mark.parametrize("name", ["serve", "report"])
def test_why_a_run_ended_is_in_view_in_a_narrow_window(name: str, tmp_path: Path, chromium: Page) -> None:
    metrics = {f"val/metric_with_a_long_name_{n}": float for n in range(6)}
    for at in range(2):
        make_run(tmp_path / f"runs/run{at}", lr=at + 1, steps=20, status=None, metrics=metrics)
    report([tmp_path / "runs"], tmp_path / "report.html", now=BEGAN + 5000)
    with served(tmp_path / "runs") as server:
        chromium.open(server.url if name == "serve" else (tmp_path / "report.html").as_uri(), width=700)
        cell = "[...document.querySelectorAll('td')].find((td) => td.textContent.startsWith('the process ended'))"
        chromium.wait_for(cell)
        assert chromium.run("document.querySelector('table').clientWidth > innerWidth"), "its last columns are outside"
        assert chromium.run(f"{cell}.getBoundingClientRect().right") <= 700
