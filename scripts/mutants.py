"""How good the tests of policy, trainer, saver and replay are: each small change must make one of them fail.

    python scripts/mutants.py [policy | trainer | saver | replay | NAME …]

Each mutant is a change of one function, in a copy of the project (`mutant.py`). The tests named for it are run against
it, one file after another. Prints which mutants were killed, and by what; exit 1 if one survives. Not part of
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

from mutant import Mutant
from replay_mutants import OF_REPLAY
from saver_mutants import OF_SAVER

ROOT = Path(__file__).resolve().parents[1]
HISTORIES = "300"


# Name: function, old code, new code.
OF_POLICY = {
    "a saved step is saved again": (
        "SaveRules.why_save",
        "if facts.last_saved_step == now.step:\n    return None",
        "",
    ),
    "a step after the saved one counts as saved": (
        "SaveRules.why_save",
        "facts.last_saved_step == now.step",
        "facts.last_saved_step == now.step - 1",
    ),
    "any later step counts as saved": (
        "SaveRules.why_save",
        "facts.last_saved_step == now.step",
        "facts.last_saved_step is not None and facts.last_saved_step >= now.step - 1",
    ),
    "fixed steps are not saved": ("SaveRules.why_save", "now.step in self.fixed_steps", "False"),
    "fixed steps one late": ("SaveRules.why_save", "now.step in self.fixed_steps", "now.step - 1 in self.fixed_steps"),
    "fixed steps are ephemeral": (
        "SaveRules.why_save",
        "Decision(CheckpointKind.regular, f'fixed step {now.step}')",
        "Decision(CheckpointKind.ephemeral, f'fixed step {now.step}')",
    ),
    "fixed steps wait for training": (
        "SaveRules.why_save",
        "now.step in self.fixed_steps",
        "now.step in self.fixed_steps and occasion is not Occasion.pre_train",
    ),
    "the first moment is like any other": ("SaveRules.why_save", "occasion is Occasion.pre_train", "False"),
    "null saves after a load": ("SaveRules.why_save", "not facts.loaded", "True"),
    "null never saves before the first step": ("SaveRules.why_save", "not facts.loaded", "False"),
    "null is turned round": ("SaveRules.why_save", "not facts.loaded", "facts.loaded"),
    "pre_train counts only where nothing was loaded": (
        "SaveRules.why_save",
        "not facts.loaded if self.pre_train is None else self.pre_train",
        "not facts.loaded if self.pre_train is None else self.pre_train and (not facts.loaded)",
    ),
    "the first checkpoint is ephemeral": (
        "SaveRules.why_save",
        "Decision(CheckpointKind.regular, 'before the first step')",
        "Decision(CheckpointKind.ephemeral, 'before the first step')",
    ),
    "intervals are not saved": (
        "SaveRules.why_save",
        "self.save_interval is not None and self.save_interval.due(now)",
        "False",
    ),
    "intervals are ephemeral": (
        "SaveRules.why_save",
        "Decision(CheckpointKind.regular, str(self.save_interval))",
        "Decision(CheckpointKind.ephemeral, str(self.save_interval))",
    ),
    "intervals count at ordinary steps alone": (
        "SaveRules.why_save",
        "self.save_interval is not None and self.save_interval.due(now)",
        "self.save_interval is not None and self.save_interval.due(now) and (occasion is Occasion.step)",
    ),
    "the end is not saved": (
        "SaveRules.why_save",
        "occasion in (Occasion.final, Occasion.last_stop) and self.save_final",
        "False",
    ),
    "the end is saved always": (
        "SaveRules.why_save",
        "occasion in (Occasion.final, Occasion.last_stop) and self.save_final",
        "occasion in (Occasion.final, Occasion.last_stop)",
    ),
    "every stop is an end": (
        "SaveRules.why_save",
        "(Occasion.final, Occasion.last_stop)",
        "(Occasion.final, Occasion.stop, Occasion.last_stop)",
    ),
    "a stop at the very end is no end": (
        "SaveRules.why_save",
        "(Occasion.final, Occasion.last_stop)",
        "(Occasion.final,)",
    ),
    "the end is ephemeral": (
        "SaveRules.why_save",
        "Decision(CheckpointKind.regular, 'end of training')",
        "Decision(CheckpointKind.ephemeral, 'end of training')",
    ),
    "a requested save is not made": ("SaveRules.why_save", "facts.save_requested", "False"),
    "a requested save waits for a release": (
        "SaveRules.why_save",
        "facts.save_requested",
        "facts.save_requested and (not facts.on_hold)",
    ),
    "a requested save is ephemeral": (
        "SaveRules.why_save",
        "Decision(CheckpointKind.regular, 'requested')",
        "Decision(CheckpointKind.ephemeral, 'requested')",
    ),
    "the best are not saved": ("SaveRules.why_save", "self.keep_best is not None", "False"),
    "the best are regular": (
        "SaveRules.why_save",
        "Decision(CheckpointKind.ephemeral, merit)",
        "Decision(CheckpointKind.regular, merit)",
    ),
    "a stop is not saved": (
        "SaveRules.why_save",
        "(Occasion.stop, Occasion.last_stop)",
        "()",
    ),
    "a stop is saved always": (
        "SaveRules.why_save",
        "occasion in (Occasion.stop, Occasion.last_stop) and self.save_on_stop",
        "occasion in (Occasion.stop, Occasion.last_stop)",
    ),
    "a stop at the very end is no stop": (
        "SaveRules.why_save",
        "(Occasion.stop, Occasion.last_stop)",
        "(Occasion.stop,)",
    ),
    "a stop is regular": (
        "SaveRules.why_save",
        "Decision(CheckpointKind.ephemeral, _STOPPED)",
        "Decision(CheckpointKind.regular, _STOPPED)",
    ),
    "a hold is not heeded": (
        "SaveRules.why_save",
        "often is not None and often.due(now) and (not facts.on_hold) and (not self._cools_down(facts))",
        "often is not None and often.due(now) and (not self._cools_down(facts))",
    ),
    "a hold is turned round": (
        "SaveRules.why_save",
        "often is not None and often.due(now) and (not facts.on_hold) and (not self._cools_down(facts))",
        "often is not None and often.due(now) and facts.on_hold and (not self._cools_down(facts))",
    ),
    "there is no cooldown": (
        "SaveRules.why_save",
        "often is not None and often.due(now) and (not facts.on_hold) and (not self._cools_down(facts))",
        "often is not None and often.due(now) and (not facts.on_hold)",
    ),
    "ephemeral intervals are regular": (
        "SaveRules.why_save",
        "Decision(CheckpointKind.ephemeral, f'{often}, ephemeral')",
        "Decision(CheckpointKind.regular, f'{often}, ephemeral')",
    ),
    "ephemeral intervals are not saved": ("SaveRules.why_save", "often is not None", "False"),
    "the cooldown is one step longer": (
        "SaveRules._cools_down",
        "facts.now.step - facts.last_saved_step < cooldown",
        "facts.now.step - facts.last_saved_step <= cooldown",
    ),
    "the cooldown is one step shorter": (
        "SaveRules._cools_down",
        "facts.now.step - facts.last_saved_step < cooldown",
        "facts.now.step - facts.last_saved_step < cooldown - 1",
    ),
    "the first ephemeral cools down too": (
        "SaveRules._cools_down",
        (
            "if self.ephemeral_cooldown is None or facts.last_saved_step is None:\n"
            "    return False\n"
            "cooldown = self.ephemeral_cooldown.steps(None)\n"
            "return cooldown is not None and facts.now.step - facts.last_saved_step < cooldown"
        ),
        (
            "if self.ephemeral_cooldown is None:\n"
            "    return False\n"
            "cooldown = self.ephemeral_cooldown.steps(None)\n"
            "return cooldown is not None and facts.now.step - (facts.last_saved_step or 0) < cooldown"
        ),
    ),
    "a stop goes before a requested save": (
        "SaveRules.why_save",
        "if facts.save_requested:\n    return Decision(CheckpointKind.regular, 'requested')",
        (
            "if occasion is Occasion.stop and self.save_on_stop:\n"
            "    return Decision(CheckpointKind.ephemeral, _STOPPED)\n"
            "if facts.save_requested:\n"
            "    return Decision(CheckpointKind.regular, 'requested')"
        ),
    ),
    "the best go before a requested save": (
        "SaveRules.why_save",
        "if facts.save_requested:\n    return Decision(CheckpointKind.regular, 'requested')",
        (
            "if self.keep_best is not None and (merit := self.keep_best.why_enter(facts.metrics, "
            "facts.saved)):\n"
            "    return Decision(CheckpointKind.ephemeral, merit)\n"
            "if facts.save_requested:\n"
            "    return Decision(CheckpointKind.regular, 'requested')"
        ),
    ),
    "the ephemeral interval goes before the end": (
        "SaveRules.why_save",
        (
            "if self.save_interval is not None and self.save_interval.due(now):\n"
            "    return Decision(CheckpointKind.regular, str(self.save_interval))"
        ),
        (
            "if self.save_interval is not None and self.save_interval.due(now):\n"
            "    return Decision(CheckpointKind.regular, str(self.save_interval))\n"
            "if self.ephemeral_save_interval is not None and self.ephemeral_save_interval.due(now):\n"
            "    return Decision(CheckpointKind.ephemeral, 'often')"
        ),
    ),
    "the first moment goes before fixed steps": (
        "SaveRules.why_save",
        "if facts.last_saved_step == now.step:\n    return None",
        (
            "if facts.last_saved_step == now.step:\n"
            "    return None\n"
            "if occasion is Occasion.pre_train and self.pre_train is False:\n"
            "    return None"
        ),
    ),
    "the next save forgets fixed steps": (
        "SaveRules.next_step",
        "[step for step in self.fixed_steps if step > now.step]",
        "[]",
    ),
    "the next save is one fixed step late": ("SaveRules.next_step", "step > now.step", "step > now.step + 1"),
    "the next save may be now": ("SaveRules.next_step", "step > now.step", "step >= now.step"),
    "the next save forgets the ephemeral interval": (
        "SaveRules.next_step",
        "(self.save_interval, self.ephemeral_save_interval)",
        "(self.save_interval,)",
    ),
    "the next save is the latest": ("SaveRules.next_step", "min", "max"),
    "weights with NaN rank": (
        "BestRule.ranked",
        "checkpoint.finite and self.value(checkpoint.metrics) is not None",
        "self.value(checkpoint.metrics) is not None",
    ),
    "ties go to the older": (
        "BestRule.ranked",
        "-checkpoint.step",
        "checkpoint.step",
    ),
    "one more than count rank": ("BestRule.ranked", "self.count", "self.count + 1"),
    "NaN is no obstacle": ("BestRule.value", "value is not None and math.isfinite(value)", "value is not None"),
    "only NaN is an obstacle": ("BestRule.value", "math.isfinite(value)", "not math.isnan(value)"),
    "the worst is best": ("BestRule.loss", "self.mode is Mode.min", "self.mode is Mode.max"),
    "a tie does not enter": (
        "BestRule.why_enter",
        "self.loss(metrics) > self.loss(best[-1].metrics)",
        "self.loss(metrics) >= self.loss(best[-1].metrics)",
    ),
    "only the first of all enters": ("BestRule.why_enter", "-1", "0"),
    "all enter": ("BestRule.why_enter", "len(best) == self.count", "False"),
    "the oldest are the newest": (
        "_newest_first",
        "sorted(saved, key=attrgetter('step', 'name'), reverse=True)",
        "sorted(saved, key=attrgetter('step', 'name'))",
    ),
    "weights with NaN are counted": (
        "RetentionRules._rank_names",
        "checkpoint.finite and checkpoint.kind is CheckpointKind.regular",
        "checkpoint.kind is CheckpointKind.regular",
    ),
    "ephemerals are counted": (
        "RetentionRules._rank_names",
        "checkpoint.finite and checkpoint.kind is CheckpointKind.regular",
        "checkpoint.finite",
    ),
    "one more is counted": (
        "RetentionRules._rank_names",
        "self.max_checkpoints or 0",
        "(self.max_checkpoints or 0) + 1",
    ),
    "the newest of all may go": (
        "RetentionRules._rank_names",
        "(*ordered[:1], *islice(finite, 1), *islice(by_rule, 1))",
        "(*islice(finite, 1), *islice(by_rule, 1))",
    ),
    "the newest good one may go": (
        "RetentionRules._rank_names",
        "(*ordered[:1], *islice(finite, 1), *islice(by_rule, 1))",
        "(*ordered[:1], *islice(by_rule, 1))",
    ),
    "what a roll-back goes back to may go": (
        "RetentionRules._rank_names",
        "(*ordered[:1], *islice(finite, 1), *islice(by_rule, 1))",
        "(*ordered[:1], *islice(finite, 1))",
    ),
    "never removes": ("RetentionRules.keeps_all", "self.remove is Removal.never", "False"),
    "pins are not heeded": ("RetentionRules._why_stays", "checkpoint.pinned", "False"),
    "fixed steps go": ("RetentionRules._why_stays", "checkpoint.step in self.fixed_steps", "False"),
    "the best go": (
        "RetentionRules._why_stays",
        "self.keep_best is not None",
        "False",
    ),
    "finished ones stay": (
        "RetentionRules._why_stays",
        "checkpoint.name in ranked_names.newest",
        "checkpoint.name in ranked_names.newest or checkpoint.finished",
    ),
    "ephemerals are regular": (
        "RetentionRules._why_stays",
        "checkpoint.kind is CheckpointKind.ephemeral or not checkpoint.finite",
        "not checkpoint.finite",
    ),
    "weights with NaN stay": (
        "RetentionRules._why_stays",
        "checkpoint.kind is CheckpointKind.ephemeral or not checkpoint.finite",
        "checkpoint.kind is CheckpointKind.ephemeral",
    ),
    "the best ephemerals go": (
        "RetentionRules._why_stays",
        "if checkpoint.name in ranked_names.newest:\n    return 'final' if checkpoint.finished else 'newest'",
        (
            "if checkpoint.name in ranked_names.newest:\n"
            "    return 'final' if checkpoint.finished else 'newest'\n"
            "if checkpoint.kind is CheckpointKind.ephemeral:\n"
            "    return None"
        ),
    ),
    "keep_every keeps nothing": ("RetentionRules._why_stays", "self.keep_every is not None", "False"),
    "keep_every keeps ephemerals": (
        "RetentionRules._why_stays",
        "if checkpoint.kind is CheckpointKind.ephemeral or not checkpoint.finite:\n    return None",
        (
            "if self.keep_every is not None and _describe_if_due(self.keep_every, checkpoint):\n"
            "    return 'kept'\n"
            "if checkpoint.kind is CheckpointKind.ephemeral or not checkpoint.finite:\n"
            "    return None"
        ),
    ),
    "ephemeral_only is all_without_rule": (
        "RetentionRules._why_stays",
        "self.remove is Removal.ephemeral_only",
        "False",
    ),
    "all_without_rule is ephemeral_only": (
        "RetentionRules._why_stays",
        "self.remove is Removal.ephemeral_only",
        "True",
    ),
    "max_checkpoints keeps all": (
        "RetentionRules._why_stays",
        "_describe_newest_rank(self.max_checkpoints) if checkpoint.name in ranked_names.counted else None",
        "'all'",
    ),
    "null keeps none": ("RetentionRules._why_stays", "return 'regular'", "return None"),
    "step 0 may go": ("RetentionRules._why_stays", "checkpoint.step == 0", "False"),
    "interval steps may go": (
        "RetentionRules._why_stays",
        "self.save_interval is not None",
        "False",
    ),
    "max_checkpoints is not for all_without_rule": (
        "RetentionRules._why_stays",
        "self.max_checkpoints is not None and checkpoint.name in ranked_names.counted",
        "False",
    ),
    "all_without_rule without a number keeps all": (
        "RetentionRules._why_stays",
        (
            "if self.max_checkpoints is not None and checkpoint.name in ranked_names.counted:\n"
            "    return _describe_newest_rank(self.max_checkpoints)\n"
            "return None"
        ),
        "return 'all'",
    ),
    "what steps cannot tell goes": (
        "_describe_if_due",
        "checkpoint.progress is None and interval.steps is None",
        "False",
    ),
    "other units are read from the step": (
        "_describe_if_due",
        "checkpoint.progress or Progress(step=checkpoint.step)",
        "Progress(step=checkpoint.step)",
    ),
    "removal begins with the newest": ("RetentionRules.plan_removal", "reversed(may_go)", "may_go"),
    "removal takes what is kept": (
        "RetentionRules.plan_removal",
        "self._why_stays(checkpoint, ranked_names) is None",
        "self._why_stays(checkpoint, ranked_names) is not None",
    ),
}


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
OF_TRAINER = {
    "KeyboardInterrupt is no exception of a training": Mutant(
        "TrainingLoop._run_until_eval",
        "BaseException",
        "Exception",
        HOOKS,
    ),
    "KeyboardInterrupt is no exception of a fit": Mutant(
        "Trainer.fit",
        "BaseException",
        "Exception",
        HOOKS,
    ),
    "KeyboardInterrupt is no exception of an evaluation": Mutant(
        "exceptions_reported", "BaseException", "Exception", HOOKS
    ),
    "an exception of a hook that enters a training is not reported": Mutant(
        "TrainingLoop._run_until_eval",
        "trainer.hooks.call('on_enter_train', trainer, stack, self._train_loader, self, loop_idx)",
        (
            "try:\n"
            "    trainer.hooks.call('on_enter_train', trainer, stack, self._train_loader, self, loop_idx)\n"
            "except BaseException:\n"
            "    trainer = None\n"
            "    raise"
        ),
        HOOKS,
    ),
    "the count of a ValidationCallback is not restored": Mutant(
        "ValidationCallback.load_state_dict",
        "int(state['evaluations'])",
        "0",
        OF_COUNT,
    ),
    "the last call of a ValidationCallback is left out": Mutant(
        "ValidationCallback.run_validation",
        "is_last or trainer.sanity_checking or self._count % self.every == 0",
        "trainer.sanity_checking or self._count % self.every == 0",
        OF_COUNT,
    ),
    "the loss scale has no bounds": Mutant("LossScaler.update", "self._bounds != (None, None)", "False", OF_SCALE),
    "the first loss scale has no bounds": Mutant(
        "LossScaler.__init__",
        "min(max(_FIRST_SCALE, min_scale or 0.0), max_scale or math.inf)",
        "_FIRST_SCALE",
        OF_SCALE,
    ),
    "the steps since the loss scale grew are not restored": Mutant(
        "LossScaler.load_state_dict", "state['steps_held']", "0", OF_SCALE
    ),
    "gradients are not clipped to a norm": Mutant(
        "Precision._clip",
        "self.clip_norm is not None",
        "False",
        ("tests/trainer/test_train_step.py::test_clipping_is_of_the_whole_gradients_of_what_is_optimized",),
    ),
    "GMP misses its last step": Mutant(
        "GMP.__init__", "Schedule(start, stop, every, at_stop=True)", "Schedule(start, stop, every)", OF_SPARSITY
    ),
    "the masks of a schedule are not restored": Mutant(
        "ChangingSparsity.load_state_dict",
        "dict(state.get('changed', {}))",
        "{}",
        OF_SPARSITY,
    ),
    "means are of batches, not of samples": Mutant(
        "WeightedMeans._count", "total.add_(value, alpha=weight)", "total.add_(value, alpha=1)", OF_MEANS
    ),
    "a mean begins anew on a resume": Mutant(
        "TrainingLog.load_state_dict", "self._means.load_state_dict(state)", "", OF_MEANS
    ),
    "a mean keeps what was logged": Mutant("TrainingLog.write", "self.means.reset()", "", OF_MEANS),
    "accumulated batches weigh the same": Mutant("TrainStep.backward", "weight / self._unit", "1.0", OF_ACCUMULATION),
    "an accumulated gradient is not divided": Mutant(
        "TrainStep._divide", "foreach_div_(gradients, divisor)", "", OF_ACCUMULATION
    ),
    "the rest of an epoch makes no step": Mutant(
        "TrainingLoop._steps",
        "batch_number == batches_per_step or is_epoch_end",
        "batch_number == batches_per_step",
        OF_ACCUMULATION,
    ),
    "schedules by epochs do not step": Mutant(
        "TrainingLoop._end_epoch",
        "trainer.schedulers.step(trainer, SchedulerInterval.epoch)",
        "",
        OF_SCHEDULES,
    ),
    "schedules by evaluations do not step": Mutant(
        "evaluate",
        "trainer.schedulers.step(trainer, SchedulerInterval.evaluation, counted, all_metrics=is_all)",
        "",
        OF_SCHEDULES,
    ),
    "the patience of early stopping begins anew on a resume": Mutant(
        "EarlyStopping.load_state_dict",
        "state.get('waited', 0)",
        "0",
        ("tests/callbacks/test_exact_resume.py::test_a_resume_ends_where_going_through_ends",),
    ),
    "the number of averaged weights begins anew on a resume": Mutant(
        "SWA.load_state_dict",
        "int(state.get('count', 1))",
        "1",
        ("tests/callbacks/test_exact_resume.py::test_a_resume_ends_where_going_through_ends",),
    ),
    "random numbers are not restored": Mutant(
        "TrainingLoop.run",
        "trainer.loading.restore_rng()",
        "",
        ("tests/trainer/test_resume.py::test_a_resume_ends_bit_for_bit_where_going_through_ends",),
    ),
    "frozen norms are trained": Mutant(
        "Freezing.keep_norms",
        "for norm in self._kept:\n    norm.eval()",
        "",
        (
            "tests/trainer/test_freeze_and_compile.py::test_a_model_given_in_evaluation_mode_trains_but_for_its_frozen_norms",
        ),
    ),
}
POLICY_TESTS = ("tests/core/test_policy.py", "tests/checkpoint/test_histories.py")
MUTANTS = {
    **{name: Mutant(*fields, POLICY_TESTS) for name, fields in OF_POLICY.items()},
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
        for part in ("trainer_cli", "tests", "configs", "docs"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if not _passes(copy, *dict.fromkeys(test for name in chosen for test in MUTANTS[name].tests)):
            print("a test fails without any mutant", file=sys.stderr)
            return 2
        for name in chosen:
            mutant = MUTANTS[name]
            file, changed = mutant.change(copy)
            source = file.read_text(encoding="utf-8")
            file.write_text(changed, encoding="utf-8")
            began = time.monotonic()
            killer = _killer(copy, mutant.tests)
            file.write_text(source, encoding="utf-8")
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
