"""Samples that are NaN, under each policy, and metrics that are NaN with `keep_best`."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from command import records

from campaign.fault_class import FaultClass, Size, Trials
from campaign.oracle import announced_steps, check_end, digest_of
from campaign.struck_project import StruckProject, make_struck_project, remove_plan, write_plan
from campaign.verdict import PASSED, Outcome, Verdict

BEST = ("checkpoint.keep_best.metric=val/loss", "checkpoint.keep_best.count=2", "checkpoint.max_checkpoints=1")
POLICIES: dict[str, int] = {"none": 1, "raise": 1, "skip": 0, "roll_back": 0}
"""Policy of CheckFinite -> exit code of the start that meets the NaN."""
INDEXES = (3, 50, 77, 101, 140)
TRAIN_TRIALS = tuple(product(INDEXES, POLICIES, (1, 2)))
"""(sample that is NaN, policy, at which visit)"""
EVALUATIONS = (1, 2, 3)


@contextmanager
def prepare_not_finite(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a NaN, once for each policy that runs after one."""
    projects = {
        policy: make_struck_project(_made(folder / policy), *BEST, *overrides_of(policy))
        for policy in (POLICIES if count > len(EVALUATIONS) else ("none",))
    }

    def run_trial(number: int) -> Outcome:
        trial = _made(folder / f"trial{number}")
        if number < len(EVALUATIONS):
            outcome = evaluate_nan(projects["none"], trial, EVALUATIONS[number])
        else:
            index, policy, visit = TRAIN_TRIALS[number - len(EVALUATIONS)]
            outcome = train_nan(projects[policy], trial, policy, {"at": "train", "index": index, "visit": visit})
        if outcome.verdict is Verdict.passed:
            shutil.rmtree(trial)
        return outcome

    yield Trials(min(count, len(EVALUATIONS) + len(TRAIN_TRIALS)), run_trial)


def overrides_of(policy: str) -> tuple[str, ...]:
    """The overrides that add CheckFinite with a policy."""
    if policy == "none":
        return ()
    return ("+callbacks.finite._target_=trainer_cli.CheckFinite", f"+callbacks.finite.policy={policy}")


def train_nan(project: StruckProject, folder: Path, policy: str, plan: dict[str, Any]) -> Outcome:
    """Train over a sample that is NaN; where that ends the run, go on with the sample as it should be."""
    write_plan(folder, {**plan, "what": "nan"})
    struck = project.run(folder)
    announced = announced_steps(struck)
    if struck.code != POLICIES[policy] or not (folder / "struck").exists() or "Traceback" in struck.err:
        return Outcome(Verdict.hard_fail, f"{policy} {plan}: ended with {struck.code}: {struck.err}", len(announced))
    if problem := find_not_finite(folder / "run", POLICIES[policy] == 0):
        return Outcome(Verdict.diverged, f"{policy} {plan}: {problem}", len(announced))
    if struck.code == 0:
        return PASSED
    remove_plan(folder)
    # Checkpoints with NaN weights are announced as such, no resume takes them, and a start sets them aside.
    went_on = project.run(folder)
    for aside in folder.glob("run/checkpoints/.aside.*"):
        shutil.rmtree(aside)
    return check_end(folder / "run", project.reference, [], went_on)


def evaluate_nan(project: StruckProject, folder: Path, evaluation: int) -> Outcome:
    """Train to the end with a metric that is NaN at one evaluation: it is never the best, and the weights are the
    same."""
    write_plan(folder, {"at": "val", "what": "nan", "index": 7, "visit": evaluation})
    done = project.run(folder)
    if done.code != 0:
        return Outcome(Verdict.hard_fail, f"ended with {done.code}: {done.err}")
    if problem := find_not_finite(folder / "run", False):
        return Outcome(Verdict.diverged, problem)
    if digest_of(folder / "run/checkpoints/step40") != project.reference.digests[40]:
        return Outcome(Verdict.diverged, f"evaluation {evaluation} changed the weights")
    return PASSED


def find_not_finite(run: Path, all_finite: bool) -> str:
    """What is NaN that must not be: the best, the weights that the next start takes; with `all_finite` any record or
    checkpoint. Empty if nothing is."""
    summary = json.loads((run / "summary.json").read_text())
    best = {key: value["value"] for key, value in summary["best_metrics"].items()}
    if bad := [key for key, value in best.items() if not math.isfinite(value)]:
        return f"best metrics are not finite: {bad}"
    manifests = {path.parent.name: json.loads(path.read_text()) for path in run.glob("checkpoints/step*/manifest.json")}
    for checkpoint in summary["checkpoints"]:
        metrics = manifests[checkpoint["name"]]["metrics"]
        if "best" in checkpoint["why"] and not math.isfinite(float(metrics["val/loss"])):
            return f"{checkpoint} is kept as the best with {metrics}"
    if not any(manifest["finite"] for manifest in manifests.values()):
        return f"no finite checkpoint is left of {sorted(manifests)}"
    if all_finite and not all(manifest["finite"] for manifest in manifests.values()):
        return "a checkpoint is not finite"
    if all_finite and "NaN" in str(records(run / "metrics.jsonl")):
        return "a record is not finite"
    return ""


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


CLASSES = (
    FaultClass(
        key="not_finite",
        title="NaN in a sample or a metric",
        what="A sample is NaN at its first or second visit, without CheckFinite and under each of its policies; or one "
        "evaluation gives NaN, with keep_best.",
        promises="L1 L4 L5 L6",
        counts={Size.quick: 7, Size.full: 43, Size.nightly: 43},
        prepare=prepare_not_finite,
        share=1.2,
    ),
)
