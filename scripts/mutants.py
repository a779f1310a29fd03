"""How good the tests of policy, trainer, saver and replay are: each small change must make one of them fail.

    python scripts/mutants.py [policy | trainer | saver | replay | NAME …]

Each mutant is one text of a file put in the place of another, in a copy of the project. The tests named for it are run
against it, one file after another. Prints which mutants were killed, and by what; exit 1 if one survives. Not part of
the suite.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from replay_mutants import OF_REPLAY
from saver_mutants import OF_SAVER

ROOT = Path(__file__).resolve().parents[1]
POLICY = "trainer_cli/policy/rules.py"
HISTORIES = "300"


class Mutant(NamedTuple):
    """A text that is once in a file, what is put in its place, and the tests (or files of tests) that must notice."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


# Name: old text, new text.
OF_POLICY = {
    "a saved step is saved again": ("        if facts.last_saved_step == now.step:\n            return None\n", ""),
    "a step after the saved one counts as saved": (
        "facts.last_saved_step == now.step:",
        "facts.last_saved_step == now.step - 1:",
    ),
    "any later step counts as saved": (
        "if facts.last_saved_step == now.step:",
        "if facts.last_saved_step is not None and facts.last_saved_step >= now.step - 1:",
    ),
    "fixed steps are not saved": ("if now.step in self.fixed_steps:", "if False:"),
    "fixed steps one late": ("if now.step in self.fixed_steps:", "if now.step - 1 in self.fixed_steps:"),
    "fixed steps are ephemeral": (
        'Decision(CheckpointKind.regular, f"fixed step {now.step}")',
        'Decision(CheckpointKind.ephemeral, f"fixed step {now.step}")',
    ),
    "fixed steps wait for training": (
        "if now.step in self.fixed_steps:",
        "if now.step in self.fixed_steps and occasion is not Occasion.pre_train:",
    ),
    "the first moment is like any other": ("if occasion is Occasion.pre_train:", "if False:"),
    "null saves after a load": ("is_due = not facts.loaded if", "is_due = True if"),
    "null never saves before the first step": ("is_due = not facts.loaded if", "is_due = False if"),
    "null is turned round": ("is_due = not facts.loaded if", "is_due = facts.loaded if"),
    "pre_train counts only where nothing was loaded": (
        "else self.pre_train\n",
        "else self.pre_train and not facts.loaded\n",
    ),
    "the first checkpoint is ephemeral": (
        'Decision(CheckpointKind.regular, "before the first step")',
        'Decision(CheckpointKind.ephemeral, "before the first step")',
    ),
    "intervals are not saved": ("if self.save_interval is not None and self.save_interval.due(now):", "if False:"),
    "intervals are ephemeral": (
        "return Decision(CheckpointKind.regular, str(self.save_interval))",
        "return Decision(CheckpointKind.ephemeral, str(self.save_interval))",
    ),
    "intervals count at ordinary steps alone": (
        "self.save_interval.due(now):\n            return",
        "self.save_interval.due(now) and occasion is Occasion.step:\n            return",
    ),
    "the end is not saved": ("if occasion in (Occasion.final, Occasion.last_stop) and self.save_final:", "if False:"),
    "the end is saved always": (
        "(Occasion.final, Occasion.last_stop) and self.save_final:",
        "(Occasion.final, Occasion.last_stop):",
    ),
    "every stop is an end": (
        "(Occasion.final, Occasion.last_stop) and",
        "(Occasion.final, Occasion.stop, Occasion.last_stop) and",
    ),
    "a stop at the very end is no end": ("(Occasion.final, Occasion.last_stop) and", "(Occasion.final,) and"),
    "the end is ephemeral": (
        'Decision(CheckpointKind.regular, "end of training")',
        'Decision(CheckpointKind.ephemeral, "end of training")',
    ),
    "a requested save is not made": ("if facts.save_requested:", "if False:"),
    "a requested save waits for a release": (
        "if facts.save_requested:",
        "if facts.save_requested and not facts.on_hold:",
    ),
    "a requested save is ephemeral": (
        'Decision(CheckpointKind.regular, "requested")',
        'Decision(CheckpointKind.ephemeral, "requested")',
    ),
    "the best are not saved": ("if self.keep_best is not None and (merit", "if False and (merit"),
    "the best are regular": (
        "return Decision(CheckpointKind.ephemeral, merit)",
        "return Decision(CheckpointKind.regular, merit)",
    ),
    "a stop is not saved": (
        "(Occasion.stop, Occasion.last_stop) and self.save_on_stop:",
        "() and self.save_on_stop:",
    ),
    "a stop is saved always": (
        "(Occasion.stop, Occasion.last_stop) and self.save_on_stop:",
        "(Occasion.stop, Occasion.last_stop):",
    ),
    "a stop at the very end is no stop": (
        "(Occasion.stop, Occasion.last_stop) and",
        "(Occasion.stop,) and",
    ),
    "a stop is regular": (
        'Decision(CheckpointKind.ephemeral, "training was stopped")',
        'Decision(CheckpointKind.regular, "training was stopped")',
    ),
    "a hold is not heeded": ("due(now) and not facts.on_hold and not self._cool", "due(now) and not self._cool"),
    "a hold is turned round": ("due(now) and not facts.on_hold and", "due(now) and facts.on_hold and"),
    "there is no cooldown": (
        "due(now) and not facts.on_hold and not self._cools_down(facts)",
        "due(now) and not facts.on_hold",
    ),
    "ephemeral intervals are regular": (
        'Decision(CheckpointKind.ephemeral, f"{often}, ephemeral")',
        'Decision(CheckpointKind.regular, f"{often}, ephemeral")',
    ),
    "ephemeral intervals are not saved": ("if often is not None and often.due(now)", "if False and often.due(now)"),
    "the cooldown is one step longer": (
        "facts.now.step - facts.last_saved_step < cooldown",
        "facts.now.step - facts.last_saved_step <= cooldown",
    ),
    "the cooldown is one step shorter": ("facts.last_saved_step < cooldown", "facts.last_saved_step < cooldown - 1"),
    "the first ephemeral cools down too": (
        "if self.ephemeral_cooldown is None or facts.last_saved_step is None:\n            return False\n"
        "        cooldown = self.ephemeral_cooldown.steps(None)\n"
        "        return cooldown is not None and facts.now.step - facts.last_saved_step < cooldown",
        "if self.ephemeral_cooldown is None:\n            return False\n"
        "        cooldown = self.ephemeral_cooldown.steps(None)\n"
        "        return cooldown is not None and facts.now.step - (facts.last_saved_step or 0) < cooldown",
    ),
    "a stop goes before a requested save": (
        "        if facts.save_requested:\n",
        "        if occasion is Occasion.stop and self.save_on_stop:\n"
        '            return Decision(CheckpointKind.ephemeral, "training was stopped")\n'
        "        if facts.save_requested:\n",
    ),
    "the best go before a requested save": (
        "        if facts.save_requested:\n",
        "        if self.keep_best is not None and (merit := self.keep_best.why_enter(facts.metrics, facts.saved)):\n"
        "            return Decision(CheckpointKind.ephemeral, merit)\n        if facts.save_requested:\n",
    ),
    "the ephemeral interval goes before the end": (
        "        if occasion in (Occasion.final, Occasion.last_stop) and self.save_final:\n",
        "        if self.ephemeral_save_interval is not None and self.ephemeral_save_interval.due(now):\n"
        '            return Decision(CheckpointKind.ephemeral, "often")\n'
        "        if occasion in (Occasion.final, Occasion.last_stop) and self.save_final:\n",
    ),
    "the first moment goes before fixed steps": (
        "        if now.step in self.fixed_steps:\n",
        "        if occasion is Occasion.pre_train and self.pre_train is False:\n            return None\n"
        "        if now.step in self.fixed_steps:\n",
    ),
    "the next save forgets fixed steps": (
        "steps = [step for step in self.fixed_steps if step > now.step]",
        "steps = []",
    ),
    "the next save is one fixed step late": ("if step > now.step]", "if step > now.step + 1]"),
    "the next save may be now": ("if step > now.step]", "if step >= now.step]"),
    "the next save forgets the ephemeral interval": (
        "intervals = (self.save_interval, self.ephemeral_save_interval)",
        "intervals = (self.save_interval,)",
    ),
    "the next save is the latest": ("return min(steps, default=None)", "return max(steps, default=None)"),
    "weights with NaN rank": ("if checkpoint.finite and self.value", "if self.value"),
    "ties go to the older": (
        "(self.loss(checkpoint.metrics), -checkpoint.step)",
        "(self.loss(checkpoint.metrics), checkpoint.step)",
    ),
    "one more than count rank": ("[: self.count]", "[: self.count + 1]"),
    "NaN is no obstacle": ("value is not None and math.isfinite(value)", "value is not None"),
    "only NaN is an obstacle": ("math.isfinite(value) else", "not math.isnan(value) else"),
    "the worst is best": ("if self.mode is Mode.min", "if self.mode is Mode.max"),
    "a tie does not enter": ("> self.loss(best[-1].metrics)", ">= self.loss(best[-1].metrics)"),
    "only the first of all enters": ("> self.loss(best[-1].metrics)", "> self.loss(best[0].metrics)"),
    "all enter": ("if len(best) == self.count and", "if False and"),
    "the oldest are the newest": ('key=attrgetter("step", "name"), reverse=True', 'key=attrgetter("step", "name")'),
    "weights with NaN are counted": (
        " if checkpoint.finite and checkpoint.kind is CheckpointKind.regular\n",
        " if checkpoint.kind is CheckpointKind.regular\n",
    ),
    "ephemerals are counted": (
        " if checkpoint.finite and checkpoint.kind is CheckpointKind.regular\n",
        " if checkpoint.finite\n",
    ),
    "one more is counted": (
        "regulars[: self.max_checkpoints or 0]",
        "regulars[: (self.max_checkpoints or 0) + 1]",
    ),
    "the newest of all may go": ("checkpoint in (*ordered[:1], *islice(finite, 1))", "checkpoint in islice(finite, 1)"),
    "the newest good one may go": ("checkpoint in (*ordered[:1], *islice(finite, 1))", "checkpoint in ordered[:1]"),
    "never removes": ("return self.remove is Removal.never", "return False"),
    "pins are not heeded": ("        if checkpoint.pinned:\n", "        if False:\n"),
    "fixed steps go": ("        if checkpoint.step in self.fixed_steps:\n", "        if False:\n"),
    "the best go": (
        "if self.keep_best is not None and checkpoint.name in ranked_names.best:",
        "if False and checkpoint.name in ranked_names.best:",
    ),
    "finished ones stay": (
        "        if checkpoint.name in ranked_names.newest:\n",
        "        if checkpoint.name in ranked_names.newest or checkpoint.finished:\n",
    ),
    "ephemerals are regular": (
        "if checkpoint.kind is CheckpointKind.ephemeral or not checkpoint.finite:\n            return None",
        "if not checkpoint.finite:\n            return None",
    ),
    "weights with NaN stay": (
        "if checkpoint.kind is CheckpointKind.ephemeral or not checkpoint.finite:\n            return None",
        "if checkpoint.kind is CheckpointKind.ephemeral:\n            return None",
    ),
    "the best ephemerals go": (
        "        if self.keep_best is not None and checkpoint.name in ranked_names.best:\n",
        "        if checkpoint.kind is CheckpointKind.ephemeral:\n            return None\n"
        "        if self.keep_best is not None and checkpoint.name in ranked_names.best:\n",
    ),
    "keep_every keeps nothing": ("if self.keep_every is not None and (named", "if False and (named"),
    "keep_every keeps ephemerals": (
        "        if checkpoint.kind is CheckpointKind.ephemeral or not checkpoint.finite:\n            return None\n",
        "        if self.keep_every is not None and _describe_if_due(self.keep_every, checkpoint):\n"
        "            return 'kept'\n"
        "        if checkpoint.kind is CheckpointKind.ephemeral or not checkpoint.finite:\n            return None\n",
    ),
    "ephemeral_only is all_without_rule": ("if self.remove is Removal.ephemeral_only:", "if False:"),
    "all_without_rule is ephemeral_only": ("if self.remove is Removal.ephemeral_only:", "if True:"),
    "max_checkpoints keeps all": (
        "return _describe_newest_rank(self.max_checkpoints) if checkpoint.name in ranked_names.counted else None",
        'return "all"',
    ),
    "null keeps none": ('                return "regular"\n', "                return None\n"),
    "step 0 may go": ("        if checkpoint.step == 0:\n", "        if False:\n"),
    "interval steps may go": (
        "if self.save_interval is not None and (named := _describe_if_due(self.save",
        "if False and (named := _describe_if_due(self.save",
    ),
    "max_checkpoints is not for all_without_rule": (
        "        if self.max_checkpoints is not None and checkpoint.name in ranked_names.counted:\n",
        "        if False:\n",
    ),
    "all_without_rule without a number keeps all": (
        "        if self.max_checkpoints is not None and checkpoint.name in ranked_names.counted:\n"
        "            return _describe_newest_rank(self.max_checkpoints)\n        return None\n",
        '        return "all"\n',
    ),
    "what steps cannot tell goes": (
        "    if checkpoint.progress is None and interval.steps is None:\n",
        "    if False:\n",
    ),
    "other units are read from the step": (
        "checkpoint.progress or Progress(step=checkpoint.step)",
        "Progress(step=checkpoint.step)",
    ),
    "removal begins with the newest": ("for checkpoint in reversed(may_go)", "for checkpoint in may_go"),
    "removal takes what is kept": (
        "if self._why_stays(checkpoint, ranked_names) is None\n        }",
        "if self._why_stays(checkpoint, ranked_names) is not None\n        }",
    ),
}


LOOP, STEP = "trainer_cli/trainer/training_loop.py", "trainer_cli/trainer/train_step.py"
PRECISION, MEANS = "trainer_cli/trainer/precision.py", "trainer_cli/outputs/metrics.py"
LOG = "trainer_cli/trainer/training_log.py"
COUNTED = "trainer_cli/callbacks/validation_callback.py"
HOOKS = ("tests/trainer/test_hooks.py::test_an_exception_is_reported_once_to_the_hook_of_its_part",)
OF_SCALE = (
    "tests/trainer/test_precision.py::test_a_dynamic_scale_stays_between_its_bounds",
    "tests/trainer/test_precision.py::test_a_scale_begins_and_doubles_as_the_config_says_and_goes_on_so",
)
OF_ACCUMULATION = ("tests/trainer/test_training_loop.py::test_accumulated_gradients_are_those_of_the_whole_batch",)
OF_MEANS = (
    "tests/trainer/test_train_step.py::test_means_are_weighted_and_know_which_batches_had_a_metric",
    "tests/trainer/test_training_loop.py::test_a_training_mean_is_over_the_samples_since_the_last_log",
    "tests/trainer/test_training_loop.py::test_the_records_of_a_resumed_run_are_those_of_one_that_went_through",
)
OF_SCHEDULES = (
    "tests/trainer/test_schedulers.py::test_a_schedule_by_epochs_steps_at_their_ends_and_goes_on_bit_for_bit",
    "tests/trainer/test_schedulers.py::test_a_plateau_is_told_the_metric_of_each_evaluation_and_goes_on_bit_for_bit",
)
OF_COUNT = (
    "tests/callbacks/test_exact_resume.py::test_a_resume_ends_where_going_through_ends",
    "tests/callbacks/test_validation_callbacks.py::test_it_is_called_every_nth_time_and_the_last",
)
OF_SPARSITY = (
    "tests/addons/sparsity/test_sparsity.py::test_gmp_has_its_sparsity_at_the_step_at_which_it_stops",
    "tests/addons/sparsity/test_sparsity.py::test_a_mask_without_a_gradient_when_it_is_due_changes_at_the_next_chance",
)
ENTERS_TRAIN = 'trainer.hooks.call("on_enter_train", trainer, stack, self._train_loader, self, loop_idx)\n'
MODES_BEGIN = """\
            try:
                with trainer.module_modes.beginning(trainer):
"""
OF_TRAINER = {
    "KeyboardInterrupt is no exception of a training": Mutant(
        LOOP,
        "            except BaseException as error:\n                with second_to(error):\n",
        "            except Exception as error:\n                with second_to(error):\n",
        HOOKS,
    ),
    "KeyboardInterrupt is no exception of a fit": Mutant(
        "trainer_cli/trainer/trainer.py",
        "except BaseException as error:",
        "except Exception as error:",
        HOOKS,
    ),
    "KeyboardInterrupt is no exception of an evaluation": Mutant(
        "trainer_cli/trainer/validation_loop.py", "except BaseException as error:", "except Exception as error:", HOOKS
    ),
    "an exception of a hook that enters a training is not reported": Mutant(
        LOOP,
        MODES_BEGIN + " " * 20 + ENTERS_TRAIN,
        " " * 12 + ENTERS_TRAIN + MODES_BEGIN,
        HOOKS,
    ),
    "the count of a ValidationCallback is not restored": Mutant(
        COUNTED,
        'self._count, self._evaluated_step = int(state["evaluations"]), None',
        "self._count, self._evaluated_step = 0, None",
        OF_COUNT,
    ),
    "the last call of a ValidationCallback is left out": Mutant(
        COUNTED, "is_due = is_last or trainer", "is_due = trainer", OF_COUNT
    ),
    "the loss scale has no bounds": Mutant(PRECISION, "if self._bounds != (None, None):", "if False:", OF_SCALE),
    "the first loss scale has no bounds": Mutant(
        PRECISION, "min(max(_FIRST_SCALE, min_scale or 0.0), max_scale or math.inf)", "_FIRST_SCALE", OF_SCALE
    ),
    "the steps since the loss scale grew are not restored": Mutant(
        PRECISION, '"_growth_tracker": state["steps_held"]', '"_growth_tracker": 0', OF_SCALE
    ),
    "gradients are not clipped to a norm": Mutant(
        PRECISION,
        "        if self.clip_norm is not None:\n",
        "        if False:\n",
        ("tests/trainer/test_train_step.py::test_clipping_is_of_the_whole_gradients_of_what_is_optimized",),
    ),
    "GMP misses its last step": Mutant(
        "trainer_cli/addons/sparsity/sparse_training.py", "every, at_stop=True)", "every)", OF_SPARSITY
    ),
    "the masks of a schedule are not restored": Mutant(
        "trainer_cli/addons/sparsity/sparse_training.py",
        'self._changed = dict(state.get("changed", {}))',
        "self._changed = {}",
        OF_SPARSITY,
    ),
    "means are of batches, not of samples": Mutant(
        MEANS, "total.add_(value, alpha=weight)", "total.add_(value, alpha=1)", OF_MEANS
    ),
    "a mean begins anew on a resume": Mutant(
        LOG, "            self._means.load_state_dict(state)\n", "            pass\n", OF_MEANS
    ),
    "a mean keeps what was logged": Mutant(LOG, "            self.means.reset()\n", "            pass\n", OF_MEANS),
    "accumulated batches weigh the same": Mutant(
        STEP, "relative_weight = weight / self._unit", "relative_weight = 1.0", OF_ACCUMULATION
    ),
    "an accumulated gradient is not divided": Mutant(
        STEP, "            foreach_div_(gradients, divisor)\n", "            pass\n", OF_ACCUMULATION
    ),
    "the rest of an epoch makes no step": Mutant(
        LOOP,
        "                if batch_number == batches_per_step or is_epoch_end:\n",
        "                if batch_number == batches_per_step:\n",
        OF_ACCUMULATION,
    ),
    "schedules by epochs do not step": Mutant(
        LOOP,
        "progress.epoch + 1, 0, 0\n        trainer.schedulers.step(trainer, SchedulerInterval.epoch)\n",
        "progress.epoch + 1, 0, 0\n",
        OF_SCHEDULES,
    ),
    "schedules by evaluations do not step": Mutant(
        "trainer_cli/trainer/evaluate.py",
        "trainer.schedulers.step(trainer, SchedulerInterval.evaluation, counted, all_metrics=is_all)",
        "pass",
        OF_SCHEDULES,
    ),
    "the patience of early stopping begins anew on a resume": Mutant(
        "trainer_cli/callbacks/early_stopping.py",
        'state.get("waited", 0)',
        "0",
        ("tests/callbacks/test_exact_resume.py::test_a_resume_ends_where_going_through_ends",),
    ),
    "the number of averaged weights begins anew on a resume": Mutant(
        "trainer_cli/callbacks/ema.py",
        'self._count = int(state.get("count", 1))',
        "self._count = 1",
        ("tests/callbacks/test_exact_resume.py::test_a_resume_ends_where_going_through_ends",),
    ),
    "random numbers are not restored": Mutant(
        LOOP,
        "        trainer.loading.restore_rng()\n",
        "",
        ("tests/trainer/test_resume.py::test_a_resume_ends_bit_for_bit_where_going_through_ends",),
    ),
    "frozen norms are trained": Mutant(
        "trainer_cli/optim/freezing.py",
        "        for norm in self._kept:\n            norm.eval()\n",
        "",
        (
            "tests/trainer/test_freeze_and_compile.py::test_a_model_given_in_evaluation_mode_trains_but_for_its_frozen_norms",
        ),
    ),
}
POLICY_TESTS = ("tests/core/test_policy.py", "tests/checkpoint/test_histories.py")
MUTANTS = {
    **{name: Mutant(POLICY, old, new, POLICY_TESTS) for name, (old, new) in OF_POLICY.items()},
    **OF_TRAINER,
    **{name: Mutant(*fields) for name, fields in (OF_SAVER | OF_REPLAY).items()},
}
GROUPS = {"policy": [*OF_POLICY], "trainer": [*OF_TRAINER], "saver": [*OF_SAVER], "replay": [*OF_REPLAY]}


def main(names: list[str]) -> int:
    chosen = [each for name in names for each in GROUPS.get(name, [name])] or [*MUTANTS]
    if unknown := set(chosen) - set(MUTANTS):
        print(f"there is no mutant called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    # Once, for all the processes that are forked below: most of the time of a test is that of its imports.
    import hydra  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("trainer_cli", "tests", "configs"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if not _passes(copy, *dict.fromkeys(test for name in chosen for test in MUTANTS[name].tests)):
            print("a test fails without any mutant", file=sys.stderr)
            return 2
        for name in chosen:
            mutant = MUTANTS[name]
            source = (copy / mutant.file).read_text()
            count = source.count(mutant.old)
            assert count == 1, f"{name}: its old text is in {mutant.file} {count} times"
            (copy / mutant.file).write_text(source.replace(mutant.old, mutant.new))
            began = time.monotonic()
            killer = _killer(copy, mutant.tests)
            (copy / mutant.file).write_text(source)
            print(f"{name:70}  {killer or 'SURVIVED'} ({time.monotonic() - began:.0f} s)", flush=True)
            if killer is None:
                survivors.append(name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    return 1 if survivors else 0


def _killer(copy: Path, tests: Iterable[str]) -> str | None:
    """The first of these tests that fails on the copy, or None."""
    return next((test for test in tests if not _passes(copy, test)), None)


def _passes(copy: Path, *tests: str) -> bool:
    """Run tests in a process of their own, which has torch and other packages already."""
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
            # Without the rewriting of asserts, which warns of packages that are imported already.
            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "--assert=plain", *tests]))
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
