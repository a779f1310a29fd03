"""Memory that runs out: a limit of the process, at a step, at the first save, and while a checkpoint is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from campaign.fault_class import FaultClass, Size, Trials
from campaign.struck_project import make_struck_project
from campaign.verdict import Outcome

HOOKS = ("on_train_batch_start", "on_save_checkpoint", "on_before_load_checkpoint", "on_validate_start")
LEFT_BYTES = (0, 8 << 20, 64 << 20)
"""What the process may still take. A step needs a hundred megabytes for a moment."""
TRIALS = tuple(product(LEFT_BYTES, HOOKS))


@contextmanager
def prepare_memory(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a limit."""
    project = make_struck_project(folder)

    def run_trial(number: int) -> Outcome:
        left_bytes, hook = TRIALS[number]
        plan = {
            "at": "hook",
            "what": "memory",
            "hook": hook,
            "step": 0 if "load" in hook else 17,
            "bytes": left_bytes,
        }
        return project.strike(folder / f"trial{number}", plan, texts=["memory"], resumes="load" in hook)

    yield Trials(min(count, len(TRIALS)), run_trial)


CLASSES = (
    FaultClass(
        key="memory",
        title="Memory runs out",
        what="The address space of the process is limited to its size plus 0, 8 or 64 MB: in a step, a save, a "
        "load or an evaluation. The message names memory, the exit code is 1.",
        promises="L1 L2 L4 L5 L6",
        counts={Size.quick: 4, Size.full: 12, Size.nightly: 12},
        prepare=prepare_memory,
        share=1.0,
    ),
)
