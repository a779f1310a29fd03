"""Reports and the page of `train serve` in a real browser: on a phone and a large screen, light and dark, every state
fits, can be read, and has a text for who does not see it.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import look, needs_chromium
from serving import served

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))

from reported import BEGAN, make_run, make_sweep, validate

from trainer_cli.addons.view import serve_http
from trainer_cli.addons.view.report import report
from trainer_cli.loggers.base import Record, RunFacts, Table
from trainer_cli.loggers.media import MediaLogger
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.strict_json import strict_json

pytestmark = needs_chromium

LONG = "experiment_of_which_the_name_describes_everything_" * 2 + "lr0.001_bs256"

# Runs in each page, which stands in a frame: sends to the page around it what does not fit or cannot be read.
PROBE = """
{
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parts = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, alpha / 255];
  };
  const over = (front, back) => [0, 1, 2].map((n) => front[n] * front[3] + back[n] * (1 - front[3]));
  const light = (rgb) => luminance(rgb.map((value) => value / 255)) + 0.05;
  const backOf = (node) => {
    const around = [];
    for (let other = node; other; other = other.parentElement) {
      around.unshift(parts(getComputedStyle(other).backgroundColor));
    }
    return around.reduce((back, front) => over(front, back), [255, 255, 255]);
  };
  const isShown = (node) => node.getClientRects().length > 0;
  const nameOf = (node) => `${node.tagName} ${node.getAttribute("class")} ${node.textContent.slice(0, 40)}`;
  const faintTexts = () => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = [];
    while (texts.nextNode()) {
      const node = texts.currentNode.parentElement, text = texts.currentNode.textContent.trim();
      if (!text || !isShown(node) || ["OPTION", "NOSCRIPT", "title"].includes(node.tagName)) continue;
      const style = getComputedStyle(node), back = backOf(node);
      const front = over(parts(node.ownerSVGElement ? style.fill : style.color), back);
      const [more, less] = [front, back].map(light).sort((a, b) => b - a);
      // The mark of a value that is not finite has the colour of its curve.
      if (more / less < (node.classList.contains("bad") ? 3 : 4.5)) faint.push([nameOf(node), more / less]);
    }
    return faint;
  };
  const hasName = (node) => (node.labels && node.labels.length > 0)
    || [node.getAttribute("aria-label"), node.alt, node.title, node.textContent.trim()].some(Boolean);
  const reachable = "[tabindex='0'], input, select, button, a, svg, img";
  const unnamed = () => [...document.querySelectorAll(reachable)].filter((node) =>
    isShown(node) && node.getAttribute("aria-hidden") !== "true" && !hasName(node));
  const cutOff = () => [...document.querySelectorAll("svg text")].filter((node) => {
    const [box, around] = [node, node.ownerSVGElement].map((other) => other.getBoundingClientRect());
    const isBeside = box.left < around.left - 1 || box.right > around.right + 1;
    return box.width && (isBeside || box.top < around.top - 1 || box.bottom > around.bottom + 1);
  });
  // What scrolls, and an order of its own, which would differ from what is seen.
  const misplaced = () => [...document.querySelectorAll("body *")].filter((node) => {
    const { overflowX, overflowY } = getComputedStyle(node);
    const scrolls = (overflowX === "auto" && node.scrollWidth > node.clientWidth + 1)
      || (overflowY === "auto" && node.scrollHeight > node.clientHeight + 1);
    return node.tabIndex > 0 || (scrolls && node.tabIndex < 0);
  });
  const isDrawn = () => !charts.size || [...charts.values()].some((chart) => chart.drawn);
  const isLoaded = () => (typeof shownVersion === "undefined" || shownVersion !== null) && isDrawn();
  const send = () => parent.postMessage({
    drawn: [...charts.values()].filter((chart) => chart.drawn).length,
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    faint: faintTexts(), unnamed: unnamed().map(nameOf), misplaced: misplaced().map(nameOf), cut: cutOff().map(nameOf),
    text: byId("made").textContent,
    isDark: matchMedia("(prefers-color-scheme: dark)").matches, problem: byId("problem").textContent,
    legends: [...document.querySelectorAll(".legend")].map((legend) => legend.children.length),
  }, "*");
  const wait = () => setTimeout(isLoaded() ? () => setTimeout(send, 2000) : wait, 200);
  wait();
}
"""
FRAMES = """<body><style>iframe { position: absolute; top: 0; left: 0; height: 9000px; border: 0; }</style><script>
const told = { problem: "" }, frames = new Map();
addEventListener("message", (event) => {
  const key = [...frames].find(([, frame]) => frame.contentWindow === event.source)[0];
  told[key] = event.data;
  if (Object.keys(told).length > frames.size) document.body.dataset.told = JSON.stringify(told);
});
const looks = [400, 1400].flatMap((width) => [[width, "light"], [width, "dark"]]);
for (const [name, address] of Object.entries(PAGES)) for (const [width, theme] of looks) {
  const frame = document.createElement("iframe");
  frame.style.width = `${width}px`;
  frame.style.colorScheme = theme;
  frame.src = address;
  frames.set(`${name} ${width} ${theme}`, frame);
  document.body.append(frame);
}
</script></body>"""


def make_full_run(folder: Path) -> RunDir:
    """A run with everything that a page shows, under long names."""
    odd = {"train/odd": lambda n: math.nan if n in (7, 8) else n, "train/none": lambda n: math.nan}
    few = {"train/constant": lambda n: 3.5, "train/small": lambda n: -n * 1e-8, f"{LONG}/{LONG}": float}
    run = make_run(folder / LONG, steps=40, **odd, **few)
    config = {"name": LONG, "notes": f"{LONG} " * 3, "tags": [LONG, "small"], "data": {"path": f"/{LONG}" * 2}}
    run.config_file.write_text(json.dumps(config))
    run.log_file.write_text(f"{LONG * 3}\n" * 30)
    validate(run.validation_folder, {f"checkpoints/step{step}": (step, 1 / step) for step in (20, 40)})
    machine = {"cpu_percent": 60.0, **{f"gpu{gpu}_percent": 90.0 + gpu for gpu in range(8)}}
    lines = [{"step": n, "epoch": 0.0, "time": BEGAN + n, **machine} for n in range(20)]
    run.system_file.write_text("".join(f"{strict_json(line)}\n" for line in lines))
    classes = [f"class {n}" for n in range(10)]
    counts = [(name, *(at * 7 % 40 + 900 * (at == row) for at in range(10))) for row, name in enumerate(classes)]
    logger = MediaLogger()
    logger.start(RunFacts(run_dir=run.path))
    for step in (10, 20):
        logger.log(
            Record(
                step, 1.0, BEGAN, {}, texts={"words": LONG * 4}, histograms={LONG: np.arange(50) * 1e-7 / 3},
                images={"digit": np.eye(8, dtype=np.uint8)[..., None], "wide": np.zeros((4, 900, 1), np.uint8)},
                tables={
                    "table": Table(("text", "number"), ((LONG * 2, 1 / 3),) * 15),
                    "matrix": Table(("class", *classes), counts, is_matrix=True),
                },
            )
        )  # fmt: skip
    logger.close()
    return run


def make_reports(folder: Path) -> dict[str, Path]:
    """A report of each kind."""
    full = make_full_run(folder / "full")
    sweep = make_sweep(folder / "sweep", (0.1 + 0.2, 0.2, 0.1, 0.25))
    for number, job in enumerate(sorted(sweep.glob("optimizer*"))):
        (job / "config.yaml").write_text(f"seed: {number % 2}\noptimizer: {{lr: {job.name.partition('=')[2]}}}\n")
    many = [make_run(folder / f"many/{LONG}{n}", lr=n, steps=20).path for n in range(30)]
    first = make_run(folder / "first", steps=1, every=1)
    begun = make_run(folder / "begun", steps=2, status=None)
    begun.metrics_file.unlink()
    paths = {"full": [full.path], "sweep": [sweep], "many": many, "first": [first.path], "begun": [begun.path]}
    for name, runs in paths.items():
        report(runs, folder / f"{name}.html", now=BEGAN + 5000)
    return {name: folder / f"{name}.html" for name in paths}


def test_every_page_fits_can_be_read_and_has_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = make_reports(tmp_path)
    (tmp_path / "empty").mkdir()
    probed = tmp_path / "probed.js"
    probed.write_text(Path(serve_http._SCRIPT).read_text() + PROBE)
    monkeypatch.setattr(serve_http, "_SCRIPT", probed)
    # The page refuses to stand in a frame, which is how several widths and themes are seen by one browser.
    monkeypatch.setattr(serve_http, "_HEADERS", {})
    with ExitStack() as servers:
        runs, sweep, empty = (servers.enter_context(served(tmp_path / name)) for name in ("full", "sweep", "empty"))
        pages = {name: f"/{name}" for name in reports}
        pages |= {"runs": sweep.url, "run": f"{runs.url}#run={LONG}", "empty": empty.url}
        answers: dict[str, Any] = {
            f"/{name}": lambda *_, file=file: (
                "text/html", file.read_text().replace("</body>", f"<script>{PROBE}</script></body>")
            )
            for name, file in reports.items()
        }  # fmt: skip
        answers["/frames"] = lambda *_: ("text/html", FRAMES.replace("PAGES", json.dumps(pages)))
        monkeypatch.setattr(serve_http, "_ANSWERS", {**serve_http._ANSWERS, **answers})
        told = look(f"{runs.url}frames", tmp_path / "profile", height=9000, most_ms=8000)
    del told["problem"]
    assert len(told) == 4 * len(pages)
    assert {name: page["isDark"] for name, page in told.items()} == {name: name.endswith("dark") for name in told}
    for fault in ("wide", "faint", "unnamed", "misplaced", "cut", "problem"):
        assert {name: page[fault] for name, page in told.items() if page[fault]} == {}, fault
    assert {name for name, page in told.items() if not page["drawn"]} == {
        name for name in told if name.split()[0] in ("begun", "empty")
    }
    assert told["empty 400 dark"]["text"] == "No runs are here yet. Each appears by itself once it has begun."
    assert told["runs 400 light"]["legends"][0] == 6, "a legend of four runs and two metrics"
