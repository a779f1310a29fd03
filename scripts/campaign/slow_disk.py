"""A disk that is slow, or hangs: the run ends as the undisturbed one, and a stop is answered."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from command import Result, train

from campaign.fault_class import FaultClass, Size, Trials
from campaign.kills import COMPOSED
from campaign.oracle import HANG_S, Reference, announced_steps, make_reference, verdict_of
from campaign.trial_runs import STEPS, TRAINING, ending_of, watched
from campaign.verdict import Outcome, Verdict

DELAY_S = 0.01
STOP_S = 10.0
"""A save of fifty operations in flight, another one for the stop, and the start of a busy machine."""
SAID, SAID_S = "SIGTERM: still waiting after 5 s", 15.0
"""A run says after five seconds where it waits."""
HANGS_S = 1000.0


@contextmanager
def prepare_slow(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a fault."""
    reference = make_reference(folder, *TRAINING, disk=COMPOSED)

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        return stop_on_slow_disk(trial, reference, number)

    yield Trials(count, run_trial)


def stop_on_slow_disk(trial: Path, reference: Reference, number: int) -> Outcome:
    """Stop a run by SIGTERM while each operation of its saves is late."""
    disk = {"at": 1, "fault": "delay", "persistent": True, "delay_s": DELAY_S}
    run = trial / "run"
    with watched(*TRAINING, cwd=trial, run=run, disk=disk) as started:
        started.wait_for_moment(Random(f"slow {number}"))
        started.send(signal.SIGTERM)
        signalled = time.monotonic()
        result = started.end()
        stop_s = time.monotonic() - signalled
    if result.code not in (0, 75) or "Traceback" in result.err:
        return Outcome(Verdict.hard_fail, f"after SIGTERM {ending_of(result)}")
    if stop_s > STOP_S:
        return Outcome(Verdict.hard_fail, f"ends {stop_s:.1f} s after SIGTERM; {ending_of(result)}")
    return verdict_of(run, reference, announced_steps(result), lambda: _go_on(trial))


@contextmanager
def prepare_hung(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a fault, and count the operations of its saves."""
    reference = make_reference(folder, *TRAINING, disk=COMPOSED)
    (folder / "planned").mkdir()
    planned = train("fit", *TRAINING, cwd=folder / "planned", disk=COMPOSED).operations
    # Reads at the start would hang a start, which nothing can be done about.
    first = next(index for index, operation in enumerate(planned) if operation.startswith("mkdir .tmp.step3"))

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        at = Random(f"hung {number}").randrange(first, len(planned))
        return stop_on_hung_disk(trial, reference, at)

    # They wait for most of the time.
    yield Trials(count, run_trial, together=8)


def stop_on_hung_disk(trial: Path, reference: Reference, at: int) -> Outcome:
    """Stop a run by SIGTERM whose save hangs in an operation: it says where it waits, until it is killed."""
    disk: dict[str, Any] = {"at": at, "fault": "delay", "persistent": True, "delay_s": HANGS_S}
    run = trial / "run"
    with watched(*TRAINING, cwd=trial, run=run, disk=disk) as started:
        started.wait_until(lambda: started.last_step() >= STEPS // 2 or "waiting for" in started.stderr.read_text())
        started.send(signal.SIGTERM)
        signalled = time.monotonic()
        while started.process.poll() is None and time.monotonic() < signalled + SAID_S:
            if SAID in started.stderr.read_text():
                break
            time.sleep(0.05)
        text = started.stderr.read_text()
        has_ended, announced = started.process.poll() is not None, started.announced()
    if not has_ended and SAID not in text:
        return Outcome(Verdict.hard_fail, f"operation {at} hangs, and nothing says so {SAID_S} s after SIGTERM: {text}")
    return verdict_of(run, reference, announced, lambda: _go_on(trial))


def _go_on(trial: Path) -> Result:
    return train("fit", *TRAINING, cwd=trial, disk=COMPOSED, limit_s=HANG_S)


CLASSES = (
    FaultClass(
        key="slow_disk",
        title="Slow disk, and SIGTERM",
        what=f"Each operation of the saves takes {DELAY_S * 1000:.0f} ms longer, and SIGTERM comes at a random moment.",
        promises="L1 L4 L6",
        counts={Size.quick: 2, Size.full: 12, Size.nightly: 200},
        prepare=prepare_slow,
        share=2.0,
    ),
    FaultClass(
        key="hung_disk",
        title="Disk that hangs, SIGTERM, then `kill -9`",
        what="An operation of a save never returns. "
        "Five seconds after SIGTERM the run names the call that it waits for; it is killed.",
        promises="L1 L4 L5 L6",
        counts={Size.full: 16, Size.nightly: 100},
        prepare=prepare_hung,
        share=2.0,
    ),
)
