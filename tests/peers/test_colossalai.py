"""The claims of ColossalAI: of its first functions for checkpoints, and of the tests of its checkpoint IO."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import parted, rank_of, save_as
from peer_claims import Claim, claims, each, try_claim
from torch import Tensor, distributed, nn
from torch.distributed.tensor import Shard

from trainer_cli import (
    CheckpointError,
    UserError,
    checkpoint_path,
    checkpoint_pattern,
    latest_checkpoint,
    load_checkpoint,
    make_async_checkpointer,
    make_sync_checkpointer,
    save_checkpoint,
)
from trainer_cli.commands.main import main


class Training:
    """Two layers, AdamW and a schedule, trained for some steps."""

    def __init__(self, steps: int = 0, seed: int = 0, groups: int = 1, kind: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        layers = [self.model] if groups == 1 else [*self.model]
        groups_of = [{"params": list(layer.parameters()), "lr": 0.1 / (n + 1)} for n, layer in enumerate(layers)]
        self.optimizer = kind(groups_of)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.train(steps)

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.model(torch.full((2, 4), step + 1.0)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    @property
    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        return self.model, self.optimizer, self.schedule

    @property
    def state(self) -> dict[str, Any]:
        """A copy of the whole state."""
        return copy.deepcopy({
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        })  # fmt: skip


def same(first: Any, second: Any) -> bool:
    """Whether two trees are equal, tensors bit for bit."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def save(folder: Path, *names: str) -> None:
    """Checkpoints that have a number; their epoch is a tenth of it."""
    for name in names:
        save_checkpoint(folder / name, int(name.removeprefix("step").split("-")[0]) // 10, *Training().parts)


def check_none_found(folder: Path, kind: str) -> None:
    path = folder / "checkpoints"
    if kind != "no folder":
        path.mkdir()
    if kind == "only partial":
        save(path, "step10")
        (path / "step10/manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=f"no valid checkpoint in {path}"):
        latest_checkpoint(path)


def check_missing_epoch(folder: Path) -> None:
    save(folder, "step10")
    with pytest.raises(FileNotFoundError, match=f"no valid checkpoint of epoch 3 in {folder}"):
        checkpoint_path(folder, epoch=3)
    with pytest.raises(FileNotFoundError, match=f"there is no checkpoint.*{folder / 'step30'}"):
        load_checkpoint(folder / "step30", *Training().parts)


def check_path_of_an_epoch(folder: Path) -> None:
    save(folder, "step10", "step20", "step20-best")
    assert checkpoint_path(folder, epoch=1) == folder / "step10"
    assert checkpoint_path(folder, epoch=2) == folder / "step20"
    assert checkpoint_path(folder, epoch=2, suffix="best") == folder / "step20-best"


def check_path_before_the_save(folder: Path) -> None:
    path = checkpoint_path(folder, step=30, suffix="best", must_exist=False)
    assert path == folder / "step30-best"
    save_checkpoint(path, 3, *Training().parts)
    assert checkpoint_path(folder, epoch=3) == path
    with pytest.raises(ValueError, match="must_exist=False needs the step"):
        checkpoint_path(folder, epoch=4, must_exist=False)


def check_empty_suffix(folder: Path) -> None:
    save(folder, "step10", "step20")
    assert checkpoint_path(folder, epoch=1, suffix="") == checkpoint_path(folder, epoch=1)
    assert latest_checkpoint(folder, suffix="") == folder / "step20"
    assert checkpoint_path(folder, step=30, suffix="", must_exist=False) == folder / "step30"
    assert checkpoint_pattern("") == checkpoint_pattern()


def check_latest(folder: Path, names: tuple[str, ...], suffix: str | None, latest: str) -> None:
    save(folder, *names)
    assert latest_checkpoint(folder, suffix) == folder / latest


def check_pattern(folder: Path) -> None:
    names = ["step9", "step10", "step10-best", "step10.bak", "epoch10"]
    assert fnmatch.filter(names, checkpoint_pattern()) == ["step9", "step10"]
    assert fnmatch.filter(names, checkpoint_pattern("best")) == ["step10-best"]


def check_restored(folder: Path, groups: int) -> None:
    first, second = Training(3, groups=groups), Training(1, seed=1, groups=groups)
    save_checkpoint(folder / "step3", 7, *first.parts)
    assert load_checkpoint(folder / "step3", *second.parts) == (7, {})
    assert same(second.state, first.state)


def check_restored_twice(folder: Path) -> None:
    first, second, third = Training(2), Training(seed=1), Training(seed=2)
    save_checkpoint(folder / "last", 1, *first.parts)
    load_checkpoint(folder / "last", *second.parts)
    for training in (first, second):
        training.train(5)
    save_checkpoint(folder / "last", 2, *second.parts)
    assert load_checkpoint(folder / "last", *third.parts)[0] == 2
    assert same(third.state, first.state)


def check_refused(folder: Path, save_schedule: bool, into: Callable[[], Training], reason: str) -> None:
    """Refused with what does not fit, and nothing is changed."""
    first, second = Training(2), into()
    save_checkpoint(folder / "step2", 1, *first.parts[: 3 if save_schedule else 2])
    before = second.state
    with pytest.raises((CheckpointError, UserError), match=reason):
        load_checkpoint(folder / "step2", *second.parts)
    assert same(second.state, before)


def with_a_third_layer() -> Training:
    training = Training(seed=1)
    training.model.append(nn.Linear(2, 2))
    return training


def check_what_both_have(folder: Path) -> None:
    first, second = Training(2), with_a_third_layer()
    save_checkpoint(folder / "step2", 1, *first.parts)
    third = second.model[2].weight.detach().clone()
    load_checkpoint(folder / "step2", second.model, strict=False)
    assert same(first.model.state_dict(), {name: second.model.state_dict()[name] for name in first.state["model"]})
    assert torch.equal(second.model[2].weight, third)


def check_loaded_alone(folder: Path, finetune: bool) -> None:
    """The model without its optimizer, at the epoch of the checkpoint, or at 0 to train it further."""
    first, second = Training(2), Training(1, seed=1)
    save_checkpoint(folder / "step2", 3, *first.parts)
    before = second.state
    arguments = second.parts if finetune else (second.model,)
    assert load_checkpoint(folder / "step2", *arguments, finetune=finetune) == (0 if finetune else 3, {})
    assert same(second.state, before | {"model": first.state["model"]})


def check_further_things(folder: Path) -> None:
    things = {"best": 0.25, "history": [1, 2], "mean": torch.ones(2)}
    save_checkpoint(folder / "step1", 1, *Training().parts, **things)
    epoch, rest = load_checkpoint(folder / "step1", *Training().parts)
    assert epoch == 1
    assert same(rest, things)


def check_saved_twice(folder: Path) -> None:
    for steps in (1, 2):
        save_checkpoint(folder / "last", steps, *Training(steps).parts)
    second = Training(seed=1)
    assert load_checkpoint(folder / "last", *second.parts)[0] == 2
    assert same(second.state, Training(2).state)


def check_checkpointer(folder: Path, format: str, background: bool) -> None:
    first, second = Training(3, groups=2), Training(1, seed=1, groups=2)
    state = first.state
    make: Any = make_async_checkpointer if background else make_sync_checkpointer
    with closing(make(format=format)) as checkpointer:
        checkpointer.save(state, folder / "step3")
        # What is trained while a thread writes is not in the checkpoint.
        for value in state["model"].values():
            value.zero_()
    loaded = make_sync_checkpointer().load(folder / "step3")
    assert same(dict(loaded), first.state)
    second.model.load_state_dict(loaded["model"])
    second.optimizer.load_state_dict(loaded["optimizer"])
    second.schedule.load_state_dict(loaded["schedule"])
    assert same(second.state, first.state)


def check_master_weights(folder: Path) -> None:
    training = Training(2)
    state = {
        "model": {name: value.bfloat16() for name, value in training.state["model"].items()},
        "master": training.state["model"],
        "optimizer": training.state["optimizer"],
    }
    expected = copy.deepcopy(state)
    with closing(make_async_checkpointer()) as checkpointer:
        saving = checkpointer.save(state, folder / "step2")
        state["master"]["0.weight"].zero_()
        assert saving is not None
        saving.written.result(60)
    assert same(dict(make_sync_checkpointer().load(folder / "step2")), expected)


def check_shards_of_a_model(folder: Path) -> None:
    first, second = Training(2), Training(seed=1)
    save_checkpoint(folder / "step2", 1, *first.parts)
    export = ["--format", "huggingface", "--shard-size", "64", "--output", "exported"]
    assert main(["ckpt", "export", str(folder / "step2"), *export]) == 0
    assert (folder / "exported/model.safetensors.index.json").is_file()
    assert len(list((folder / "exported").glob("model-*.safetensors"))) > 1
    load_checkpoint(folder / "exported", second.model, finetune=True)
    assert same(second.model.state_dict(), first.model.state_dict())


@contextmanager
def process_group_of_one() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def compile_eagerly(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def check_wrapped_model(folder: Path, wrap: Callable[[nn.Module], Any], prefix: str) -> None:
    """Saved from a wrapped model, by this program and by torch, and loaded into a plain one."""
    first, second, third = Training(2), Training(seed=1), Training(seed=1)
    with process_group_of_one():
        wrapped = wrap(first.model)
        assert all(name.startswith(prefix) for name in wrapped.state_dict())
        save_checkpoint(folder / "step2", 1, wrapped, *first.parts[1:])
        torch.save(wrapped.state_dict(), folder / "weights.pt")
    load_checkpoint(folder / "step2", *second.parts)
    assert same(second.state, first.state)
    load_checkpoint(folder / "weights.pt", third.model, finetune=True)
    assert same(third.model.state_dict(), first.model.state_dict())


def divided(tree: Any, mesh: Any, *placements: Shard) -> Any:
    """A tree whose matrices are one rank's parts."""
    if isinstance(tree, Mapping):
        return {key: divided(value, mesh, *placements) for key, value in tree.items()}
    return parted(tree, mesh, *placements) if isinstance(tree, Tensor) and tree.ndim == 2 else tree


def check_sharded_state(folder: Path, shape: tuple[int, ...], placements: tuple[Shard, ...]) -> None:
    """Parts of several ranks: whole in one process, and divided anew among others."""
    first, second = Training(2), Training(seed=1)
    save_checkpoint(folder / "whole", 4, *first.parts)
    whole = dict(make_sync_checkpointer().load(folder / "whole"))
    save_as(folder, shape, lambda mesh, rank: divided(whole, mesh, *placements), "step2")
    assert len(list((folder / "step2").glob("rank*.safetensors"))) == torch.Size(shape).numel()
    assert load_checkpoint(folder / "step2", *second.parts)[0] == 4
    assert same(second.state, first.state)
    weight = first.model[0].weight.detach()
    for rank in range(4):
        with rank_of(rank, (4,)) as mesh:
            part = parted(torch.zeros(4, 4), mesh, Shard(1))
            for name in ("step2", "whole"):
                part.to_local().zero_()
                make_sync_checkpointer().load(folder / name, {"model": {"0.weight": part}})
                assert torch.equal(part.to_local(), weight[:, rank : rank + 1])


def check_unknown_strategy(folder: Path) -> None:
    for strategy in ("gemini", "low_level_zero", "hybrid", "moe"):
        assert main(["config", f"parallel.strategy={strategy}"]) == 2
    assert list(folder.iterdir()) == []


OLD = "utils.checkpointing"
GENERAL = "test_general_checkpoint_io"

CLAIMS: list[Claim] = [
    *claims(
        f"{OLD}: get_latest_checkpoint_path, FileNotFoundError",
        check_none_found,
        {f"{kind}: an error with the folder": (kind,) for kind in ("empty folder", "no folder", "only partial")},
    ),
    *claims(
        f"{OLD}: load_checkpoint, FileNotFoundError",
        check_missing_epoch,
        {"a checkpoint that is not there: an error with its path": ()},
    ),
    *claims(
        f"{OLD}: get_checkpoint_path",
        check_path_of_an_epoch,
        {"the path of a checkpoint by folder, epoch and suffix": ()},
    ),
    *claims(f"{OLD}: get_checkpoint_path", check_empty_suffix, {"an empty suffix is none": ()}),
    *claims(
        f"{OLD}: get_checkpoint_path",
        check_path_before_the_save,
        {"the path of a checkpoint that is still to be saved": ()},
        difference="It is made from the step, not the epoch, because checkpoints are named by their steps.",
    ),
    *claims(
        f"{OLD}: get_latest_checkpoint_path",
        check_latest,
        {
            "the newest by number: 10 after 9": (("step9", "step10"), None, "step10"),
            "only those with the suffix": (("step10-ema", "step20"), "ema", "step10-ema"),
        },
    ),
    *claims(
        f"{OLD}: get_latest_checkpoint_pattern",
        check_pattern,
        {"a pattern that matches the names, with or without a suffix": ()},
        difference="It is a glob, for the commands and methods that take one, and not a regular expression.",
    ),
    *claims(
        f"{OLD}: load_checkpoint",
        check_loaded_alone,
        {"without an optimizer: the model and the epoch": (False,), "finetune: the model alone, from epoch 0": (True,)},
    ),
    *claims(
        f"{OLD}: load_checkpoint, ValueError",
        check_refused,
        {
            "an optimizer of another kind": (True, lambda: Training(kind=torch.optim.SGD), "Nothing was loaded"),
            "a schedule, where none was saved": (False, lambda: Training(1, seed=1), "has no lr_scheduler"),
            "strict: a layer that only the model has": (True, with_a_third_layer, r"2\.weight: missing in the checkp"),
        },
    ),
    *claims(f"{OLD}: load_checkpoint, strict", check_what_both_have, {"not strict: what both have is loaded": ()}),
    *claims(f"{OLD}: save_checkpoint, kwargs", check_further_things, {"further things come back": ()}),
    *claims(f"{OLD}: save_checkpoint", check_saved_twice, {"a second save to a path replaces the first": ()}),
    *claims(
        f"{GENERAL}: test_unsharded_checkpoint",
        check_checkpointer,
        {
            f"{format} {'in the background' if background else 'at once'}: model, optimizer and schedule": (
                format, background,
            )
            for format in ("tensors", "archive", "torch_file")
            for background in (False, True)
        },
    ),
    *claims(
        f"{GENERAL}: test_unsharded_checkpoint_multiple_param_groups",
        check_restored,
        {f"parameter groups: {groups}": (groups,) for groups in (1, 2)},
    ),
    *claims(
        f"{GENERAL}: test_sharded_model_checkpoint",
        check_shards_of_a_model,
        {"a model in files of a largest size with an index": ()},
    ),
    *claims(
        f"{GENERAL}: test_sharded_optimizer_checkpoint",
        check_restored_twice,
        {"saved, loaded, trained for five steps, saved and loaded again": ()},
    ),
    *claims(
        "test_safetensors_async_io",
        check_master_weights,
        {"master weights and optimizer state written in the background": ()},
    ),
    *claims(
        "test_torch_ddp_checkpoint_io",
        check_wrapped_model,
        {"a model in DDP is loaded into a plain one": (nn.parallel.DistributedDataParallel, "module.")},
    ),
    *claims(
        "test_torch_ddp_checkpoint_io",
        check_wrapped_model,
        {"a compiled model is loaded into a plain one": (compile_eagerly, "_orig_mod.")},
        is_long=True,
    ),
    *claims(
        "test_torch_fsdp_checkpoint_io",
        check_sharded_state,
        {"the state of two ranks is loaded in one process": ((2,), (Shard(0),))},
    ),
    *claims(
        "legacy: test_checkpoint_1d, _2d, _2p5d, _3d",
        check_sharded_state,
        {"a tensor-parallel state is whole when saved, and divided when loaded": ((2, 2), (Shard(0), Shard(1)))},
        difference="Each rank saves its part, and any number of ranks reads what it needs: there is no gathering.",
    ),
    *claims(
        "test_gemini_checkpoint_io, test_low_level_zero_checkpoint_io, test_hybrid_…, test_moe_…",
        check_unknown_strategy,
        {"a plugin of its own kind of parallelism saves and loads": ()},
        difference="Models are sharded by fsdp and tensor parallelism here; other names are refused with the list.",
    ),
]  # fmt: skip


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
