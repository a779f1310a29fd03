"""The report in a real browser, without a network: it draws everything, and answers hover, zoom and settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from chromium import look, needs_chromium
from reported import BEGAN, HOSTILE, make_run, make_sweep, validate

from trainer_cli.addons.view.report import report

pytestmark = needs_chromium

PROBE = """
<script>
addEventListener("load", async () => {
  const pause = () => new Promise((done) => setTimeout(done, 500));
  const told = {};
  try {
    const all = [...charts.values()];
    for (let n = 0; n < 40 && !all.every((one) => one.drawn); n += 1) await pause();
    const curves = all.filter((one) => one.block.kind === "chart");
    const drawn = (plot) => plot.querySelectorAll("path, circle, rect.grip, .shares").length;
    told.drawn = all.map((one) => [one.block.title, drawn(one.plot)]);
    told.wide = document.documentElement.scrollWidth - innerWidth;
    told.titles = [...document.querySelectorAll(".chart h3")].map((one) => one.textContent);
    const first = curves[0];
    told.lines = first.view.lines.map((one) => [one.name, one.y.length]);
    told.label = first.plot.querySelector("svg").getAttribute("aria-label");
    told.crosses = Object.fromEntries(curves.map((one) => [one.block.title, one.plot.querySelectorAll(".bad").length]));
    told.texts = [tickTexts([1.000001, 1.000002]), tickTexts([0.1, 0.2])];
    told.rounded = scaleOf(3.5 - 4e-16, 3.5 + 4e-16, 100, 0, false, 5).ticks.length;
    told.restarts = first.plot.querySelectorAll(".restart").length;
    told.ticks = Object.fromEntries(curves.map((one) => [one.block.title, one.view.ys.ticks]));
    const fire = (kind, x, y) => {
      const corner = first.plot.getBoundingClientRect();
      const place = { clientX: corner.left + x, clientY: corner.top + y, bubbles: true, pointerType: "mouse" };
      first.plot.dispatchEvent(new PointerEvent(kind, place));
    };
    const xAt = (value) => first.view.xs.at(value);
    fire("pointermove", xAt(5), 20);
    told.hover = byId("tip").textContent;
    told.crosshairs = curves.filter((one) => one.plot.querySelector(".cross")).length;
    const [from, to] = [xAt(1000), xAt(2000)];
    fire("pointerdown", from, 50); fire("pointermove", to, 50); fire("pointerup", to, 50);
    await pause();
    told.zoomed = [...new Set(curves.map((one) => [one.view.xs.low, one.view.xs.high].map(Math.round).join()))];
    zoomTo([5, 9]);
    await pause();
    fire("pointerdown", xAt(7), 50); fire("pointerup", xAt(7), 50);
    const commands = () => [...document.querySelectorAll("#commands input")].map((one) => one.value);
    const type = (step) => {
      byId("step").value = step;
      byId("step").dispatchEvent(new Event("input"));
      return commands();
    };
    told.clicked = commands();
    told.copied = [];
    Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => told.copied.push(text) } });
    if (told.clicked.length) {
      document.querySelector("#commands button").click();
      await pause();
      told.copied.push(document.activeElement.value, document.querySelector("#commands button").textContent);
    }
    told.typed = [[0, 3], [0, 0], [0, ""], [0, 1.5], [20, 21], [20, 20], [null, 21]].map(([start, step]) => {
      data.looks[0].start = start;
      return type(step).map((command) => command.split(" ")[1]);
    });
    first.plot.focus();
    first.plot.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    told.key = byId("tip").firstChild.textContent;
    document.querySelectorAll("#contents a")[1].focus();
    document.activeElement.click();
    told.section = [document.activeElement.id, document.querySelector("#contents a").getAttribute("href")];
    byId("smooth").value = 0.9;
    byId("smooth").dispatchEvent(new Event("input"));
    byId("logy").click();
    byId("x").value = "time";
    byId("x").dispatchEvent(new Event("input"));
    await pause();
    told.smoothed = first.view.lines.map((one) => [one.name, !!one.faint]);
    told.axes = [first.view.ys.isLog, first.view.axis];
    told.hash = location.hash;
    told.media = [...document.querySelectorAll(".medium")].map((one) => [
      one.querySelector("h3").textContent, one.querySelector("label span").textContent.split(",")[0],
      one.querySelectorAll("rect[data-tip], td, pre").length,
    ]);
    const table = document.querySelector("table:not(.matrix)"), buttons = [...table.querySelectorAll("th button")];
    const at = Math.max(1, buttons.findIndex((one) => one.title === "lr"));
    buttons[at].click(); buttons[at].click();
    told.sorted = [...table.querySelectorAll("tbody tr")].map((row) => row.cells[at].textContent);
    told.contrast = Math.min(...[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 99].flatMap((index) => {
      const light = luminance(colour(index).match(/\\d+/g).map((part) => part / 255));
      return [1.05 / (light + 0.05), (light + 0.05) / (luminance([0x11, 0x15, 0x1a].map((part) => part / 255)) + 0.05)];
    }));
    document.querySelectorAll("td input[type=checkbox]").forEach((box, at) => { if (at) box.click(); });
    await pause();
    told.left = first.view.lines.length;
    told.boomed = [boomed, document.images.length];
    const requests = performance.getEntriesByType("resource").map((one) => one.name);
    told.requests = requests.filter((one) => !one.startsWith("data:"));
  } catch (error) { told.error = `${error.stack}`; }
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
    found = look((folder / "probed.html").as_uri(), folder / "profile", height=9000)
    assert found["requests"] == []
    assert found["wide"] <= 0, "nothing is wider than the window"
    assert [title for title, traces in found["drawn"] if not traces] == [], "no panel is empty"
    return found


def test_one_run_is_drawn_and_answers_hover_zoom_keys_and_settings(tmp_path: Path) -> None:
    more = {f"train/{HOSTILE}": float, f"{HOSTILE}/loss": float, "train/odd": lambda n: math.nan if n == 7 else n}
    more |= {"train/none": lambda n: math.nan}
    run = make_run(tmp_path / "mine", steps=5000, every=500, metrics=more)
    run.config_file.write_text(json.dumps({"name": HOSTILE, HOSTILE: {"<b>": HOSTILE}}))
    validate(run.validation_folder, {f"checkpoints/step{step}": (step, 1 / step) for step in (20, 40)})
    matrix = {"columns": ["class", "a", HOSTILE], "rows": [["a", 3, 1], [HOSTILE, 0, 5]], "matrix": True}
    histogram = {"counts": [1, 4], "edges": [0, 0.5, 1]}
    media = {"texts": {HOSTILE: HOSTILE}, "tables": {"matrix": matrix}, "histograms": {"weights": histogram}}
    (run.path / "media.jsonl").write_text(f"{json.dumps({'step': 1, **media})}\n{json.dumps({'step': 2, **media})}\n")
    found = seen(tmp_path, run.path)
    assert sorted(found["media"]) == sorted(
        [[HOSTILE, "step 2", 1], ["matrix", "step 2", 4], ["weights", "step 2", 2]]
    ), "each with its newest step"
    assert {"loss", HOSTILE, "Checkpoints by step", "lr", "grad_norm", "samples_per_s"} <= set(found["titles"])
    # The faint line and the smooth one, of at most two points for each of 2,000 parts of the axis.
    (faint, drawn), (smooth, _), *_ = found["lines"]
    assert (faint, smooth) == ("train/loss", "train/loss smoothed")
    assert 2000 <= drawn <= 4002
    assert found["label"].startswith("loss. train/loss smoothed: last 0.1"), "a text for who does not see it"
    assert found["crosses"]["odd"] == 1, "NaN is marked"
    assert found["crosses"]["loss"] == 0
    assert 20 < found["crosses"]["none"] < 300, "over the whole axis, as many as can be told apart"
    assert found["texts"] == [["1.000001", "1.000002"], ["0.1", "0.2"]]
    assert found["rounded"] == 1, "a constant that smoothing has rounded"
    assert found["ticks"]["lr"] == [0.1], "a constant has its value as the only tick"
    assert found["hover"].startswith("step 5")
    assert "val/loss0.3" in found["hover"], "the value at the next point"
    assert found["crosshairs"] >= 4, "in all charts at once"
    assert found["zoomed"] == ["1000,2000"], "a drag zooms all"
    step = found["clicked"][0].split()[-1]
    assert step in "678"
    words = f"{run.path} {step}", f"{run.path}@step{step}"
    commands = [f"train replay {words[0]}", f"train data {words[0]}", f"train ckpt show {words[1]}"]
    assert found["clicked"] == commands
    assert found["copied"] == [commands[0], commands[0], "copied"], "on the clipboard, selected, and so it says"
    everything = ["replay", "data", "ckpt"]
    assert found["typed"] == [everything, [], [], [], everything, ["data"], ["data"]], "only what can work"
    assert found["key"].startswith("step "), "an arrow key moves along the curve"
    assert found["section"] == ["section-1", "#section-0"], "links that the keyboard reaches"
    assert found["smoothed"][:2] == [["train/loss", True], ["train/loss smoothed", False]]
    assert found["axes"] == [True, "minutes since the run began"]
    assert found["hash"] == "#x=time&smooth=0.9&logy=1&logx=0"
    assert found["contrast"] >= 3, "of each colour on the light and on the dark page"
    assert found["boomed"] == [0, 0]


def test_a_sweep_is_drawn_and_its_table_sorts_and_chooses_the_runs(tmp_path: Path) -> None:
    found = seen(tmp_path, make_sweep(tmp_path / "sweep", (1.0, 0.1, 0.01)))
    assert {"Parameters and best metrics", "Metric against parameter"} <= set(found["titles"])
    assert [name for name, _ in found["lines"]] == [
        f"lr={lr} {name}" for name in ("train/loss", "val/loss") for lr in (0.01, 0.1, 1.0)
    ]
    assert found["restarts"] == 3
    assert found["sorted"] == ["1.0", "0.1", "0.01"]
    assert found["left"] == 3, "of one run the faint and the smooth line, and that of its validation"
