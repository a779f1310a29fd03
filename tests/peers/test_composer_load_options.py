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
from peer_claims import Claim, claims, each, try_claim

import trainer_cli as tc

STATES = ("model", "optimizer", "schedulers", "progress", "callbacks", "rng")
URLS = [f"{scheme}://my-bucket/my-run-name/my-checkpoints" for scheme in ("gcs", "sftp", "wandb")]


def check_ignored(folder: Path, patterns: list[str], ignored: list[str]) -> None:
    saved = weights(fit(2, checkpoint=saver()))
    trainer = make_trainer(seed=9)
    fresh = weights(trainer)
    trainer.load_checkpoint("checkpoints/step2", tc.LoadOptions(ignore_keys=patterns))
    assert_same(weights(trainer), {name: (fresh if name in ignored else saved)[name] for name in saved})
    assert not [name for name in ignored if torch.equal(fresh[name], saved[name])]


def check_ignored_elements(folder: Path) -> None:
    """A pattern of something else is told to match nothing; everything is loaded."""
    saved = weights(fit(2, checkpoint=saver()))
    trainer = make_trainer(seed=9)
    trainer.load_checkpoint("checkpoints/step2", tc.LoadOptions(ignore_keys=["state/optimizers/0"]))
    assert_same(weights(trainer), saved)
    with pytest.raises(tc.ConfigError, match=r"load\.states"):
        tc.LoadOptions(states=["optimizer/0"])


def check_without_progress(folder: Path) -> None:
    fit(7, checkpoint=saver())
    states = [state for state in STATES if state != "progress"]
    trainer = make_trainer(3)
    trainer.load_checkpoint("checkpoints/step7", tc.LoadOptions(states=states))
    assert trainer.progress.step == 0
    assert trainer.fit(train_loader()).step == 3


def check_random_state(folder: Path) -> None:
    """Dropout after a resume is that of the run only with the random state."""
    straight = weights(fit(10, checkpoint=saver(save_interval=5)))
    without = tc.LoadOptions(states=[state for state in STATES if state != "rng"])
    assert_same(weights(fit(10, "checkpoints/step5", seed=9, load=tc.LoadOptions(states=STATES))), straight)
    other = weights(fit(10, "checkpoints/step5", seed=9, load=without))
    assert any(not torch.equal(straight[name], value) for name, value in other.items())


def check_left_state(folder: Path, left: str) -> None:
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


def check_missing(folder: Path) -> None:
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


def check_metric_state(folder: Path) -> None:
    """Evaluating the weights of a checkpoint gives what the run reported at its step."""
    trainer = make_trainer(4, loop={"eval_interval": 2}, checkpoint=saver(save_interval=2))
    trainer.fit(train_loader(), val_loader())
    for step in (2, 4):
        path = tc.checkpoint_path("checkpoints", step=step)
        again = make_trainer(seed=9).validate(val_loader(), ckpt_path=path)
        assert again["val"]["loss"] == trainer.checkpointer.metrics(path)["val/loss"]


def check_weights_alone(folder: Path, alone: bool) -> None:
    first = fit(5, checkpoint=saver())
    load = tc.LoadOptions(states=["model"]) if alone else tc.LoadOptions()
    trainer = make_trainer(seed=9)
    trainer.load_checkpoint("checkpoints/step5", load)
    assert_same(weights(trainer), weights(first))
    assert trainer.progress.step == (0 if alone else 5)
    assert bool(trainer.checkpoint_state()["optimizer"]["state"]) is not alone


def check_saved_metrics(folder: Path) -> None:
    def finish() -> tc.FitResult:
        trainer = make_trainer(4, loop={"eval_interval": 2}, checkpoint=saver(save_interval=2))
        return trainer.fit(train_loader(), val_loader())

    reported = finish().metrics["val/loss"]
    path = tc.latest_checkpoint("checkpoints")
    assert tc.make_sync_checkpointer().metrics(path)["val/loss"] == reported
    assert finish().metrics["val/loss"] == reported


def check_other_stores(folder: Path, url: str) -> None:
    trainer = make_trainer()
    with pytest.raises(tc.UserError, match="://"):
        trainer.fit(train_loader(), ckpt_path=url)
    assert trainer.progress.step == 0


def check_strict(folder: Path, missing: bool, unexpected: bool) -> None:
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


CLAIMS: list[Claim] = [
    *claims(
        "test_checkpoint: test_ignore_params",
        check_ignored,
        {
            f"Parameters that match {patterns} keep the values of the model": (patterns, ignored)
            for patterns, ignored in (
                (["*.weight"], ["features.0.weight", "features.1.weight", "classifier.weight"]),
                (["classifier.*"], ["classifier.weight", "classifier.bias"]),
                (["classifier.weight", "classifier.bias"], ["classifier.weight", "classifier.bias"]),
                (["features*.weight"], ["features.0.weight", "features.1.weight"]),
            )
        },
    ),
    *claims(
        "test_checkpoint: test_ignore_params, list elements",
        check_ignored_elements,
        {"A pattern may name one element of a list in the state": ()},
        difference="What is loaded is named by state and by parameter: a pattern of anything else matches nothing, "
        "which is logged, and an unknown state is refused.",
    ),
    *claims(
        "test_checkpoint: test_ignore_params, timestamp",
        check_without_progress,
        {"Without the counts of the run, it starts at step 0": ()},
    ),
    *claims(
        "test_checkpoint: test_is_rng_key",
        check_random_state,
        {"The random state is known among the keys of a checkpoint": ()},
        difference="There is no function over flattened keys: the random state is the state `rng`, which is loaded or "
        "left out by name.",
    ),
    *claims(
        "test_checkpoint: test_load_ignore_keys",
        check_left_state,
        {f"{left} can be left out": (left,) for left in ("all", "rng", "callbacks", "model")},
    ),
    *claims(
        "test_checkpoint: test_load_incorrect_path",
        check_missing,
        {"A path without a checkpoint is a FileNotFoundError with the path": ()},
    ),
    *claims(
        "test_checkpoint: test_load_map",
        check_metric_state,
        {"The state of a metric of an evaluation is saved and loaded": ()},
        difference="Each evaluation computes its metrics anew from all batches, so there is no state to save; the "
        "values are in the checkpoint, and evaluating its weights gives them again.",
    ),
    *claims(
        "test_checkpoint: test_load_weights",
        check_weights_alone,
        {
            "The whole state is loaded by default": (False,),
            "The weights alone are loaded where that is wanted": (True,),
        },
    ),
    *claims(
        "test_checkpoint: test_load_weights, metrics",
        check_saved_metrics,
        {"The metrics of the saved step are in the checkpoint, and in the result of a resumed run": ()},
    ),
    *claims(
        "test_checkpoint: test_other_backends_error",
        check_other_stores,
        {f"{url} is refused before the training": (url,) for url in URLS},
    ),
    *claims(
        "test_checkpoint: test_strict_errors",
        check_strict,
        {
            f"Missing parameters {missing}, unexpected ones {unexpected}: refused unless told otherwise": (
                missing,
                unexpected,
            )
            for missing in (False, True)
            for unexpected in (False, True)
        },
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
