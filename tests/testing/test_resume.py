"""A resume check passes exact code, reports other failures, and leaves no processes or files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from exact_project import Check, WarmProbes

from trainer_cli.addons.exact import resume
from trainer_cli.addons.exact.resume import assert_resume_is_exact, check_resume
from trainer_cli.config.composing import compose
from trainer_cli.errors import TrainError, UserError

DIFFERENT = """
class Masked(Line):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def guess(self, x):
        self.seen += self.training
        return super().guess(x) + self.seen / 10
"""


@pytest.mark.parametrize(
    "accumulated",
    [
        pytest.param(1, marks=pytest.mark.campaign, id="each batch a step"),
        pytest.param(3, id="three batches a step"),
    ],
)
def test_sound_code_passes_in_every_place(accumulated: int, check: Check) -> None:
    report = check("", f"loop.grad_accum_steps={accumulated}", "data.num_workers=0", steps=12)
    assert report.exact, report
    assert [row.result for row in report.rows] == ["exact"] * 5
    assert not report.remarks
    epochs = [int(row.at.split()[3].rstrip(",")) for row in report.rows]
    batches = [int(row.at.split()[-1]) for row in report.rows]
    assert epochs[1] > 0 == epochs[0]
    assert batches[0] > 0
    assert batches[1] > 0
    assert batches[3] == 0, "at the end of an epoch"
    if accumulated > 1:
        assert batches[2] % accumulated, "inside an accumulation"


@pytest.mark.addon("auto")
@pytest.mark.campaign
def test_a_value_that_the_run_finds_is_found_once(check: Check) -> None:
    # Another process than the first would find 2: there no 4 samples fit at once.
    code = """
import os


class Changing(Line):
    def forward(self, batch):
        try:
            os.close(os.open("first", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            os.environ["IS_FIRST"] = "1"
        except FileExistsError:
            pass
        if len(batch[0]) == 4 and self.training and "IS_FIRST" not in os.environ:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(batch)
"""
    report = check(code, "model._target_=parts.Changing", "data.batch_size=auto:8", steps=6)
    assert report.exact, report


def test_a_short_check_of_a_sharded_model_stops_in_every_place_too(check: Check) -> None:
    report = check("", "parallel=fsdp", steps=6)
    assert [row.result for row in report.rows] == ["exact"] * 5


def test_a_rehearsal_is_no_difference_and_the_assertion_passes(
    project: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project("")
    monkeypatch.chdir("/")
    monkeypatch.setattr(resume, "Probes", WarmProbes)
    stopping = "+callbacks.early_stopping={_target_: trainer_cli.EarlyStopping, patience: 90ep}"
    assert_resume_is_exact("experiment=mine", stopping, "data.num_workers=0", project=folder, steps=6)


def test_a_buffer_that_is_not_saved_is_named(check: Check) -> None:
    report = check(DIFFERENT, "model._target_=parts.Masked")
    found = json.loads(json.dumps(report.as_dict()))
    assert (report.exact, found["exact"]) == (False, False)
    assert found["rows"][0]["exact"] is False
    assert found["finding"]["moment"] == "as restored, before step 2"
    assert found["finding"]["cause"]["state"] == "model.seen (not persistent)"
    assert "persistent=False" in found["finding"]["cause"]["cause"]


def test_a_save_that_changes_the_training_is_reported(check: Check) -> None:
    code = """
class Drawing(Callback):
    def on_save_checkpoint(self, trainer, state):
        torch.rand(1)
"""
    finding = check(code, "+callbacks.drawing._target_=parts.Drawing").finding
    assert finding is not None
    assert "random.torch" in finding.cause.state
    assert "it changes when a checkpoint is saved" in finding.cause.cause


def test_a_resume_that_fails_is_reported(check: Check) -> None:
    code = """
class Forgetful(Callback):
    def state_dict(self):
        return {"count": 1}

    def load_state_dict(self, state):
        state["total"]
"""
    report = check(code, "+callbacks.forgetful._target_=parts.Forgetful")
    assert not report.exact
    assert report.finding is not None
    assert "the resumed training fails: KeyError: 'total'" in report.finding.cause.cause
    assert report.rows[0].result == "fails"


def test_what_is_lost_but_changes_nothing_is_a_remark(check: Check) -> None:
    code = '''
class Counting(Callback):
    def __init__(self):
        self.steps, self.began = 0, time.time()

    def on_after_optimizer_step(self, trainer, model, optimizer):
        self.steps += 1

    def state_dict(self):
        return {"seconds": time.time() - self.began}

    def load_state_dict(self, state):
        """What is saved is for those who read the checkpoint."""
'''
    report = check(code, "+callbacks.counting._target_=parts.Counting")
    assert report.exact, report
    assert [remark.split()[0] for remark in report.remarks] == ["callbacks.counting.steps"]


def test_a_training_that_fails_by_itself_says_so_as_it_would(check: Check) -> None:
    with pytest.raises(TrainError, match="ZeroDivisionError") as failed:
        check(
            "class Broken(Line):\n    def guess(self, x):\n        return x / (1 // 0)\n", "model._target_=parts.Broken"
        )
    assert failed.value.exit_code == 1


def test_a_mistake_that_only_building_finds_keeps_its_exit_code(check: Check) -> None:
    code = "class Picky(Line):\n    def __init__(self):\n        raise ValueError('not like this')\n"
    with pytest.raises(UserError, match="not like this") as failed:
        check(code, "model._target_=parts.Picky")
    assert "train-check" not in str(failed.value)


def test_a_training_too_short_to_be_stopped_is_refused(check: Check) -> None:
    with pytest.raises(UserError, match="ends after 4 steps"):
        check("", "loop.max_duration=4st")


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UserError, match="proves nothing"):
        check_resume(compose(["experiment=digits_mlp"]), steps=5)


def test_the_helper_for_pytest_fails_with_the_table(
    project: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project(DIFFERENT)
    monkeypatch.chdir("/")
    monkeypatch.setattr(resume, "Probes", WarmProbes)
    with pytest.raises(AssertionError, match=r"stopped mid-epoch .* differs from step") as failed:
        assert_resume_is_exact("experiment=mine", "model._target_=parts.Masked", project=folder, steps=6)
    assert "cure   Register it" in str(failed.value)


def test_a_failure_of_the_check_is_named_as_its_own(check: Check) -> None:
    code = """
import collections.abc

class Odd(collections.abc.Mapping):
    def __getitem__(self, key): return 1
    def __len__(self): return 1
    def __iter__(self): raise KeyError("odd")

class Holding(Line):
    def __init__(self):
        super().__init__()
        self.table = Odd()
"""
    with pytest.raises(TrainError, match=r"check resume itself failed while it recorded .*: KeyError: 'odd'"):
        check(code, "model._target_=parts.Holding")
