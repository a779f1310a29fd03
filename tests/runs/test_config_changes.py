"""The gate before a resume: what is reported of a changed config, and how it says to go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_cli.config.changes import Change, diff
from trainer_cli.config.composing import Composed, compose
from trainer_cli.errors import ConfigError
from trainer_cli.running.resume import refuse_changes

BASE = ["experiment=digits_mlp"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def old() -> Composed:
    return compose(BASE, cwd=ROOT)


def message(old: Composed, *changes: str) -> str:
    """What is reported of these changes; nothing where they may pass."""
    new = compose([*BASE, *changes], cwd=ROOT)
    return refusal(diff(old.raw, new.raw), new)


def refusal(changes: list[Change], new: Composed) -> str:
    try:
        refuse_changes(changes, new, Path("runs/x"))
    except ConfigError as error:
        return str(error)
    return ""


def way_out(text: str) -> str:
    return text.partition("add '")[2].partition("'")[0]


def test_the_table_reports_each_change_where_it_comes_from_and_whether_it_may_be(old: Composed) -> None:
    lines = message(old, "optimizer=sgd", "optimizer.lr=0.5", "~model.dropout", "loop.max_duration=30").splitlines()
    assert lines[0] == "the config differs from the one that runs/x was trained with:"
    verdicts = [line.split()[0] for line in lines[1:-1]]
    assert verdicts == ["refused"] * (len(verdicts) - 1) + ["may"]
    (lr,) = [line for line in lines if " optimizer.lr " in line]
    assert lr.split("  ")[1] == "refused"
    assert "0.003 -> 0.5" in lr
    assert lr.endswith("command line: optimizer.lr=0.5")
    (momentum,) = [line for line in lines if " optimizer.momentum " in line]
    assert "(not set) -> 0.9" in momentum
    assert momentum.endswith("configs/optimizer/sgd.yaml:5")
    (betas,) = [line for line in lines if " optimizer.betas " in line]
    assert betas.endswith("command line: optimizer=sgd")
    (dropout,) = [line for line in lines if " model.dropout " in line]
    assert dropout.endswith("command line: ~model.dropout")
    assert lines[-2].startswith("  may change (where the run ends)")


def test_a_value_of_another_type_is_a_mistake_and_no_change_to_allow(old: Composed) -> None:
    text = message(old, "optimizer.lr=fast", "seed=7")
    assert "optimizer.lr is 'fast', but it must be a number" in text
    assert "resume_allow" not in text


def test_the_ways_out_are_named(old: Composed) -> None:
    text = message(old, "optimizer.lr=0.5", "deterministic=true", "loop.log_interval=7")
    assert "add 'resume_allow=[deterministic,optimizer.lr]'. To" in text
    assert "name=OTHER" in text
    assert "ckpt=runs/x@latest" in text


def test_what_may_change_passes_in_silence(old: Composed) -> None:
    assert message(old, "loop.max_duration=30", "data.num_workers=2", "loggers=none", "device=cpu", "name=y") == ""


@pytest.mark.parametrize("change", ["optimizer.lr=0.5", "~model.dropout", "model.hidden=[8]", "data.batch_size=8"])
def test_the_way_out_that_is_named_is_one(old: Composed, change: str) -> None:
    text = message(old, change)
    assert message(old, change, way_out(text)) == ""
    assert ("To continue with parameters of the same names and shapes, add 'resume" in text) is ("model." in change)
    assert (text.index("name=OTHER") < text.index("resume_allow")) is ("model.hidden" in change)


@pytest.mark.parametrize(
    ("changes", "fixed"),
    [
        (["optimizer=sgd"], "optimizer._target_"),
        (["scheduler=null"], "scheduler"),
        (["scheduler=warmup_linear"], "scheduler._target_"),
        (["seed=3"], "seed"),
        (["seed=3", "optimizer=sgd", "model.dropout=0.1"], "seed or optimizer._target_"),
    ],
)
def test_a_change_that_no_checkpoint_fits_is_not_offered(old: Composed, changes: list[str], fixed: str) -> None:
    text = message(old, *changes)
    assert f"No checkpoint can be continued with another {fixed}. To train this as another run" in text
    assert "resume_allow" not in text


def test_a_key_that_needs_quotes_is_named_in_quotes(old: Composed) -> None:
    changes = [Change(("param_groups", "*{norm,bias}*", "lr"), 0.1, 0.2), Change(("deterministic",), False, True)]
    override = way_out(refusal(changes, old))
    assert override == 'resume_allow=["param_groups.*{norm,bias}*.lr",deterministic]'
    assert refusal(changes, compose([*BASE, override], cwd=ROOT)) == ""


def test_evaluations_may_change_unless_a_schedule_follows_them() -> None:
    plateau = "scheduler={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau}"
    by_step = "scheduler={_target_: trainer_cli.WarmupCosine, interval: evaluation}"
    for scheduler, refused in ((), False), ((plateau,), True), ((by_step,), True):
        old = compose([*BASE, "scheduler=null", *scheduler], cwd=ROOT)
        text = message(old, "scheduler=null", *scheduler, "loop.eval_interval=7")
        assert ("resume_allow=[loop.eval_interval]" in text) is refused
    assert message(old, "scheduler=null", by_step, "loop.eval_interval=7", "resume_allow=[loop.eval_interval]") == ""
    for metric, key in (("train/loss", "log_interval"), ("val/loss", "eval_interval")):
        by_metric = plateau.replace("}", f", metric: {metric}}}")
        for changed in ("log_interval", "eval_interval"):
            old = compose([*BASE, "scheduler=null", by_metric], cwd=ROOT)
            text = message(old, "scheduler=null", by_metric, f"loop.{changed}=7")
            assert (f"resume_allow=[loop.{changed}]" in text) is (changed == key)


def test_a_batch_size_may_change_where_the_samples_of_a_step_stay_the_same(old: Composed) -> None:
    fixed = ["data.global_batch_size=64"]
    before = compose([*BASE, *fixed], cwd=ROOT)
    assert message(before, *fixed, "data.batch_size=16") == ""
    assert message(before, *fixed, "data.batch_size=16", "loop.grad_accum_steps=4") == ""
    assert "resume_allow=[data.global_batch_size]" in message(before, "data.global_batch_size=32", "data.batch_size=16")
    assert "resume_allow=[data.batch_size]" in message(old, "data.batch_size=16")


def test_a_run_from_before_a_key_was_named_by_the_shipped_configs_resumes(old: Composed) -> None:
    before = old.raw
    del before["data"]["global_batch_size"]
    assert diff(before, old.raw) == []
    assert [change.key for change in diff(before, compose([*BASE, "data.global_batch_size=64"], cwd=ROOT).raw)] == [
        "data.global_batch_size"
    ]
