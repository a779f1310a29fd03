"""An exception in each hook of a callback, and in each method of a logger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from campaign.fault_class import FaultClass, Size, Trials
from campaign.struck_project import make_struck_project
from campaign.verdict import Outcome
from trainer_cli.trainer.hooks import VOCABULARY

ON_LOAD = ("on_before_load_checkpoint", "preprocess_checkpoint", "on_load_checkpoint")
"""Called where a run resumes."""
HOOKS = tuple(hook for hook in VOCABULARY if not hook.endswith("_exception"))
"""Those that a run without another error calls."""
AT_THE_START = ("pre_setup", "setup", "post_setup", "on_enter_fit", "on_fit_start", "on_enter_train", "on_train_start")
"""Called once, before the first step."""
METHODS = ("start", "log", "flush", "close")
STEP = 19
"""The hooks fail at the first call from this step on, with checkpoints of steps 8 and 16 on the disk."""


def plan_of(number: int) -> dict[str, Any]:
    """What strikes where in a trial."""
    if number < len(METHODS):
        return {"at": "logger", "what": "raise", "method": METHODS[number], "step": STEP}
    hook = HOOKS[number - len(METHODS)]
    return {"at": "hook", "what": "raise", "hook": hook, "step": 0 if hook in AT_THE_START + ON_LOAD else STEP}


@contextmanager
def prepare_hooks(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train without a fault."""
    project = make_struck_project(folder)

    def run_trial(number: int) -> Outcome:
        plan = plan_of(number)
        texts = [f"Struck: {plan['at']}"]
        return project.strike(folder / f"trial{number}", plan, texts=texts, resumes=plan.get("hook") in ON_LOAD)

    yield Trials(min(count, len(METHODS) + len(HOOKS)), run_trial)


CLASSES = (
    FaultClass(
        key="hooks",
        title="An exception in a hook or a logger",
        what="Each hook of a callback and each method of a logger raises once, late in the run. The user's error is "
        "shown, the exit code is 1.",
        promises="L1 L4 L5 L6",
        counts={Size.quick: 8, Size.full: 60, Size.nightly: 60},
        prepare=prepare_hooks,
        share=2.0,
    ),
)
