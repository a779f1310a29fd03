"""The report in a real browser, without a network: it draws everything, and answers hover, zoom and settings."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))

from reported import BEGAN, HOSTILE, make_run, make_sweep, validate

from trainer_cli.commands.report import report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

PROBE = """
<script>
addEventListener("load", async () => {
  const pause = () => new Promise((done) => setTimeout(done, 500));
  const told = {};
  try {
    await pause();
    const drawn = (plot) => plot.querySelectorAll(".trace, .parcoords-line-layer, .y-axis").length;
    told.drawn = charts.map((one) => [one.block.title, drawn(one.plot)]);
    told.wide = document.documentElement.scrollWidth - innerWidth;
    const first = charts.find((one) => one.block.kind === "chart").plot;
    told.titles = [...document.querySelectorAll(".chart h3")].map((one) => one.textContent);
    told.lines = first.data.map((one) => [one.name, one.y.length]);
    Plotly.Fx.hover(first, [{ curveNumber: 0, pointNumber: 3 }]);
    told.hover = first.querySelector(".hoverlayer").textContent;
    await Plotly.relayout(first, { "xaxis.range[0]": 5, "xaxis.range[1]": 9 });
    await pause();
    const curves = charts.filter((one) => one.block.kind === "chart").map((one) => one.plot);
    told.zoomed = [...new Set(curves.map((plot) => String(plot.layout.xaxis.range)))];
    // The click of a mouse on one of the points in view.
    const index = first.data[0].x.findIndex((step) => step > 6);
    told.step = first.data[0].x[index];
    const area = first.querySelector(".nsewdrag"), box = area.getBoundingClientRect();
    const { xaxis, yaxis } = first._fullLayout, y = first.data[0].y[index];
    const place = { clientX: box.left + xaxis.d2p(told.step), clientY: box.top + yaxis.d2p(y), bubbles: true };
    for (const name of ["mousemove", "mousedown", "mouseup"]) area.dispatchEvent(new MouseEvent(name, place));
    await pause();
    const commands = () => [...document.querySelectorAll("#commands input")].map((one) => one.value);
    const type = (step) => {
      byId("step").value = step;
      byId("step").dispatchEvent(new Event("input"));
      return commands();
    };
    told.clicked = commands();
    told.copied = [];
    Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => told.copied.push(text) } });
    document.querySelector("#commands button").click();
    await pause();
    told.copied.push(document.activeElement.value, document.querySelector("#commands button").textContent);
    told.typed = [[0, 3], [0, 0], [0, ""], [0, 1.5], [20, 21], [20, 20], [null, 21]].map(([start, step]) => {
      data.looks[0].start = start;
      return type(step).map((command) => command.split(" ")[1]);
    });
    byId("smooth").value = 0.9;
    byId("smooth").dispatchEvent(new Event("input"));
    byId("logy").click();
    byId("x").value = "time";
    byId("x").dispatchEvent(new Event("input"));
    await pause();
    told.smoothed = first.data.map((one) => [one.name, one.opacity]);
    told.axes = [first.layout.yaxis.type, first.layout.xaxis.title.text];
    told.hash = location.hash;
    document.querySelectorAll("td input[type=checkbox]").forEach((box, at) => { if (at) box.click(); });
    await pause();
    told.left = first.data.length;
    told.boomed = [boomed, document.images.length];
    const requests = performance.getEntriesByType("resource").map((one) => one.name);
    told.requests = requests.filter((one) => !one.startsWith("data:"));
  } catch (error) { told.error = `${error}`; }
  told.problem = byId("problem").textContent;
  document.body.dataset.told = JSON.stringify(told);
});
</script>
"""


def seen(folder: Path, *paths: Path) -> dict[str, Any]:
    """What a script in the page of a report finds, and makes it do."""
    report(paths, folder / "r.html", now=BEGAN + 5000)
    page = (folder / "r.html").read_text()
    page = page.replace("<head>", "<head><script>boomed = 0; boom = () => { boomed += 1; };</script>")
    (folder / "probed.html").write_text(page.replace("</body>", f"{PROBE}</body>"))
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--use-angle=swiftshader", "--enable-unsafe-swiftshader", f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,9000", "--virtual-time-budget=30000", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom",
        (folder / "probed.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    (told,) = re.findall(r'<body data-told="([^"]*)"', done.stdout)
    found: dict[str, Any] = json.loads(html.unescape(told))
    assert (found.get("error"), found["problem"]) == (None, ""), found
    assert found["requests"] == []
    assert found["wide"] <= 0, "nothing is wider than the window"
    assert [title for title, traces in found["drawn"] if not traces] == [], "no panel is empty"
    return found


def test_one_run_is_drawn_and_answers_hover_zoom_and_settings(tmp_path: Path) -> None:
    more = {f"train/{HOSTILE}": float, f"{HOSTILE}/loss": float}
    run = make_run(tmp_path / "mine", steps=5000, every=500, **more)
    run.config_file.write_text(json.dumps({"name": HOSTILE, HOSTILE: {"<b>": HOSTILE}}))
    validate(run.validation_folder, {f"checkpoints/step{step}": (step, 1 / step) for step in (20, 40)})
    found = seen(tmp_path, run.path)
    assert {"loss", HOSTILE, "Checkpoints by step", "lr", "grad_norm", "samples_per_s"} <= set(found["titles"])
    # The thin line and the smooth one, of at most two points for each of 2,000 parts of the axis.
    (thin, drawn), (smooth, _), *_ = found["lines"]
    assert (thin, smooth) == ("train/loss", "train/loss smoothed")
    assert 2000 <= drawn <= 4002
    assert found["hover"] == "train/loss0.3step 5"
    assert found["zoomed"] == ["5,9"]
    words = f"{run.path} {found['step']}", f"{run.path}@step{found['step']}"
    assert found["step"] in (7, 8)
    look = [f"train replay {words[0]}", f"train data {words[0]}", f"train ckpt show {words[1]}"]
    assert found["clicked"] == look
    assert found["copied"] == [look[0], look[0], "copied"], "on the clipboard, selected, and so it says"
    everything = ["replay", "data", "ckpt"]
    assert found["typed"] == [everything, [], [], [], everything, ["data"], ["data"]], "only what can work"
    assert found["smoothed"][:2] == [["train/loss", 0.25], ["train/loss smoothed", None]]
    assert found["axes"] == ["log", "minutes since the run began"]
    assert found["hash"] == "#x=time&smooth=0.9&logy=1&logx=0"
    assert found["boomed"] == [0, 0]


def test_a_sweep_is_drawn_and_its_table_chooses_the_runs(tmp_path: Path) -> None:
    found = seen(tmp_path, make_sweep(tmp_path / "sweep", (1.0, 0.1, 0.01)))
    assert "Parameters and best metrics; coloured by val/loss" in found["titles"]
    assert [name for name, _ in found["lines"]] == [
        f"lr={lr} {name}" for name in ("train/loss", "val/loss") for lr in (0.01, 0.1, 1.0)
    ]
    assert found["left"] == 3, "of one run the thin and the smooth line, and that of its validation"
