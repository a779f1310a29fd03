"""Random experiments, each straight through and with random interruptions: both leave the same files."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from command import Result, make_project, train
from random_experiment import PARTS, RandomExperiment

from campaign.fault_class import FaultClass, Size, Trials
from campaign.oracle import HANG_S, Reference, announced_steps, digest_of, verdict_of
from campaign.struck_project import STRIKE, remove_plan, write_plan
from campaign.verdict import PASSED, Outcome, Verdict

FILES = {"mine/strike.py": STRIKE, "mine/random_parts.py": PARTS}
HOOKS = (
    "on_train_batch_start", "on_before_forward", "on_after_backward", "on_before_optimizer_step",
    "on_after_optimizer_step", "on_train_batch_end", "on_validate_start", "on_validate_batch_end",
    "on_after_evaluation",
)  # fmt: skip
"""Where an interruption comes, besides `loop.hard_stop`."""
CODES = {"SIGTERM": {75}, "SIGINT": {75}, "SIGKILL": {-9}, "raise": {1}}
"""Interruption -> exit codes with which the process ends, unless it came after the last step. A `loop.hard_stop` behind
the position is refused with 2."""


@contextmanager
def prepare_experiments(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Nothing is shared: each trial draws an experiment."""

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        outcome = interrupt_experiment(number, trial)
        if outcome.verdict is Verdict.passed:
            shutil.rmtree(trial)
        return outcome

    yield Trials(count, run_trial)


def interrupt_experiment(seed: int, folder: Path) -> Outcome:
    """Train the experiment of a seed straight through, and again with two or three interruptions, in a folder."""
    experiment = RandomExperiment(seed)
    experiment.config.setdefault("callbacks", {})["strike"] = {"_target_": "mine.strike.callback"}
    project = make_project(folder / "project", **FILES, **{"configs/experiment/drawn.yaml": experiment.file()})

    def fit(place: str, *overrides: str) -> Result:
        (folder / place).mkdir(exist_ok=True)
        words = ("fit", "experiment=drawn", "--config-dir", str(project / "configs"), "run_dir=run", *overrides)
        return train(*words, cwd=folder / place, limit_s=HANG_S)

    straight = fit("straight")
    if straight.code != 0:
        return Outcome(Verdict.hard_fail, f"without an interruption it ends with {straight.code}: {straight.err}")
    announced: list[int] = []
    interruptions = draw_interruptions(seed, experiment.steps)
    for interruption in interruptions:
        result = interrupt(folder / "interrupted", interruption, fit)
        announced += announced_steps(result)
        if result.code not in {0, *CODES.get(interruption.get("what", ""), {2})}:
            return Outcome(Verdict.hard_fail, f"{interruption}: it ends with {result.code}: {result.err}")
    reference = Reference(folder / "straight/run", {})
    # Where nothing is removed, the checkpoints of the stops stay.
    same_checkpoints = experiment.config["checkpoint"]["remove"] != "never"
    outcome = verdict_of(
        folder / "interrupted/run", reference, announced, lambda: fit("interrupted"), same_checkpoints=same_checkpoints
    )
    if outcome.verdict is Verdict.passed:
        outcome = compare_checkpoints(folder / "interrupted/run", reference.run)
    return (
        outcome if outcome.verdict is Verdict.passed else Outcome(outcome.verdict, f"{interruptions}: {outcome.detail}")
    )


def draw_interruptions(seed: int, steps: int) -> list[dict[str, Any]]:
    """Two or three interruptions, by the steps at which they come."""
    chance = random.Random(f"interruptions {seed}")
    at = sorted(chance.sample(range(1, steps), chance.choice((2, 3))))
    return [
        {"hard_stop": step}
        if chance.random() < 0.25
        else {"at": "hook", "hook": chance.choice(HOOKS), "what": chance.choice([*CODES]), "step": step}
        for step in at
    ]


def interrupt(folder: Path, interruption: dict[str, Any], fit: Any) -> Any:
    """Start, or go on, until the interruption comes or the run ends."""
    if "hard_stop" in interruption:
        return fit(folder.name, f"loop.hard_stop={interruption['hard_stop']}")
    folder.mkdir(exist_ok=True)
    write_plan(folder, interruption)
    result: Result = fit(folder.name)
    remove_plan(folder)
    return result


def compare_checkpoints(run: Path, reference: Path) -> Outcome:
    """Check that every kept checkpoint has the tensors of the reference's."""
    different = [
        wanted.name
        for wanted in sorted(reference.glob("checkpoints/step*"))
        if digest_of(run / "checkpoints" / wanted.name) != digest_of(wanted)
    ]
    return Outcome(Verdict.diverged, f"the tensors of {different} differ") if different else PASSED


CLASSES = (
    FaultClass(
        key="experiments",
        title="Random experiments, interrupted at random",
        what="An experiment is drawn from models (dropout, norms, tied and parametrized weights, LoRA), data (files, "
        "loaders, streams, workers), optimizers, schedules, accumulation, precision, averages, sparsity, training "
        "steps and callbacks. Signals, `kill -9`, exceptions and `loop.hard_stop` interrupt it two or three times; "
        "then it must have the weights, optimizer state, records and checkpoints of the same experiment without "
        "interruptions.",
        promises="L1 L2 L4 L6",
        counts={Size.quick: 6, Size.full: 300, Size.nightly: 3000},
        prepare=prepare_experiments,
        share=6.0,
    ),
)
