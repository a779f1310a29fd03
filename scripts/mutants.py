"""How good the tests of the policy are: each small change of a rule must make one of them fail.

    python scripts/mutants.py [NAME …]

Each mutant is one text of trainer_cli/checkpoint/policy.py put in the place of another, in a copy of the project. The
table tests are run against it, then histories. Prints which mutants were killed, and by what; exit 1 if one survives.
Not part of the suite.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
POLICY = "trainer_cli/checkpoint/policy.py"
TESTS = (["tests/checkpoint/test_policy.py"], ["tests/checkpoint/test_histories.py"])
HISTORIES = "300"

# Name: old text, new text. Each old text is there once.
MUTANTS = {
    "a saved step is saved again": ("    if at.last_saved_step == now.step:\n        return None\n", ""),
    "a step after the saved one counts as saved": (
        "at.last_saved_step == now.step:",
        "at.last_saved_step == now.step - 1:",
    ),
    "any later step counts as saved": (
        "if at.last_saved_step == now.step:",
        "if at.last_saved_step is not None and at.last_saved_step >= now.step - 1:",
    ),
    "fixed steps are not saved": ("if now.step in rules.fixed_steps:", "if False:"),
    "fixed steps one late": ("if now.step in rules.fixed_steps:", "if now.step - 1 in rules.fixed_steps:"),
    "fixed steps are ephemeral": (
        'Decision(Kind.permanent, f"fixed step {now.step}")',
        'Decision(Kind.ephemeral, f"fixed step {now.step}")',
    ),
    "fixed steps wait for training": (
        "if now.step in rules.fixed_steps:",
        "if now.step in rules.fixed_steps and occasion is not Occasion.pre_train:",
    ),
    "the first moment is like any other": ("if occasion is Occasion.pre_train:", "if False:"),
    "null saves after a load": ("wanted = not at.loaded if", "wanted = True if"),
    "null never saves before the first step": ("wanted = not at.loaded if", "wanted = False if"),
    "null is turned round": ("wanted = not at.loaded if", "wanted = at.loaded if"),
    "pre_train counts only where nothing was loaded": (
        "else rules.pre_train\n",
        "else rules.pre_train and not at.loaded\n",
    ),
    "the first checkpoint is ephemeral": (
        'Decision(Kind.permanent, "before the first step")',
        'Decision(Kind.ephemeral, "before the first step")',
    ),
    "intervals are not saved": ("if rules.save_interval is not None and rules.save_interval.due(now):", "if False:"),
    "intervals are ephemeral": (
        "return Decision(Kind.permanent, str(rules.save_interval))",
        "return Decision(Kind.ephemeral, str(rules.save_interval))",
    ),
    "intervals count at ordinary steps alone": (
        "rules.save_interval.due(now):\n        return",
        "rules.save_interval.due(now) and occasion is Occasion.step:\n        return",
    ),
    "the end is not saved": ("if occasion in (Occasion.final, Occasion.last_stop) and rules.save_final:", "if False:"),
    "the end is saved always": (
        "(Occasion.final, Occasion.last_stop) and rules.save_final:",
        "(Occasion.final, Occasion.last_stop):",
    ),
    "every stop is an end": (
        "(Occasion.final, Occasion.last_stop) and",
        "(Occasion.final, Occasion.stop, Occasion.last_stop) and",
    ),
    "a stop at the very end is no end": ("(Occasion.final, Occasion.last_stop) and", "(Occasion.final,) and"),
    "the end is ephemeral": (
        'Decision(Kind.permanent, "end of training")',
        'Decision(Kind.ephemeral, "end of training")',
    ),
    "a requested save is not made": ("if at.save_requested:", "if False:"),
    "a requested save waits for a release": ("if at.save_requested:", "if at.save_requested and not at.held:"),
    "a requested save is ephemeral": ('Decision(Kind.permanent, "requested")', 'Decision(Kind.ephemeral, "requested")'),
    "the best are not saved": ("if rules.keep_best is not None and (merit", "if False and (merit"),
    "the best are permanent": ("return Decision(Kind.ephemeral, merit)", "return Decision(Kind.permanent, merit)"),
    "a stop is not saved": (
        "(Occasion.stop, Occasion.last_stop) and rules.save_on_stop:",
        "() and rules.save_on_stop:",
    ),
    "a stop is saved always": (
        "(Occasion.stop, Occasion.last_stop) and rules.save_on_stop:",
        "(Occasion.stop, Occasion.last_stop):",
    ),
    "a stop at the very end is no stop": (
        "(Occasion.stop, Occasion.last_stop) and",
        "(Occasion.stop,) and",
    ),
    "a stop is permanent": (
        'Decision(Kind.ephemeral, "training was stopped")',
        'Decision(Kind.permanent, "training was stopped")',
    ),
    "a hold is not heeded": ("due(now) and not at.held and not _cool", "due(now) and not _cool"),
    "a hold is turned round": ("and not at.held and", "and at.held and"),
    "there is no cooldown": (" and not _cooling_down(rules, at)", ""),
    "ephemeral intervals are permanent": (
        'Decision(Kind.ephemeral, f"{often}, ephemeral")',
        'Decision(Kind.permanent, f"{often}, ephemeral")',
    ),
    "ephemeral intervals are not saved": ("if often is not None and often.due(now)", "if False and often.due(now)"),
    "the cooldown is one step longer": (
        "at.now.step - at.last_saved_step < cooldown",
        "at.now.step - at.last_saved_step <= cooldown",
    ),
    "the cooldown is one step shorter": ("at.last_saved_step < cooldown", "at.last_saved_step < cooldown - 1"),
    "the first ephemeral cools down too": (
        "at.last_saved_step is not None and at.now.step - at.last_saved_step < cooldown",
        "at.now.step - (at.last_saved_step or 0) < cooldown",
    ),
    "a stop goes before a requested save": (
        "    if at.save_requested:\n",
        "    if occasion is Occasion.stop and rules.save_on_stop:\n"
        '        return Decision(Kind.ephemeral, "training was stopped")\n    if at.save_requested:\n',
    ),
    "the best go before a requested save": (
        "    if at.save_requested:\n",
        "    if rules.keep_best is not None and (merit := rules.keep_best.why_enter(at.metrics, at.saved)):\n"
        "        return Decision(Kind.ephemeral, merit)\n    if at.save_requested:\n",
    ),
    "the ephemeral interval goes before the end": (
        "    if occasion in (Occasion.final, Occasion.last_stop) and rules.save_final:\n",
        "    if rules.ephemeral_save_interval is not None and rules.ephemeral_save_interval.due(now):\n"
        '        return Decision(Kind.ephemeral, "often")\n'
        "    if occasion in (Occasion.final, Occasion.last_stop) and rules.save_final:\n",
    ),
    "the first moment goes before fixed steps": (
        "    if now.step in rules.fixed_steps:\n",
        "    if occasion is Occasion.pre_train and rules.pre_train is False:\n        return None\n"
        "    if now.step in rules.fixed_steps:\n",
    ),
    "the next save forgets fixed steps": (
        "steps = [step for step in rules.fixed_steps if step > now.step]",
        "steps = []",
    ),
    "the next save is one fixed step late": ("if step > now.step]", "if step > now.step + 1]"),
    "the next save may be now": ("if step > now.step]", "if step >= now.step]"),
    "the next save forgets the ephemeral interval": (
        "intervals = (rules.save_interval, rules.ephemeral_save_interval)",
        "intervals = (rules.save_interval,)",
    ),
    "the next save is the latest": ("return min(steps, default=None)", "return max(steps, default=None)"),
    "weights with NaN rank": ("if one.finite and self._value", "if self._value"),
    "ties go to the older": ("(self._loss(one.metrics), -one.step)", "(self._loss(one.metrics), one.step)"),
    "one more than count rank": ("[: self.count]", "[: self.count + 1]"),
    "NaN is no obstacle": ("value is not None and math.isfinite(value)", "value is not None"),
    "only NaN is an obstacle": ("math.isfinite(value) else", "not math.isnan(value) else"),
    "the worst is best": ("if self.mode is Mode.min", "if self.mode is Mode.max"),
    "a tie does not enter": ("> self._loss(best[-1].metrics)", ">= self._loss(best[-1].metrics)"),
    "only the first of all enters": ("> self._loss(best[-1].metrics)", "> self._loss(best[0].metrics)"),
    "all enter": ("if len(best) == self.count and", "if False and"),
    "the oldest are the newest": (
        "key=lambda one: (one.step, one.name), reverse=True",
        "key=lambda one: (one.step, one.name)",
    ),
    "weights with NaN are counted": (
        "permanents = [one.name for one in good if",
        "permanents = [one.name for one in ordered if",
    ),
    "ephemerals are counted": (" if one.kind is Kind.permanent]", "]"),
    "one more is counted": ("permanents[: rules.max_checkpoints]", "permanents[: (rules.max_checkpoints or 0) + 1]"),
    "the newest of all may go": ("one in (*ordered[:1], *good[:1])", "one in good[:1]"),
    "the newest good one may go": ("one in (*ordered[:1], *good[:1])", "one in ordered[:1]"),
    "never removes": ("if rules.remove is Removal.never:", "if False:"),
    "pins are not heeded": ("    if one.pinned:\n", "    if False:\n"),
    "fixed steps go": ("    if one.step in rules.fixed_steps:\n", "    if False:\n"),
    "the best go": ("if best and rules.keep_best is not None:", "if False and rules.keep_best is not None:"),
    "finished ones stay": ("    if newest:\n", "    if newest or one.finished:\n"),
    "ephemerals are permanent": (
        "if one.kind is Kind.ephemeral or not one.finite:\n        return None",
        "if not one.finite:\n        return None",
    ),
    "weights with NaN stay": (
        "if one.kind is Kind.ephemeral or not one.finite:\n        return None",
        "if one.kind is Kind.ephemeral:\n        return None",
    ),
    "the best ephemerals go": (
        "    if best and rules.keep_best is not None:\n",
        "    if one.kind is Kind.ephemeral:\n        return None\n    if best and rules.keep_best is not None:\n",
    ),
    "keep_every keeps nothing": ("if rules.keep_every is not None and (named", "if False and (named"),
    "keep_every keeps ephemerals": (
        "    if one.kind is Kind.ephemeral or not one.finite:\n        return None\n",
        "    if rules.keep_every is not None and _names(rules.keep_every, one):\n        return 'kept'\n"
        "    if one.kind is Kind.ephemeral or not one.finite:\n        return None\n",
    ),
    "ephemeral_only is all_non_permanent": ("if rules.remove is Removal.ephemeral_only:", "if False:"),
    "all_non_permanent is ephemeral_only": ("if rules.remove is Removal.ephemeral_only:", "if True:"),
    "max_checkpoints keeps all": ("return _among(rules.max_checkpoints) if counted else None", 'return "all"'),
    "null keeps none": ('            return "permanent"\n', "            return None\n"),
    "step 0 may go": ("    if one.step == 0:\n", "    if False:\n"),
    "interval steps may go": (
        "if rules.save_interval is not None and (named := _names(rules.save",
        "if False and (named := _names(rules.save",
    ),
    "max_checkpoints is not for all_non_permanent": (
        "return _among(rules.max_checkpoints) if rules.max_checkpoints is not None and counted else None",
        "return None",
    ),
    "all_non_permanent without a number keeps all": (
        "if rules.max_checkpoints is not None and counted else None",
        "if counted else None",
    ),
    "what steps cannot tell goes": ("    if one.progress is None and interval.steps is None:\n", "    if False:\n"),
    "other units are read from the step": ("one.progress or Progress(step=one.step)", "Progress(step=one.step)"),
    "removal begins with the newest": ("for one, reason in reversed(reasons)", "for one, reason in reasons"),
    "removal takes what is kept": ("if reason is None}", "if reason is not None}"),
}


def main(names: list[str]) -> int:
    if unknown := set(names) - set(MUTANTS):
        print(f"there is no mutant called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    import torch  # noqa: F401 - once, for all the processes that are forked below

    source = (ROOT / POLICY).read_text()
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("trainer_cli", "tests", "configs"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if (killer := _killer(copy)) is not None:
            print(f"{killer} fails without any mutant", file=sys.stderr)
            return 2
        for name in names or MUTANTS:
            old, new = MUTANTS[name]
            assert source.count(old) == 1, f"{name}: its old text is there {source.count(old)} times"
            (copy / POLICY).write_text(source.replace(old, new))
            began = time.monotonic()
            killer = _killer(copy)
            print(
                f"{'survived' if killer is None else 'killed'}  {name}  ({killer}, {time.monotonic() - began:.0f} s)",
                flush=True,
            )
            if killer is None:
                survivors.append(name)
    count = len(names or MUTANTS)
    print(f"{count - len(survivors)} of {count} killed")
    return 1 if survivors else 0


def _killer(copy: Path) -> str | None:
    """The first test file that fails on the copy, or None."""
    return next((files[0] for files in TESTS if not _passes(copy, files)), None)


def _passes(copy: Path, files: list[str]) -> bool:
    """Run tests in a process of their own, which has torch already."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    status = 1
    try:
        import pytest

        os.chdir(copy)
        sys.path.insert(0, str(copy))
        sys.dont_write_bytecode = True
        os.environ.update(TRAIN_HISTORIES=HISTORIES, TRAIN_SHRINKS="no")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=no", *files]))
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
