"""The page of `train serve` in a real browser: its table, choice, groups and refresh, beside a run that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import look, needs_chromium
from reported import HOSTILE, make_run, record
from serving import served

from trainer_cli.addons.view import serve_http
from trainer_cli.strict_json import strict_json

pytestmark = needs_chromium

PROBE = """
window.boomed = 0; window.boom = () => { boomed += 1; };
(async () => {
  const told = {};
  const until = async (isDone) => {
    for (let n = 0; n < 60 && !isDone(); n += 1) await new Promise((done) => setTimeout(done, 50));
    document.body.dataset.told = JSON.stringify(told);
    return Boolean(isDone());
  };
  const loss = () => { const chart = charts.get("Metrics/chart/loss"); return chart && chart.view ? chart : null; };
  const names = () => loss().view.lines.filter((line) => !line.faint).map((line) => line.name);
  const row = (name) => [...document.querySelectorAll("tbody tr")].find((one) => one.cells[0].textContent === name);
  try {
    told.drawn = await until(() => overview && loss());
    told.rows = [...document.querySelectorAll("tbody tr")].slice(0, 4).map((row) => row.cells[0].textContent);
    told.lines = names();
    const box = row("lr0.1").closest(".box");
    box.style.width = "300px";
    told.width_of_name = row("lr0.1").cells[0].clientWidth;
    box.style.width = "";
    const length = loss().view.lines[0].x.length;
    await fetch("/append");
    told.refreshed = await until(() => loss().view.lines[0].x.length > length);
    await fetch("/begin");
    told.begun = await until(() => names().some((name) => name.startsWith("later ")));
    const find = document.querySelector("input[placeholder^='find (']");
    find.focus();
    find.value = "lr0.[12]";
    find.dispatchEvent(new Event("input"));
    told.filtered = await until(() => names().length === 4) && names();
    told.focus = document.activeElement.type;
    row("lr0.1").querySelector("input").click();
    told.chosen = await until(() => names().length === 2) && names();
    row("lr0.1").querySelector("input").click();
    await until(() => names().length === 4);
    byId("group").value = "model.size";
    byId("group").dispatchEvent(new Event("input"));
    await until(() => names().some((name) => name.includes("runs")));
    told.grouped = names();
    told.bands = loss().plot.querySelectorAll(".band").length;
    const mean = loss().view.lines.find((line) => line.name.endsWith("val/loss"));
    told.mean = [mean.x, mean.y, mean.low, mean.high].map((values) => values.map((value) => +value.toFixed(6)));
    told.between = meanOf([{ x: [0, 2], y: [0, 2] }, { x: [1, 3, 4], y: [5, null, 8] }, { x: [7], y: [null] }]);
    told.thinned = meanOf([{ x: [...Array(2000).keys()], y: Array(2000).fill(1) }]).x.length;
    location.hash = row("lr0.1").querySelector("a").getAttribute("href");
    const isOpened = () => byId("title").textContent === "lr0.1" && loss() && names()[0] === "train/loss";
    told.opened = await until(isOpened);
    told.sections = [...document.querySelectorAll("h2")].map((title) => title.textContent);
    told.wide = document.documentElement.scrollWidth - innerWidth;
    told.boomed = [boomed, document.images.length];
    const hosts = performance.getEntriesByType("resource").map((one) => new URL(one.name).host);
    told.hosts = [...new Set(hosts)].filter((host) => host !== location.host);
  } catch (error) { told.error = `${error.stack}`; }
  told.problem = byId("problem").textContent;
  document.body.dataset.told = JSON.stringify(told);
})();
"""

STALE = """
(async () => {
  const told = {}, answering = window.fetch, problem = () => byId("problem").textContent;
  const until = async (isDone) => {
    for (let n = 0; n < 300 && !isDone(); n += 1) await new Promise((done) => setTimeout(done, 50));
    return Boolean(isDone());
  };
  const hang = (_, { signal }) => new Promise((_, fail) => signal.addEventListener("abort", () => fail(signal.reason)));
  const stall = async (_, options) => ({ ok: true, text: () => hang(_, options) });
  const failures = { hangs: hang, stalls: stall };
  for (const text of ["Failed to fetch", "Load failed", "NetworkError when attempting to fetch resource."]) {
    failures[text] = () => Promise.reject(new TypeError(text));
  }
  try {
    told.drawn = await until(() => overview && live.page);
    scrollTo(0, document.documentElement.scrollHeight);
    told.stale = {};
    for (const [name, failing] of Object.entries(failures)) {
      window.fetch = failing;
      await until(problem);
      const { top, bottom } = byId("problem").getBoundingClientRect();
      const text = problem().replace(/\\d.*\\d.*(?=\\.)/, "TIME");
      window.fetch = answering;
      told.stale[name] = [text, top < innerHeight && bottom <= innerHeight, await until(() => !problem())];
    }
  } catch (error) { told.error = `${error.stack}`; }
  told.problem = problem();
  document.body.dataset.told = JSON.stringify(told);
})();
"""


def test_a_page_whose_server_does_not_answer_says_since_when_wherever_it_is_scrolled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "runs/one", steps=20)
    probed = tmp_path / "probed.js"
    script = Path(serve_http._SCRIPT).read_text()
    assert "PATIENCE_MS = 30000" in script
    probed.write_text(script.replace("PATIENCE_MS = 30000", "PATIENCE_MS = 2000") + STALE)
    monkeypatch.setattr(serve_http, "_SCRIPT", probed)
    with served(tmp_path / "runs") as server:
        found = look(server.url, tmp_path / "profile", height=400, most_ms=60_000)
    assert found["drawn"]
    assert len(found["stale"]) == 5
    text = "The server does not answer: was train serve ended? This page is as of TIME."
    assert found["stale"] == {name: [text, True, True] for name in found["stale"]}


def test_the_page_shows_filters_groups_and_refreshes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lr, size in ((0.1, "a"), (0.2, "a"), (0.3, "b")):
        run = make_run(tmp_path / f"runs/lr{lr}", lr=lr, steps=20)
        run.config_file.write_text(f"name: lr{lr}\ntags: [{size}]\nmodel: {{size: {size}}}\n")
    hostile = make_run(tmp_path / "runs" / "<b onclick=boom()>x</b>", steps=20, metrics={f"{HOSTILE}/loss": float})
    hostile.config_file.write_text(f"name: x\nnotes: {strict_json(HOSTILE)}\n")
    grows = tmp_path / "runs/lr0.1/metrics.jsonl"

    def append(*_: object) -> tuple[str, str]:
        with open(grows, "a") as file:
            file.write(f"{strict_json(record(21, 10, 0.1, {}))}\n")
        return "text/plain", ""

    def begin(*_: object) -> tuple[str, str]:
        make_run(tmp_path / "runs/later", steps=20)
        return "text/plain", ""

    probed = tmp_path / "probed.js"
    probed.write_text(Path(serve_http._SCRIPT).read_text() + PROBE)
    monkeypatch.setattr(serve_http, "_SCRIPT", probed)
    monkeypatch.setattr(serve_http, "_ANSWERS", {**serve_http._ANSWERS, "/append": append, "/begin": begin})
    with served(tmp_path / "runs") as server:
        found = look(server.url, tmp_path / "profile", height=4000)
    assert (found["drawn"], found["refreshed"]) == (True, True)
    assert found["begun"], "a run that begins while the page is open"
    assert sorted(found["rows"]) == ["<b onclick=boom()>x</b>", "lr0.1", "lr0.2", "lr0.3"]
    assert len(found["lines"]) == 8
    assert found["width_of_name"] >= 150, "names of runs are not squeezed by the other columns"
    assert sorted(found["filtered"]) == [f"lr0.{n} {name}" for n in (1, 2) for name in ("train/loss", "val/loss")]
    assert found["focus"] == "search", "a refresh keeps the focus"
    assert found["chosen"] == ["train/loss", "val/loss"], "of one run"
    assert found["grouped"] == ["size=a (2 runs) train/loss", "size=a (2 runs) val/loss"]
    assert found["bands"] == 2
    # Learning rates of 0.1 and 0.2, each with 2 / step.
    assert found["mean"] == [[10, 20], [0.35, 0.25], [0.3, 0.2], [0.4, 0.3]]
    assert found["between"] == {"x": [0, 1, 2, 4], "y": [0, 3, 4, 8], "low": [0, 1, 2, 8], "high": [0, 5, 6, 8]}
    assert found["thinned"] == 500
    assert found["opened"] is True
    assert found["sections"][:2] == ["Summary", "Metrics"]
    assert found["wide"] <= 0
    assert (found["boomed"], found["hosts"]) == ([0, 0], [])
