"""What a reader looks at and clicks in the pages of runs, in a real browser: table, curves, a single run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, needs_chromium, page
from reported import BEGAN, HOSTILE, make_run, outcome, record, write_metrics
from serving import served

from trainer_cli.addons.view.report import report
from trainer_cli.environment import timestamp
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.steps.run_status import RunStatus

pytestmark = needs_chromium

LONG = "digits_with_a_rather_long_name_that_people_write_resnet50_bs256_adamw_warmup"
FAILED = "train/loss is nan at step 60, batch 7. Lower optimizer.lr, or set step.clip_norm."
DRAWN = "byId('title').textContent && inView.size && [...inView].every((chart) => chart.view || !chart.block.curves)"
SETUP = """
const row = (name) => [...document.querySelectorAll(".runs tbody tr")].find((one) => one.cells[0].title === name);
const headers = () => [...document.querySelectorAll(".runs th")];
const heads = () => headers().filter((cell) => !cell.hidden).map((cell) => cell.innerText);
const column = (name) => [...document.querySelectorAll(".runs th")].findIndex((cell) => cell.innerText === name);
const cellOf = (run, name) => row(run).cells[column(name)];
const ticks = () => [...document.querySelectorAll(".choice input")].map((box) => box.checked);
const sortedBy = (name) => {
  document.querySelectorAll(".runs th button")[column(name)].click();
  return [...document.querySelectorAll(".runs tbody tr")].map((one) => one.cells[0].title);
};
const filter = (text) => {
  const find = document.querySelector("input[placeholder^='find (']");
  find.value = text;
  find.dispatchEvent(new Event("input"));
};
const chart = (title) => charts.get(`Metrics/chart/${title}`);
const names = () => (chart("loss")?.view?.lines ?? []).filter((line) => !line.faint).map((line) => line.name);
const pointer = (kind, title, step, y = 20) => {
  const { plot, view } = chart(title), corner = plot.getBoundingClientRect();
  const at = { clientX: corner.left + view.xs.at(step), clientY: corner.top + y, bubbles: true, pointerType: "mouse" };
  plot.dispatchEvent(new PointerEvent(kind, at));
  return [...byId("tip").querySelectorAll("div span")].map((one) => one.textContent);
};
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with page(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two jobs of a sweep, a run with a long name and a fork of it, one that failed, and one that runs."""
    root = tmp_path_factory.mktemp("served") / "runs"
    jobs = ["KEY,optimizer.lr,status,step,reason,run_dir"]
    for seed, lr in enumerate((0.1, 0.3)):
        run = make_run(
            root / f"sweep/lr={lr}", lr=lr, steps=60, metrics={"val/accuracy": partial(lambda lr, n: 1 - lr, lr)}
        )
        configure(run, seed=seed, lr=lr, size=1)
        jobs.append(f"lr={lr},{lr},finished,60,,{run.path}")
    (root / "sweep/sweep.csv").write_text("\n".join(jobs))
    parent = make_run(root / LONG, lr=0.2, steps=200, metrics={"val/accuracy": lambda n: float("nan")})
    configure(parent, seed=7, lr=0.2, size=2)
    fork = make_run(root / "a_fork", lr=0.05, steps=40)
    configure(fork, seed=7, lr=0.05, size=2)
    with open(fork.config_file, "a") as config:
        config.write("ckpt: runs/parent@latest\n")
    summary = fork.read_summary()
    summary["attempts"][0]["forked_from"] = {"run_id": parent.run_id, "step": 150, "shift": 150}
    fork.summary_file.write_text(json.dumps(summary))
    fork.notes_file.write_text(f"# Half the rate\n\n{HOSTILE}\n")
    failed = make_run(root / "failed", lr=0.5, steps=30, status=None)
    failed.end_attempt(outcome(RunStatus.failed, 30, FAILED), now=BEGAN + 2000)
    configure(failed, seed=7, lr=0.5, size=2)
    with running(root / "running"):
        yield root


def configure(run: RunDir, *, seed: int, lr: float, size: int) -> None:
    keys = "".join(f"k{n}: {size}\n" for n in range(8))
    long = f"a_section_with_a_long_name: {{and_a_key_with_a_long_name_{'too' * 20}: {seed}}}\n"
    run.config_file.write_text(
        f"seed: {seed}\n{keys}{long}optimizer: {{weight_decay: 0, lr: {lr}}}\nmodel: {{size: {size}}}\n"
    )


@contextmanager
def running(path: Path) -> Iterator[None]:
    """A run that made 100 of 400 steps, at a step a second."""
    run, now = make_run(path, lr=0.4, steps=100, status=None), time.time()
    configure(run, seed=7, lr=0.4, size=2)
    write_metrics(run, ({**record(n, 100, 0.4, {}), "time": now - 100 + n} for n in range(1, 101)))
    run.record_total_steps(400)
    summary = run.read_summary()
    summary["attempts"][-1]["started"] = timestamp(now - 200)
    run.summary_file.write_text(json.dumps(summary))
    with run.lock():
        yield


@contextmanager
def opened(chromium: Page, runs: Path, fragment: str = "", **window: Any) -> Iterator[Page]:
    """The page of `train serve`, whose problems and complaints are read at the end."""
    chromium.complaints.clear()
    with served(runs) as server:
        chromium.open(f"{server.url}{fragment}", **{"width": 1280, "height": 3000, **window})
        chromium.wait_for(DRAWN)
        chromium.run(f"(() => {{ window.boomed = 0; window.boom = () => {{ boomed += 1; }}; }})(); {SETUP}")
        yield chromium
        assert chromium.run("[byId('problem').textContent, boomed]") == ["", 0]
    assert chromium.complaints == []


def test_the_table_follows_what_is_chosen(chromium: Page, runs: Path) -> None:
    with opened(chromium, runs) as seen:
        choose = "[...document.querySelectorAll('#chosen button')]"
        assert seen.run("ticks()") == [True] * 6
        for button, tick in ((1, False), (0, True), (1, False)):
            seen.run(f"{choose}[{button}].click()")
            seen.wait_for(f"byId('made').textContent.endsWith('{6 * tick} shown')")
            assert seen.run("ticks()") == [tick] * 6, "the buttons move the ticks"
        assert "k0" in seen.run("heads()"), "of all runs, while none is shown"
        seen.run("['sweep/lr=0.1', 'sweep/lr=0.3'].forEach((name) => row(name).querySelector('input').click())")
        seen.wait_for("names().length === 4 && !heads().includes('k0')")
        heads = seen.run("heads()")
        assert heads[2:4] == ["reason", "lr"], "what is swept, before the metrics"
        assert "seed" in heads
        assert not {"k0", "weight_decay"} & set(heads), "only what differs between those that are shown"
        seen.run(f"{choose}[0].click()")
        seen.wait_for("heads().includes('k0')")


def test_a_filter_that_finds_nothing_and_is_emptied_again_draws_everything_again(chromium: Page, runs: Path) -> None:
    with opened(chromium, runs, "#group=seed&x=time", height=9000) as seen:
        axes = "document.querySelectorAll('.plot.scatter option').length / 2"
        seen.wait_for(f"{axes} > 6")
        marks = "document.querySelectorAll('.plot.parallel path.run, .plot.scatter circle')"
        name = "mark.dataset.tip.split('\\n')[0]"
        of_name = f"[...document.querySelectorAll('.runs tbody tr')].find((one) => one.cells[0].title.endsWith({name}))"
        swatch = f"{of_name}.querySelector('.swatch').style.background"
        tint = "mark.getAttribute(mark.matches('path') ? 'stroke' : 'fill')"
        colours = seen.run(f"[...{marks}].map((mark) => [{tint}, {swatch}])")
        assert len(colours) == 12
        assert [drawn for drawn, _ in colours] == [of_table for _, of_table in colours], "a run has one colour"
        count, all_axes = seen.run(f"[names().length, {axes}]")
        seen.run("filter('a_fork|failed|running')")
        seen.wait_for(f"byId('made').textContent.endsWith('3 shown') && {axes} < 6")
        for text in ("no such run", "", "running", "(", ""):
            seen.run(f"filter({text!r})")
            seen.run("new Promise((done) => setTimeout(done, 30))")
        seen.wait_for(f"byId('made').textContent.endsWith('6 shown') && {axes} === {all_axes}")
        seen.wait_for(f"names().length === {count}")


def test_the_first_click_on_a_metric_shows_the_best_first(chromium: Page, runs: Path) -> None:
    with opened(chromium, runs) as seen:
        # Before the records of a run are read, it has no best values.
        rows = "[...document.querySelectorAll('.runs tbody tr')]"
        seen.wait_for(f"{rows}.every((one) => one.cells[column('best val/loss')]?.innerText)")
        smallest = seen.run("sortedBy('best val/loss')")
        assert (smallest[0], smallest[-1]) == ("a_fork", "failed")
        largest = seen.run("sortedBy('best val/accuracy')")
        assert (largest[0], largest[-1]) == ("running", LONG), "and what is not finite last"
        assert seen.run("sortedBy('best val/accuracy')")[-1] == LONG, "also the other way round"
        assert seen.run("sortedBy('lr')")[0] == "a_fork", "a key of the config upwards"


def test_columns_are_chosen_and_a_link_has_the_choice(chromium: Page, runs: Path) -> None:
    labels = "[...document.querySelectorAll('.columns label')]"
    box = f"{labels}.find((one) => one.textContent === '{{}}').querySelector('input')"
    with opened(chromium, runs) as seen:
        seen.wait_for("heads().includes('state')")
        assert "attempts" not in seen.run("heads()")
        for name in ("state", "attempts"):
            seen.run(f"{box.format(name)}.click()")
        chosen = seen.run("heads()")
        assert {"attempts", "state"} & set(chosen) == {"attempts"}
        assert seen.run("row('failed').cells[column('state')].hidden")
        seen.open(seen.run("location.href"), width=1280)
        seen.wait_for(DRAWN)
        seen.run(f"window.boomed = 0; {SETUP}")
        assert {"attempts", "state"} & set(seen.run("heads()")) == {"attempts"}


def test_each_run_is_a_line_of_the_table_with_its_state_progress_notes_and_forks(chromium: Page, runs: Path) -> None:
    with opened(chromium, runs) as seen:
        assert seen.run("[...new Set([...document.querySelectorAll('.runs tr')].map((one) => one.offsetHeight))]") == [
            30
        ]
        assert seen.run("[cellOf('running', 'step').textContent, cellOf('running', 'steps/s').textContent]") == [
            "100 of 400 (25%)", "1",
        ]  # fmt: skip
        assert seen.run("cellOf('running', 'step').querySelector('progress').value") == 0.25
        assert seen.run("document.querySelectorAll('.runs progress').length") == 1, "of the one that runs"
        assert seen.run("/^[45]:\\d\\d$/.test(cellOf('running', 'left').textContent)")
        colours = "['running', 'failed', 'a_fork'].map((name) => getComputedStyle(cellOf(name, 'state')).color)"
        assert len(set(seen.run(colours))) == 3, "running, failed and finished"
        assert seen.run("cellOf('failed', 'reason').textContent") == FAILED.partition(" Lower")[0], "its first sentence"
        assert seen.run(f"row('{LONG}').nextElementSibling.cells[0].title") == "a_fork", "beside its parent"
        assert seen.run("cellOf('a_fork', 'fork of').textContent") == f"{LONG} at step 150"
        assert seen.run("cellOf('a_fork', 'notes').textContent") == "Half the rate"
        (runs / "a_fork/notes.md").write_text(f"Changed meanwhile\n{HOSTILE}\n")
        seen.wait_for("cellOf('a_fork', 'notes').textContent === 'Changed meanwhile'")


def test_the_pointer_reads_only_curves_that_reach_it_and_a_fork_begins_where_it_left_its_parent(
    chromium: Page, runs: Path
) -> None:
    with opened(chromium, runs) as seen:
        seen.run("byId('smooth').value = 0; byId('smooth').dispatchEvent(new Event('input'))")
        at_50 = {name.split()[0] for name in seen.run("pointer('pointermove', 'loss', 50)")}
        assert "failed" not in at_50, "it ended at step 30"
        assert {"lr=0.1", "lr=0.3", "running"} <= at_50
        assert seen.run("pointer('pointermove', 'loss', 170)") != []
        at_170 = seen.run("pointer('pointermove', 'loss', 170)")
        assert len([name for name in at_170 if name.startswith("a_fork, from step 150 ")]) == 2
        assert {name.split()[0] for name in at_170} == {"a_fork,", LONG}, "its parent, and no other run"
        fork = "chart('loss').view.lines.find((line) => line.owner.startsWith('a_fork'))"
        assert seen.run(f"[{fork}.x[0], {fork}.step[0]]") == [151, 1]
        seen.run(f"pointer('pointermove', 'loss', 151, chart('loss').view.ys.at({fork}.y[0]))")
        seen.run(
            f"['pointerdown', 'pointerup'].forEach((kind) => "
            f"pointer(kind, 'loss', 151, chart('loss').view.ys.at({fork}.y[0])))"
        )
        assert seen.run("[byId('step').value, data.looks[looked].run.endsWith('a_fork')]") == ["1", True], (
            "its own step"
        )
        seen.run(f"row('{LONG}').querySelector('input').click()")
        seen.wait_for(f"{fork} && {fork}.x[0] === 1")


def test_a_source_of_values_has_one_colour_or_dashes_in_all_charts(chromium: Page, runs: Path) -> None:
    look = "charts.values().filter((one) => one.view && /^(train|val)/.test(one.block.curves[0].name))"
    lines = f"[...{look}].flatMap((one) => one.view.lines.map((line) => [line.group.split('/')[0], line.KEY]))"
    for fragment, key in (("#run=a_fork", "colour"), ("", "dash")):
        with opened(chromium, runs, fragment, height=9000) as seen:
            found = {tuple(pair) for pair in seen.run(lines.replace("KEY", key))}
            assert sorted(source for source, _ in found) == ["train", "val"], found
            assert len({look for _, look in found}) == 2, found


def test_a_chart_fills_the_screen_until_escape(chromium: Page, runs: Path) -> None:
    with opened(chromium, runs, height=800) as seen:
        low = seen.run("chart('loss').plot.querySelector('svg').clientHeight")
        seen.run("chart('loss').frame.querySelector('.enlarge').focus()")
        seen.press("Enter")
        seen.wait_for(f"chart('loss').plot.querySelector('svg').clientHeight > {2 * low}")
        assert seen.run("chart('loss').frame.getBoundingClientRect().toJSON().width === innerWidth")
        assert seen.run("pointer('pointermove', 'loss', 20).length"), "it still has tips"
        above = "chart('loss').frame.contains(document.elementFromPoint(innerWidth / 2, innerHeight / 2))"
        assert seen.run(above)
        seen.press("Escape")
        seen.wait_for(f"chart('loss').plot.querySelector('svg').clientHeight === {low}")


# Words that stand on two lines though their line is long enough for them.
BROKEN_WORDS = """
[...document.querySelectorAll("h1, h3, dd, dt, .banner b, .runs td, .runs th")].flatMap((node) => {
  const texts = document.createTreeWalker(node, NodeFilter.SHOW_TEXT), broken = [];
  while (texts.nextNode()) for (const { 0: word, index } of texts.currentNode.data.matchAll(/[a-zA-Z0-9]+/g)) {
    const range = document.createRange();
    range.setStart(texts.currentNode, index);
    range.setEnd(texts.currentNode, index + word.length);
    if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) broken.push(word);
  }
  return broken;
})
"""


@pytest.mark.parametrize("width", [400, 1280, 1600])
def test_nothing_is_wider_than_the_window_and_no_name_breaks_inside_a_word(
    width: int, chromium: Page, runs: Path
) -> None:
    for fragment in ("", f"#run={LONG}", "#run=failed"):
        with opened(chromium, runs, fragment, width=width, height=1200) as seen:
            if not fragment:
                assert seen.run("[...byId('group').options].some((one) => one.text.length > 80)"), "a long key"
            assert seen.run("document.documentElement.scrollWidth - innerWidth") <= 0
            assert seen.run(BROKEN_WORDS) == []


@pytest.mark.parametrize("name", ["serve", "report"])
def test_the_page_of_one_run_says_first_what_went_wrong_how_far_it_is_and_what_is_noted(
    name: str, chromium: Page, runs: Path, tmp_path: Path
) -> None:
    texts = "[...document.querySelectorAll('.facts div')].map((one) => [...one.children].map((it) => it.innerText))"
    found = {}
    with served(runs) as server:
        for run in ("failed", "running", "a_fork"):
            report([runs / run], tmp_path / "r.html", now=time.time())
            chromium.open(f"{server.url}#run={run}" if name == "serve" else (tmp_path / "r.html").as_uri(), width=1280)
            chromium.wait_for("document.querySelector('.facts')")
            found[run] = dict(chromium.run(texts))
            assert chromium.run("[document.images.length, byId('problem').textContent]") == [0, ""]
            if run == "failed":
                banner = "[...document.querySelector('.banner').children].map((one) => one.innerText)"
                first, more = FAILED.split(" Lower")
                assert chromium.run(banner) == [f"failed: {first}", f"Lower{more}"]
                assert chromium.run("document.querySelector('.banner').getBoundingClientRect().bottom") < 300
            else:
                assert chromium.run("document.querySelector('.banner')") is None
        notes = "[...document.querySelectorAll('pre.prose')].map((one) => one.textContent)"
        assert chromium.run(notes) == [(runs / "a_fork/notes.md").read_text().strip()]
    assert found["failed"]["state"] == "failed"
    running = found["running"]
    assert (running["state"], running["step"], running["speed"]) == ("running", "100 of 400 (25%)", "1 steps/s")
    assert running["left"].endswith(" min")
    assert found["a_fork"]["began with"].endswith("runs/parent@latest, step 150")


def test_the_configs_of_two_runs_are_side_by_side(chromium: Page, runs: Path, tmp_path: Path) -> None:
    report([runs / LONG, runs / "a_fork"], tmp_path / "r.html", now=time.time())
    chromium.open((tmp_path / "r.html").as_uri(), width=1280)
    chromium.wait_for("charts.size")
    fold = "[...document.querySelectorAll('details')].find((one) => one.textContent.startsWith('The whole configs'))"
    chromium.run(f"{fold}.open = true")
    rows = chromium.run(f"[...{fold}.querySelectorAll('tbody tr')].map((one) => [one.className, one.innerText])")
    assert ["marked", "optimizer.lr\t0.2\t0.05"] in rows
    assert ["", "seed\t7\t7"] in rows
    assert chromium.run(f"{fold}.querySelector('.marked').offsetHeight") == 30
