"""The claims of OLMo-core's tests about its checkpointer and its distributed checkpoints."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import parted, save_as
from peer_claims import Claim, claims, each, try_claim
from safetensors.torch import load_file, save_file
from small_runs import Net, fit, make_trainer, rows
from states import same
from thread_ranks import ThreadGroup, on_ranks
from torch import nn
from torch.distributed.tensor import Shard

from trainer_cli import (
    LoadOptions,
    SaveError,
    latest_checkpoint,
    load_checkpoint,
    make_async_checkpointer,
    make_sync_checkpointer,
    save_checkpoint,
)
from trainer_cli.commands.main import main


def model_of(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def save_model(path: str | Path, seed: int = 0) -> Net:
    model = model_of(seed)
    save_checkpoint(path, 1, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def check_found_in_order(folder: Path) -> None:
    """In the order of steps as numbers; step 0 counts, and partial ones do not."""
    trainer = fit(folder, loop={"max_duration": 11}, save={"save_interval": 5, "pre_train_checkpoint": True}).trainer
    (folder / "checkpoints" / "step99").mkdir()
    rows_of = trainer.validate_all(rows(1), folder / "checkpoints" / "step*")
    assert [row.path.name for row in rows_of if row.path is not None] == ["step0", "step5", "step10", "step11"]
    assert latest_checkpoint(folder / "checkpoints").name == "step11"


def check_none_found(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no valid checkpoint"):
        latest_checkpoint(folder)


def check_saved_and_found(folder: Path, root: str) -> None:
    place = folder / "saved" if root == "local" else f"memory://{uuid.uuid4().hex}"
    for step in (9, 10):
        save_model(f"{place}/step{step}", step)
    newest = latest_checkpoint(place)
    assert newest.name == "step10"
    loaded = Net()
    load_checkpoint(newest, loaded, finetune=True)
    assert same(weights(loaded), weights(model_of(10)))


def check_two_ranks(folder: Path, background: bool) -> None:
    """Each rank writes a file of its own, and gets back what only it has."""

    def act(group: ThreadGroup) -> Any:
        make = make_async_checkpointer if background else make_sync_checkpointer
        checkpointer = make(group=group)
        state = {"model": {"w": torch.ones(3)}, "rng": torch.arange(group.rank, group.rank + 3)}
        saving = checkpointer.save(state, folder / "step2")
        if saving is not None:
            saving.raise_failure()
        loaded = checkpointer.load(latest_checkpoint(folder))
        checkpointer.close()
        return same(loaded["rng"], state["rng"]), same(loaded["model"], state["model"])

    assert on_ranks(2, act) == [(True, True), (True, True)]
    for rank in range(2):
        assert list((folder / "step2").glob(f"rank{rank}.*"))


def check_resharded(folder: Path) -> None:
    """What two ranks saved in parts is one tensor for one rank."""
    whole = torch.arange(24.0).reshape(6, 4)
    save_as(folder, (2,), lambda mesh, rank: {"model": {"w": parted(whole, mesh, Shard(0))}})
    assert same(make_sync_checkpointer().load(folder / "step1")["model"]["w"], whole)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer.bias.requires_grad_(False)


def check_frozen_parameters(folder: Path) -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.1)

    first = fit(folder, loop={"max_duration": 2}, save={}, model=Frozen, optimizer=adam).trainer
    second = make_trainer(folder, loop={"max_duration": 2}, save={}, model=Frozen, optimizer=adam)
    second.fit(rows(4))
    states = [next(iter(made.optimizers.values())).state_dict() for made in (first, second)]
    assert len(states[0]["state"]) == 1
    assert same(*states)


def check_named_keys(folder: Path) -> None:
    run = fit(folder, loop={"max_duration": 2}, save={}, val=None)
    path = folder / "checkpoints" / "step2"
    assert list(make_sync_checkpointer().load(path, {"model": None})) == ["model"]
    other = fit(
        loop={"max_duration": 1},
        fit_arguments={"ckpt_path": path, "load": LoadOptions(states=["model"], ignore_keys=["layer.bias"])},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        seed=5,
    )
    assert other.result.step == 1
    expected, got = weights(run.trainer.model), weights(other.trainer.model)
    assert same(got["layer.weight"], expected["layer.weight"])
    assert not same(got["layer.bias"], expected["layer.bias"])


def check_nothing_is_lost(folder: Path) -> None:
    """A folder without a manifest is moved aside with its files; a checkpoint is refused."""
    checkpointer = make_sync_checkpointer()
    (folder / "step1").mkdir()
    (folder / "step1" / "notes.txt").write_text("mine")
    checkpointer.save({"a": 1}, folder / "step1", overwrite=False)
    (aside,) = folder.glob(".aside.step1.*")
    assert (aside / "notes.txt").read_text() == "mine"
    with pytest.raises(SaveError, match="it is valid, so it is not replaced"):
        checkpointer.save({"a": 2}, folder / "step1", overwrite=False)
    assert checkpointer.load(folder / "step1")["a"] == 1


def export(folder: Path, format: str, output: str, *flags: str) -> int:
    return main(["ckpt", "export", str(folder / "step1"), "--format", format, "-o", str(folder / output), *flags])


def check_exported(folder: Path) -> None:
    expected = weights(save_model(folder / "step1"))
    assert export(folder, "safetensors", "a.safetensors") == 0
    assert export(folder, "torch", "a.pt") == 0
    written = torch.load(folder / "a.pt", weights_only=True)
    assert same({name: written[name] for name in expected}, expected)
    assert same({name: load_file(folder / "a.safetensors")[name] for name in expected}, expected)


def check_export_replaces_nothing(folder: Path) -> None:
    save_model(folder / "step1")
    save_file({"mine": torch.ones(1)}, folder / "a.safetensors")
    assert export(folder, "safetensors", "a.safetensors") == 2
    assert list(load_file(folder / "a.safetensors")) == ["mine"]
    assert export(folder, "safetensors", "a.safetensors", "--overwrite") == 0
    assert "mine" not in load_file(folder / "a.safetensors")


def check_average(folder: Path) -> None:
    models = [weights(save_model(folder / f"step{seed}", seed)) for seed in (1, 2, 3)]
    assert main(["ckpt", "average", str(folder / "step*"), "--output", str(folder / "mean")]) == 0
    mean = make_sync_checkpointer().load(folder / "mean")["model"]
    for name, value in mean.items():
        torch.testing.assert_close(value, torch.stack([model[name] for model in models]).mean(0))


TESTS = "distributed/checkpoint_test.py"
CLAIMS: list[Claim] = [
    *claims(
        "checkpoint.py: find_checkpoints",
        check_found_in_order,
        {"checkpoints come in the order of steps as numbers, step 0 too, and no partial ones": ()},
    ),
    *claims(
        "checkpoint.py: latest_checkpoint",
        check_none_found,
        {"a folder without checkpoints raises FileNotFoundError": ()},
    ),
    *claims(
        "checkpoint_test.py: run_checkpointer",
        check_saved_and_found,
        {"one process saves, finds the latest and loads it": ("local",)},
    ),
    *claims(
        "checkpoint_test.py: test_checkpointer_with_remote_dir",
        check_saved_and_found,
        {"the same in a remote folder": ("memory",)},
    ),
    *claims(
        "checkpoint_test.py: test_checkpointer_with_local_dir",
        check_two_ranks,
        {"two ranks write a file each, and each gets its own state back": (False,)},
    ),
    *claims(
        "checkpoint_test.py: test_async_checkpointer_with_local_dir",
        check_two_ranks,
        {"two ranks write in the background, and each gets its own state back": (True,)},
    ),
    *claims(
        f"{TESTS}: flatten_optimizer_state",
        check_frozen_parameters,
        {"the state of an optimizer that lacks frozen parameters comes back": ()},
    ),
    *claims(f"{TESTS}: load_keys, prune", check_named_keys, {"only the named keys are loaded": ()}),
    *claims(
        f"{TESTS}: save_state_dict(save_overwrite=False)",
        check_nothing_is_lost,
        {"a folder that is not empty is refused": ()},
        difference="What is no checkpoint is moved aside with a warning, so that no half-written one blocks a save.",
    ),
    *claims(
        f"{TESTS}: unshard_checkpoint",
        check_exported,
        {"a checkpoint is written as one safetensors file and as one torch file, equal to each other": ()},
    ),
    *claims(
        f"{TESTS}: unshard_checkpoint of an existing file",
        check_export_replaces_nothing,
        {"what is at the output is replaced only on demand": ()},
    ),
    *claims(
        "filesystem_test.py: test_save_and_load_torchfsdp_model_dtensors",
        check_resharded,
        {"what two ranks saved in parts loads into one": ()},
    ),
    *claims(
        "model_merger_test.py",
        check_average,
        {"the mean of checkpoints is that of each of their weights": ()},
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
