"""Check on the user's own experiment that a resumed run equals a run without a stop, bit for bit.

    the config is composed once, with settings of the check on top: short epochs, a run directory of its own
    one process trains without a stop, and records a digest of all state at every step
    other runs are stopped and started again, each in two or three places; what they write down must be the same
    where it is not: one more straight run, which notes calls of clocks and unseeded generators, then a cause

Every process begins with nothing but the files that the one before it left, as after a crash.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer_cli.addons.exact.attempts import Chain, Probes, Runner, RunProbe
from trainer_cli.addons.exact.causes import Evidence, advise_saving, describe, explain, name_values
from trainer_cli.addons.exact.digests import Asks
from trainer_cli.addons.exact.report import Comparison, Finding, FoundDifference, ResumeReport, find_failure, title_of
from trainer_cli.addons.exact.trace import SAVED_STEP, ProbeStop, StopPlace, TraceKind, plan_chains
from trainer_cli.config import Composed, compose
from trainer_cli.errors import UserError
from trainer_cli.scratch import scratch_folder
from trainer_cli.terminal import format_count

STEPS = 12
LEAST_STEPS = 6


def assert_resume_is_exact(*overrides: str, project: Path | str | None = None, steps: int | None = None) -> None:
    """Fail, with the table, unless a stopped and resumed training equals one without a stop.

    `project` is the directory that holds `configs/`; by default the current one.

    Raises:
        AssertionError: it does not; the message is what `train check resume` prints.
        TrainError: the experiment cannot be composed, or does not train at all.
    """
    cwd = None if project is None else Path(project).resolve()
    report = check_resume(compose(overrides, cwd=cwd), steps=steps or STEPS, cwd=cwd)
    if not report.exact:
        raise AssertionError(f"a resume is not exact\n\n{report}")


def check_resume(
    composed: Composed,
    *,
    steps: int = STEPS,
    config_dir: Path | None = None,
    cwd: Path | None = None,
    show: Callable[[str], None] = lambda text: None,
    run: RunProbe | None = None,
) -> ResumeReport:
    """Stop and resume an experiment in every way, and compare with a run without a stop.

    Raises:
        TrainError: the experiment does not train even without a stop; with its own message.
        UserError: it has too few steps to be stopped.
    """
    if steps < LEAST_STEPS:
        raise UserError(f"a check of {format_count(steps, 'step')} proves nothing", cure=f"Use at least {LEAST_STEPS}.")
    began = time.monotonic()
    with scratch_folder("train-check-") as folder, ExitStack() as stack:
        if run is None:
            run = stack.enter_context(closing(Probes(cwd or Path.cwd())))
        runner = Runner(composed, folder, steps, config_dir, run, show)
        report = _compare_stops(composed, runner, steps)
        return replace(report, processes=runner.started, seconds=round(time.monotonic() - began, 1))


def _compare_stops(composed: Composed, runner: Runner, steps: int) -> ResumeReport:
    attempt = runner.chain("straight").attempts[0]
    if attempt.failed:
        raise attempt.error()
    runner.keep_found_values("straight")
    straight = attempt.trace
    if straight.last_step < LEAST_STEPS:
        raise UserError(
            f"the run ends after {format_count(straight.last_step, 'step')}, but a check needs {LEAST_STEPS}",
            where="loop.max_duration",
        )
    # Two runs at once on one GPU would compete for its memory.
    jobs = 2 if straight.facts["device"] == "cpu" and (os.cpu_count() or 1) > 1 else 1
    comparison = Comparison(straight)
    resumed = comparison.can_continue
    pool = ThreadPoolExecutor(jobs)
    try:
        works = [
            pool.submit(runner.chain, f"run{number}", stops, resumed=resumed)
            for number, stops in enumerate(plan_chains(steps))
        ]
        finished = [work.result() for work in works]
    finally:
        # Ctrl-C does not wait here: the processes are killed first.
        pool.shutdown(wait=False, cancel_futures=True)
    attempts = [attempt for chain in finished for attempt in chain.attempts]
    if broken := next((attempt for attempt in attempts if attempt.is_own_failure), None):
        raise broken.error()
    finding, remarks = find_failure(finished), []
    if any(map(comparison.found, finished)) or any(map(comparison.lasting, finished)):
        # A second straight run tells noise from loss: what differs between the two was not lost by a stop.
        repeat = runner.chain("repeat", notes=True)
        again = repeat.attempts[0].trace
        comparison = Comparison.with_noise(straight, again)
        difference = comparison.first(again, resumed=False, with_noise=True)
        candidates = [found_difference for chain in finished for found_difference in comparison.found(chain)]
        if difference is not None:
            finding = _find_cause(composed, runner, FoundDifference(difference, repeat, None), repeat, repeats=True)
        elif candidates:
            first = min(candidates, key=lambda candidate: candidate.difference.at_step)
            finding = _find_cause(composed, runner, first, repeat, repeats=_differs_before_saves(first))
        else:
            remarks = [
                f"{describe(value)}; it changes in training, and no checkpoint holds it. In "
                f"{format_count(steps, 'step')} no number depended on it. {advise_saving(value, straight.facts)}"
                for chain in finished[:1]
                for value in comparison.lasting(chain)
            ]
    return ResumeReport(
        name=composed.config.name or "default",
        steps=straight.last_step,
        steps_per_epoch=straight.facts["steps_per_epoch"],
        device=straight.facts["device"],
        rows=[row for chain in finished for row in comparison.rows(chain)],
        finding=finding,
        remarks=remarks,
    )


def _find_cause(
    composed: Composed, runner: Runner, shown_by: FoundDifference, repeat: Chain, *, repeats: bool
) -> Finding:
    """The cause of a difference; where more must be known for it, the processes that tell it are run."""
    difference = shown_by.difference
    data = composed.config.data
    workers = int(data.get("num_workers") or 0)
    evidence = Evidence(
        difference=difference,
        repeats=repeats,
        resumed=shown_by.stop is not None,
        calls=repeat.calls,
        workers=workers,
        facts=repeat.attempts[0].trace.facts,
    )
    # A call in the user's file explains it; only without one is it worth two more runs.
    if repeats and not any(call.asks in (Asks.chance, Asks.clock) for call in repeat.calls):
        evidence = replace(evidence, exact_if_deterministic=_is_exact(runner, "deterministic", (), deterministic=True))
    if not repeats and workers and difference.values[0].name.startswith("batch"):
        exact = _is_exact(runner, "workers", shown_by.chain.stops, data__num_workers=0)
        evidence = replace(evidence, exact_without_workers=exact)
    after = f"after a run was {title_of(shown_by.stop)}" if shown_by.stop is not None else "without any stop"
    values = difference.values[0]
    shows = f"{values.name} {values.straight} in the straight run, {values.other} here"
    if len(difference.values) > 1 or len(shows) > 100:
        shows = name_values(difference.values)
    return Finding(after, difference.at_step, difference.moment, shows, explain(evidence))


def _is_exact(runner: Runner, name: str, stops: Sequence[ProbeStop], **changes: Any) -> bool | None:
    """Whether the same, with these changes, is exact; None if it does not even train."""
    straight = runner.chain(f"{name}-straight", **changes)
    other = runner.chain(f"{name}-other", stops, **changes)
    if straight.attempts[0].failed:
        return None
    return not Comparison(straight.attempts[0].trace).found(other)


def _differs_before_saves(shown_by: FoundDifference) -> bool:
    """It differed before anything was stopped or saved, although another straight run did not."""
    if shown_by.stop is not None:
        return False
    saves = any(stop.when is StopPlace.accumulating for stop in shown_by.chain.stops)
    difference = shown_by.difference
    return not saves or difference.at_step < SAVED_STEP + (difference.kind is not TraceKind.state)
