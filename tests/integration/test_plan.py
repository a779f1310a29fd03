"""What `train plan` tells is what a run then does: saves, removals, evaluations, what stays and why, and the disk."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import make_project, train

from trainer_cli.policy.simulation import Timeline
from trainer_cli.policy.stopping import Stop
from trainer_cli.running.plan_view import schedule_texts
from trainer_cli.steps.progress import Progress

MEASURE = '''
"""Notes each save, and what the checkpoints take while what it replaces is still there."""

import json
import os
from pathlib import Path

from trainer_cli import Callback
from trainer_cli.callbacks.retention import Retention

PEAKS = {}
retire = Retention.retire


def measured_retire(self, step):
    manifests = [json.loads(file.read_text()) for file in Path(self.folder).glob("[a-z]*/manifest.json")]
    sizes = [sum(file["size_bytes"] for file in one["files"].values()) for one in manifests]
    PEAKS[step] = (len(sizes), sum(sizes))
    return retire(self, step)


Retention.retire = measured_retire


class Measure(Callback):
    def on_after_optimizer_step(self, trainer, model, optimizer):
        if trainer.progress.step + 1 == int(os.environ.get("STOP_AFTER", 0)):
            trainer.stop("enough", finished=False)

    def on_after_save_checkpoint(self, trainer, path):
        own = json.loads((path / "manifest.json").read_text())
        with Path(trainer.run_dir, "..", "..", "saves.jsonl").open("a") as file:
            # The word of manifests for regular ones.
            kind = own["kind"].replace("permanent", "regular")
            message = {"name": path.name, "step": own["step"], "kind": kind, "reason": own["reason"]}
            count, size_bytes = PEAKS[own["step"]]
            file.write(json.dumps({**message, "count": count, "size_bytes": size_bytes}) + "\\n")


class Logs(Callback):
    def on_after_evaluation(self, trainer, metrics):
        trainer.log_metrics({"own/loss": 1.0})
'''
STREAM = '''
"""Points that nobody has counted."""

import torch

from mine.parts import Points


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        points = Points(80, "train")
        return (points[index] for index in range(80))


class Data:
    def __init__(self):
        self.train, self.val = Stream(), Points(20, "val")
'''
BASE = (
    "experiment=mine",
    "+callbacks.measure._target_=mine.measure.Measure",
    "logging.console=off",
    # What a save replaces is then still there when its hook is called, so that the most on the disk can be measured.
    "checkpoint.save_async=false",
)
CONFIGS = {
    "epochs": ["checkpoint.save_interval=1ep", "loop.eval_interval=1ep"],
    "part epochs": ["checkpoint.save_interval=0.25ep", "loop.eval_interval=0.5ep", "checkpoint.max_checkpoints=2"],
    "samples": ["checkpoint.save_interval=100sp", "loop.max_duration=300sp", "loop.eval_interval=90sp"],
    "ephemeral ones with a cooldown": [
        "checkpoint.ephemeral_save_interval=3",
        "checkpoint.ephemeral_cooldown=2",
        "+callbacks.ema._target_=trainer_cli.EMA",
    ],
    "fixed steps": ["checkpoint.save_interval=null", "checkpoint.fixed_steps=[0,7,33]", "checkpoint.max_checkpoints=1"],
    "all that no rule names goes": [
        "checkpoint.remove=all_without_rule",
        "checkpoint.ephemeral_save_interval=5",
        "checkpoint.fixed_steps=[21]",
        "loop.max_duration=37",
    ],
    "the newest and every twelfth": [
        "checkpoint.save_interval=4",
        "checkpoint.max_checkpoints=2",
        "checkpoint.keep_every=12",
    ],
    "a hard stop": [
        "loop.hard_stop=30",
        "checkpoint.save_interval=12",
        "loop.eval_interval=8",
        "scheduler=warmup_cosine",
    ],
    "accumulation with a rest": [
        "loop.grad_accum_steps=3",
        "loop.limit_train_batches=10",
        "loop.max_duration=3ep",
        "checkpoint.save_interval=0.5ep",
        "checkpoint.ephemeral_save_interval=17sp",
        "optimizer=sgd",
    ],
    "neither before nor at the end": [
        "checkpoint.pre_train_checkpoint=false",
        "checkpoint.save_final=false",
        "checkpoint.save_interval=7",
    ],
    "nothing removed, names of our own": [
        "checkpoint.remove=never",
        "checkpoint.name='e{epoch}-b{batch}-n{samples}'",
        "checkpoint.ephemeral_save_interval=6",
        "data.batch_size=7",
        "loop.limit_train_batches=0.9",
        "loop.eval_at_start=true",
    ],
    "durations in samples, batches that do not divide an epoch": [
        "data.batch_size=7",
        "checkpoint.save_interval=50sp",
        "loop.max_duration=400sp",
        "checkpoint.keep_every=150sp",
        "checkpoint.max_checkpoints=1",
    ],
    "nothing saved": ["checkpoint.enabled=false"],
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_project(tmp_path, **{"mine/measure.py": MEASURE, "mine/stream.py": STREAM})


def tree(folder: Path) -> dict[str, str]:
    """Every file with the digest of its bytes, and every folder; compiled modules left out."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def planned(place: Path, *overrides: str) -> dict[str, Any]:
    """The plan, which must leave everything as it is."""
    before = tree(place)
    done = train("plan", *overrides, "--json", cwd=place)
    assert done.code == 0, done.err
    assert tree(place) == before
    message: dict[str, Any] = json.loads(done.out)
    return message


def did(place: Path, *overrides: str, code: int = 0, **env: Any) -> dict[str, Any]:
    """What one attempt did, by the words of the plan."""
    run, notes = place / "runs" / "mine", place / "saves.jsonl"
    notes.unlink(missing_ok=True)
    log, metrics = run / "train.log", run / "metrics.jsonl"
    evaluated, there = set(_evaluations(metrics)), _sizes(run)
    told_before = len(log.read_text()) if log.exists() else 0
    done = train("fit", *overrides, cwd=place, **env)
    assert done.code == code, done.err
    noted = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    summary = json.loads((run / "summary.json").read_text())
    step = start = summary["attempts"][-1]["start_step"]
    removals = []
    for line in log.read_text()[told_before:].splitlines():
        if match := re.search(r" (?:committed|completed) step (\d+) \(", line):
            step = int(match[1])
        if match := re.search(r" removed (\S+) \((.*)\)$", line):
            removals.append({"name": match[1], "step": step, "reason": match[2]})
    assert [one["step"] for one in noted] == [
        int(step) for step in re.findall(r"committed step (\d+) ", log.read_text()[told_before:])
    ]
    return {
        "end": summary["step"],
        "evaluations": [step for step in _evaluations(metrics) if step > start or step not in evaluated],
        "saves": [{key: one[key] for key in ("name", "step", "kind", "reason")} for one in noted],
        "removals": removals,
        "kept": summary["checkpoints"],
        "on_disk": sorted(_sizes(run)),
        "peak": max((sum(there.values()), len(there)), *((one["size_bytes"], one["count"]) for one in noted)),
    }


def _sizes(run: Path) -> dict[str, int]:
    """Each checkpoint on the disk, and the bytes of its files."""
    manifests = {path.parent.name: json.loads(path.read_text()) for path in run.glob("checkpoints/[!.]*/manifest.json")}
    return {name: sum(file["size_bytes"] for file in one["files"].values()) for name, one in manifests.items()}


def _evaluations(metrics: Path) -> list[int]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return [line["step"] for line in lines if "val/loss" in line]


def compare(message: dict[str, Any], done: dict[str, Any]) -> None:
    assert message["end"]["step"] == done["end"]
    assert message["evaluations"] == done["evaluations"]
    assert [{key: one[key] for key in done["saves"][0]} for one in message["saves"]] == done["saves"]
    assert message["removals"] == done["removals"]
    assert message["kept"] == done["kept"]
    assert sorted(one["name"] for one in message["kept"]) == done["on_disk"]
    size_bytes, count = done["peak"]
    assert message["peak"]["count"] == count
    assert message["peak"]["size_bytes"] == pytest.approx(size_bytes, rel=0.02)


@pytest.mark.parametrize("case", [case for case in CONFIGS if case != "nothing saved"])
def test_a_run_does_what_its_plan_tells(place: Path, case: str) -> None:
    overrides = (*BASE, *CONFIGS[case])
    message = planned(place, *overrides)
    assert message["does"] == "start"
    compare(message, did(place, *overrides))


def test_a_run_that_saves_nothing_is_reported_as_that(place: Path) -> None:
    overrides = (*BASE, *CONFIGS["nothing saved"])
    message, done = planned(place, *overrides), did(place, *overrides)
    assert message["saves"] == done["saves"] == message["kept"] == done["on_disk"] == []
    assert message["evaluations"] == done["evaluations"]


def test_a_plan_goes_on_from_where_the_run_would_and_under_changed_rules(place: Path) -> None:
    did(place, *BASE, "loop.hard_stop=18", "checkpoint.save_interval=4")
    later = (
        *BASE,
        "checkpoint.save_interval=8",
        "checkpoint.max_checkpoints=2",
        "checkpoint.ephemeral_save_interval=3",
    )
    message = planned(place, *later)
    assert (message["does"], message["from"]["step"]) == ("go on", 18)
    assert message["from"]["checkpoint"] == "runs/mine/checkpoints/step18"
    # Of step 0, every fourth step, and the end of the part.
    assert len(message["from"]["on_disk"]) == 6
    assert any(change.startswith("checkpoint.max_checkpoints") for change in message["from"]["changes"])
    assert {one["step"] for one in message["removals"]} >= {18}, "some go before the first step"
    compare(message, did(place, *later))


def test_an_evaluation_that_a_stop_put_off_is_reported(place: Path) -> None:
    rules = (*BASE, "checkpoint.save_interval=null", "checkpoint.ephemeral_save_interval=10", "loop.eval_interval=12")
    did(place, *rules, code=75, STOP_AFTER="12")
    message = planned(place, *rules)
    assert message["evaluations"][0] == message["from"]["step"] == 12
    compare(message, did(place, *rules))


def test_a_finished_run_has_nothing_to_do(place: Path) -> None:
    did(place, *BASE)
    message = planned(place, *BASE)
    assert (message["does"], message["saves"], message["end"]) == ("nothing", [], None)
    done = train("plan", "--probe", *BASE, cwd=place)
    assert "a fit would do nothing" in done.out
    assert "nothing is probed, since nothing would be trained" in done.err


def test_epochs_of_a_stream_can_be_reported_where_their_length_is(place: Path) -> None:
    rules = (*BASE, "data._target_=mine.stream.Data", "loop.max_duration=3ep", "checkpoint.save_interval=1ep")
    message = planned(place, *rules)
    assert message["end"] is None
    assert [one["step"] for one in message["saves"]] == [0]
    assert message["unknown"][0].startswith("loop.max_duration (3 epochs): ")
    assert "its end is not known" in train("plan", *rules, cwd=place).out
    known = (*rules, "loop.steps_per_epoch=10", "checkpoint.ephemeral_save_interval=0.3ep")
    compare(planned(place, *known), did(place, *known))


def test_a_plan_counts_the_steps_of_several_processes(place: Path) -> None:
    several = ("parallel=ddp", "parallel.processes_per_node=2", "data.batch_size=16")
    named = """checkpoint.name='step{step}-of{world_size}'"""
    two, one = planned(place, *BASE, *several, named), planned(place, *BASE, "data.batch_size=32")
    steps = [save["step"] for save in one["saves"]]
    assert len(steps) > 1
    assert [save["name"] for save in two["saves"]] == [f"step{step}-of2" for step in steps]


@pytest.mark.parametrize("refused", ["seed=3", "optimizer=null", "resume=never", "optimizer.lr=-1"])
def test_what_fit_refuses_plan_refuses_alike(place: Path, refused: str) -> None:
    did(place, *BASE)
    before = tree(place)
    plan, fit = train("plan", *BASE, refused, cwd=place), train("fit", *BASE, refused, cwd=place)
    assert plan.code == 2
    assert (plan.code, plan.err) == (fit.code, fit.err)
    assert tree(place) == before


def test_an_ephemeral_interval_that_is_never_due_is_refused_by_plan_and_fit_or_said(place: Path) -> None:
    # Of samples, only the length of the data shows that each of these steps is one of a regular save.
    hidden = ("checkpoint.ephemeral_save_interval=3sp", "checkpoint.save_interval=1")
    short = ("checkpoint.ephemeral_save_interval=30", "checkpoint.save_interval=null", "loop.max_duration=3")
    for overrides, code, text in ((hidden, 2, "each of its steps is one of"), (short, 0, "the run ends before")):
        for command in ("plan", "fit"):
            done = train(command, *BASE, *overrides, f"name=never{code}", cwd=place)
            assert done.code == code, done.err
            lines = [line for line in done.err.splitlines() if "ephemeral_save_interval" in line and " never " in line]
            assert len(lines) == 1, done.err
            assert text in lines[0]


def test_a_patience_shorter_than_two_evaluations_is_said_by_plan_and_fit(place: Path) -> None:
    stopping = ("callbacks=early_stopping", "callbacks.early_stopping.patience=3ep", "loop.eval_interval=2ep")
    for command in ("plan", "fit"):
        done = train(command, "experiment=mine", *stopping, "loop.max_duration=3", cwd=place)
        assert done.code == 0, done.err
        (line,) = (line for line in done.err.splitlines() if "a patience of" in line)
        assert "a patience of 3 epochs is shorter than two evaluations (every 2 epochs): the second val/loss" in line


def test_a_damaged_newest_checkpoint_is_passed_over_and_stays_where_it_is(place: Path) -> None:
    did(place, *BASE, "loop.hard_stop=20", "checkpoint.save_interval=10")
    file = place / "runs/mine/checkpoints/step20/rank0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    later = (*BASE, "checkpoint.save_interval=10")
    message = planned(place, *later)
    assert message["from"]["step"] == 10
    compare(message, did(place, *later))


def test_what_a_metric_decides_is_noted_and_bounded(place: Path) -> None:
    rules = (
        *BASE, "checkpoint.keep_best.metric=val/loss", "checkpoint.keep_best.count=2", "loop.eval_interval=3",
        "checkpoint.max_checkpoints=1",
    )  # fmt: skip
    message, done = planned(place, *rules), did(place, *rules)
    sure, real = {one["step"] for one in message["saves"]}, {one["step"] for one in done["saves"]}
    assert sure <= real <= sure | set(message["may_save"])
    assert real - sure, "the case is worth something"
    size_bytes, count = done["peak"]
    assert count <= message["at_most"]["count"]
    assert size_bytes <= message["at_most"]["size_bytes"] * 1.02
    assert any("keep_best" in line for line in message["unknown"])


def test_rules_in_time_are_estimates_and_left_out_where_nothing_is_given(place: Path) -> None:
    rules = (*BASE, "checkpoint.save_interval=1s", "loop.max_time=30s")
    without = planned(place, *rules)
    assert [one["step"] for one in without["saves"]] == [0, 40]
    assert [line.split()[0] for line in without["unknown"][:2]] == ["checkpoint.save_interval", "loop.max_time"]
    given = planned(place, *rules, "--step-time", "1.25")
    assert [one["step"] for one in given["saves"]] == list(range(25))
    assert given["stop"] == {"reason": "max_time of 30s used up", "finished": False}
    assert len(given["estimates"]) == 2


def test_rules_in_tokens_are_estimates(place: Path) -> None:
    plan = planned(place, *BASE, "checkpoint.save_interval=640tok", "--step-tokens", "64")
    (estimate,) = plan["estimates"]
    assert estimate == (
        "checkpoint.save_interval (640 tokens): estimated from --step-tokens, 64 tokens a step; "
        "the steps differ where samples do"
    )


def test_people_get_a_chart_and_a_table(place: Path) -> None:
    done = train("plan", *BASE, "checkpoint.ephemeral_save_interval=5", "checkpoint.fixed_steps=[7]", cwd=place)
    assert (done.code, done.err) == (0, "")
    marks = {
        line.split()[0]: line.split()[1]
        for line in done.out.splitlines()
        if re.fullmatch(r"  \w+ +[.|RFEe?x]{64}", line)
    }
    assert list(marks) == ["evaluations", "regular", "fixed", "final", "ephemeral", "removals"]
    assert marks["final"] == "." * 63 + "E"
    assert re.search(
        r"  step5 +ephemeral  every 5 steps, ephemeral +removed at 7: ephemeral, and step7 is newer", done.out
    )
    assert re.search(r"  step40 +regular +end of training +stays: final", done.out)


def test_a_plan_says_when_parameters_are_trained(place: Path) -> None:
    plan = planned(place, *BASE, "freeze={*bias: 7}")
    assert plan["unfreezes"] == [{"pattern": "*bias", "duration": "7 steps", "step": 7}]
    shown = train("plan", *BASE, "freeze={*bias: 0.5dur}", cwd=place).out
    assert "  unfreezes      *bias after step 20\n" in shown


def test_a_fit_reports_what_it_does_in_eight_lines_before_the_first_step(place: Path) -> None:
    overrides = (
        *BASE, "loop.grad_accum_steps=2", "model.width=4", "+callbacks.mine._target_=trainer_cli.EMA",
        "+callbacks.stop._target_=trainer_cli.EarlyStopping", "+callbacks.stop.patience=9",
        "+callbacks.rates._target_=trainer_cli.LearningRateMonitor", "scheduler=warmup_cosine",
    )  # fmt: skip
    did(place, *overrides)
    did(place, *overrides, "loop.max_duration=44st")
    log = (place / "runs/mine/train.log").read_text()
    first, second = (dict(re.findall(r"INFO +(\w+) {2,}(.*)", attempt)) for attempt in log.split("resuming at step 40"))
    assert log.index("saves  ") < log.index("committed step 0")
    assert re.fullmatch(r"cpu, threads: \d+, fp32", first.pop("device"))
    assert re.fullmatch(r"\w+, \d+ parameters, all trained", first.pop("model"))
    assert first == {
        "run": "runs/mine (new), steps 0 to 40 (40 steps, 10 an epoch)",
        "optimizer": "Adam (fused; `fused: false` as torch), lr 0.001, Cosine (no warmup)",
        "data": "Data, 160 samples, 20 batches an epoch, 16 samples a step = 8 x 2 accumulated",
        "evaluates": "val (20 samples) at 16, 32, 40, with the average of mine",
        "callbacks": "stop may end the run, measure, mine",
        "saves": "4 checkpoints (0, 16, 32, 40), 4 stay",
    }
    assert second["run"] == "runs/mine (attempt 2, resumes at step 40), steps 40 to 44 (44 steps, 10 an epoch)"
    assert re.search(r"DEBUG +overrides: .* model.width=4 ", log)


@pytest.mark.parametrize(
    ("reason", "steps_per_epoch", "length"),
    [
        ("max_duration of 1 epoch reached", 45, "1 epoch"),
        ("max_duration of 15 epochs reached", 45, "15 epochs of 45 steps"),
        ("max_duration of 15 epochs reached", None, "15 epochs"),
        ("max_duration of 40 steps reached", 1000, "40 steps, 1,000 an epoch"),
        ("hard_stop of 2 epochs reached", 45, "hard_stop of 2 epochs of 45 steps"),
        ("max_time of 30s used up", None, "max_time of 30s used up"),
    ],
)
def test_the_length_of_a_training_is_no_report_of_its_end(
    reason: str, steps_per_epoch: int | None, length: str
) -> None:
    line = Timeline(end=Progress(45), stop=Stop(reason, finished=True))
    assert schedule_texts(line, 0, steps_per_epoch)["steps"] == f"0 to 45 ({length})"


def test_a_sweep_is_planned_with_a_row_for_each_job(place: Path) -> None:
    sweep = ("plan", "-m", *BASE, "name=swept", "loop.max_duration=40,60", "seed=1")
    done = train(*sweep, cwd=place)
    assert (done.code, done.err) == (0, "")
    header, *rows, empty, total = done.out.splitlines()
    assert re.split("  +", header) == ["job", "steps", "evaluations", "checkpoints", "on the disk at most"]
    shown = {row.split()[0]: re.split("  +", row)[1:4] for row in rows}
    assert shown == {
        "loop.max_duration=40": ["0 to 40", "3", "4"],
        "loop.max_duration=60": ["0 to 60", "4", "5"],
    }
    assert empty == ""
    assert re.fullmatch(r"2 jobs, 100 steps, [\d.]+ kB on the disk at most", total)
    both = json.loads(train(*sweep, "--json", cwd=place).out)
    assert [one["end"]["step"] for one in both.values()] == [40, 60]
    assert not (place / "runs/swept").exists()
    several = train("plan", *BASE, "loop.max_duration=40,60", cwd=place)
    assert (several.code, "To run each: `train fit -m " in several.err) == (2, True)


WATCHES = "+callbacks.stop._target_=trainer_cli.EarlyStopping"


@pytest.mark.parametrize(
    ("key", "more"), [("callbacks.stop.metric", [WATCHES]), ("checkpoint.keep_best.metric", [])], ids=["stop", "best"]
)
def test_a_metric_of_a_loader_that_does_not_exist_is_refused_by_a_plan(place: Path, key: str, more: list[str]) -> None:
    # A fit evaluates first, so that it knows what is reported.
    reasons = {
        "plan": ("but there is no validation loader 'vall'", "Write val/loss."),
        "fit": ("which no validation loader or callback reports", "Did you mean 'val/loss'?"),
    }
    for verb, (reason, cure) in reasons.items():
        done = train(verb, *BASE, "name=other", *more, f"++{key}=vall/loss", cwd=place)
        assert done.code == 2, done.out
        assert f"{key} is 'vall/loss', {reason}" in done.err
        assert cure in done.err


def test_a_metric_that_a_callback_of_the_user_may_log_is_not_refused_by_a_plan(place: Path) -> None:
    logs = "+callbacks.logs._target_=mine.measure.Logs"
    done = train("plan", *BASE, "name=other", logs, WATCHES, "+callbacks.stop.metric=own/loss", cwd=place)
    assert done.code == 0, done.err
