"""A data worker that is killed, raises, leaves or hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from campaign.fault_class import FaultClass, Size, Trials
from campaign.struck_project import make_struck_project
from campaign.verdict import Outcome

WAYS = {
    "SIGKILL": ("data worker", "was killed by SIGKILL"),
    "SIGSEGV": ("data worker", "was killed by SIGSEGV"),
    "raise": ("Struck: train", "while loading sample {index} of epoch"),
    "exit": ("data worker", "ended with exit code 7"),
    "hang": ("no batch came from the data workers for 2 s",),
    "SIGSTOP": ("no batch came from the data workers for 2 s",),
}
"""What happens in the worker, and what the message holds."""
SAMPLES = (0, 77, 159)
TRIALS = tuple(product(SAMPLES, WAYS))
WORKERS = ("data.num_workers=2",)


@contextmanager
def prepare_worker_death(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a fault."""
    project = make_struck_project(folder, *WORKERS)

    def run_trial(number: int) -> Outcome:
        index, what = TRIALS[number]
        hangs = what in ("hang", "SIGSTOP")
        texts = [text.format(index=index) for text in WAYS[what]]
        plan = {"at": "train", "what": what, "index": index}
        more = ("data.worker_timeout=2s",) if hangs else ()
        return project.strike(folder / f"trial{number}", plan, *more, texts=texts)

    yield Trials(min(count, len(TRIALS)), run_trial)


CLASSES = (
    FaultClass(
        key="worker_death",
        title="A data worker dies or hangs",
        what="At one of three samples a worker is killed, crashes, raises, exits, hangs or is stopped. The message "
        "names the worker or the sample, the exit code is 1.",
        promises="L1 L2 L4 L5 L6",
        counts={Size.quick: 6, Size.full: 18, Size.nightly: 18},
        prepare=prepare_worker_death,
        share=3.0,
    ),
)
