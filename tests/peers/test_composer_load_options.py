"""The claims of Composer's own tests about what is loaded of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from composer_training import (
    Classifier,
    assert_same,
    fit,
    make_trainer,
    saver,
    train_loader,
    val_loader,
    weights,
)

import trainer_cli as tc

STATES = ("model", "optimizer", "schedulers", "progress", "callbacks", "rng")
URLS = [f"{scheme}://my-bucket/my-run-name/my-checkpoints" for scheme in ("gcs", "sftp", "wandb")]


@pytest.mark.parametrize(
    ("patterns", "ignored"),
    [
        (["*.weight"], ["features.0.weight", "features.1.weight", "classifier.weight"]),
        (["classifier.*"], ["classifier.weight", "classifier.bias"]),
        (["classifier.weight", "classifier.bias"], ["classifier.weight", "classifier.bias"]),
        (["features*.weight"], ["features.0.weight", "features.1.weight"]),
    ],
)
def test_ignored_parameters_keep_their_values(patterns: list[str], ignored: list[str]) -> None:
    saved = weights(fit(2, checkpoint=saver()))
    trainer = make_trainer(seed=9)
    fresh = weights(trainer)
    trainer.load_checkpoint("checkpoints/step2", tc.LoadOptions(ignore_keys=patterns))
    assert_same(weights(trainer), {name: (fresh if name in ignored else saved)[name] for name in saved})
    assert not [name for name in ignored if torch.equal(fresh[name], saved[name])]


def test_a_pattern_that_matches_nothing_is_logged() -> None:
    """A pattern of something else is told to match nothing; everything is loaded."""
    saved = weights(fit(2, checkpoint=saver()))
    trainer = make_trainer(seed=9)
    trainer.load_checkpoint("checkpoints/step2", tc.LoadOptions(ignore_keys=["state/optimizers/0"]))
    assert_same(weights(trainer), saved)
    with pytest.raises(tc.ConfigError, match=r"load\.states"):
        tc.LoadOptions(states=["optimizer/0"])


def test_without_the_counts_of_the_run_it_starts_at_step_0() -> None:
    fit(7, checkpoint=saver())
    states = [state for state in STATES if state != "progress"]
    trainer = make_trainer(3)
    trainer.load_checkpoint("checkpoints/step7", tc.LoadOptions(states=states))
    assert trainer.progress.step == 0
    assert trainer.fit(train_loader()).step == 3


def test_the_random_state_is_a_state_by_name() -> None:
    """Dropout after a resume is that of the run only with the random state."""
    straight = weights(fit(10, checkpoint=saver(save_interval=5)))
    without = tc.LoadOptions(states=[state for state in STATES if state != "rng"])
    assert_same(weights(fit(10, "checkpoints/step5", seed=9, load=tc.LoadOptions(states=STATES))), straight)
    other = weights(fit(10, "checkpoints/step5", seed=9, load=without))
    assert any(not torch.equal(straight[name], value) for name, value in other.items())


@pytest.mark.parametrize("left", ["all", "rng", "callbacks", "model"])
def test_a_state_can_be_left_out_of_a_load(left: str) -> None:
    """All but one state is loaded; `all`: nothing is."""
    fit(7, None, tc.EMA(0.5), checkpoint=saver())
    saved = tc.make_sync_checkpointer().read(Path("checkpoints/step7"))
    trainer = make_trainer(callbacks=[tc.EMA(0.5)], seed=9)
    states = [state for state in STATES if state != left]
    trainer.load_checkpoint(
        "checkpoints/step7",
        tc.LoadOptions(states=["model"], ignore_keys=["*"]) if left == "all" else tc.LoadOptions(states=states),
    )
    state = trainer.checkpoint_state()
    key = "classifier.weight"
    average = state["callbacks"].get("EMA", {}).get("average", {})
    loaded = {
        "model": torch.equal(state["model"][key], saved["model"][key]),
        "progress": trainer.progress.step == 7,
        "callbacks": key in average and torch.equal(average[key], saved["callbacks"]["EMA"]["average"][key]),
        "rng": trainer.rng is not None,
    }
    assert loaded == {name: name != left and left != "all" for name in loaded}


def test_a_path_without_a_checkpoint_is_a_filenotfounderror_with_the_path() -> None:
    path = "missing/step5"
    calls: list[Callable[[], object]] = [
        lambda: fit(10, path),
        lambda: make_trainer().load_checkpoint(path),
        lambda: make_trainer().validate(val_loader(), ckpt_path=path),
        lambda: tc.load_checkpoint(path, Classifier()),
        lambda: tc.make_sync_checkpointer().read(Path(path)),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError, match=path):
            call()


def test_metrics_of_the_saved_step_are_in_checkpoint_and_result() -> None:
    def finish() -> tc.FitResult:
        trainer = make_trainer(4, loop={"eval_interval": 2}, checkpoint=saver(save_interval=2))
        return trainer.fit(train_loader(), val_loader())

    reported = finish().metrics["val/loss"]
    path = tc.latest_checkpoint("checkpoints")
    assert tc.make_sync_checkpointer().metrics(path)["val/loss"] == reported
    assert finish().metrics["val/loss"] == reported


@pytest.mark.parametrize("url", list(URLS))
def test_unknown_stores_are_refused_for_loads(url: str) -> None:
    trainer = make_trainer()
    with pytest.raises(tc.UserError, match="://"):
        trainer.fit(train_loader(), ckpt_path=url)
    assert trainer.progress.step == 0


@pytest.mark.parametrize(
    ("missing", "unexpected"), [(missing, unexpected) for missing in (False, True) for unexpected in (False, True)]
)
def test_missing_and_unexpected_parameters_are_refused(missing: bool, unexpected: bool) -> None:
    torch.manual_seed(3)
    theirs, ours = Classifier(), Classifier()
    if missing:
        del theirs.classifier.bias
        theirs.classifier.register_parameter("bias", None)
    if unexpected:
        theirs.extra = torch.nn.Linear(2, 2)
    tc.save_checkpoint("step1", 0, theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))
    if missing or unexpected:
        before = {name: value.clone() for name, value in ours.state_dict().items()}
        with pytest.raises(tc.UserError, match="|".join(["classifier.bias"] * missing + ["extra.weight"] * unexpected)):
            tc.load_checkpoint("step1", ours, finetune=True)
        assert_same(ours.state_dict(), before)
    tc.load_checkpoint("step1", ours, finetune=True, strict=not (missing or unexpected))
    common = theirs.state_dict().keys() & ours.state_dict().keys()
    assert not [name for name in common if not torch.equal(theirs.state_dict()[name], ours.state_dict()[name])]
