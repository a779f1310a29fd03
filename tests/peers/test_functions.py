"""The functions that save, find and load checkpoints without a trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fake_ranks import parted, rank_of, save_as
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import Shard

from trainer_cli import (
    CheckpointError,
    UserError,
    checkpoint_path,
    latest_checkpoint,
    load_checkpoint,
    make_async_checkpointer,
    make_sync_checkpointer,
    save_checkpoint,
)
from trainer_cli.commands.command_line import main


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
    def parts(self) -> tuple[Any, Any, Any]:
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


@pytest.mark.parametrize("kind", ["empty folder", "no folder", "only partial"])
def test_without_a_checkpoint_the_error_names_the_folder(folder: Path, kind: str) -> None:
    path = folder / "checkpoints"
    if kind != "no folder":
        path.mkdir()
    if kind == "only partial":
        save(path, "step10")
        (path / "step10/manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=f"no valid checkpoint in {path}"):
        latest_checkpoint(path)


def test_a_missing_checkpoint_is_an_error_with_its_path(folder: Path) -> None:
    save(folder, "step10")
    with pytest.raises(FileNotFoundError, match=f"no valid checkpoint of epoch 3 in {folder}"):
        checkpoint_path(folder, epoch=3)
    with pytest.raises(FileNotFoundError, match=f"there is no checkpoint.*{folder / 'step30'}"):
        load_checkpoint(folder / "step30", *Training().parts)


def test_the_path_of_a_checkpoint_by_folder_epoch_and_suffix(folder: Path) -> None:
    save(folder, "step10", "step20", "step20-best")
    assert checkpoint_path(folder, epoch=1) == folder / "step10"
    assert checkpoint_path(folder, epoch=2) == folder / "step20"
    assert checkpoint_path(folder, epoch=2, suffix="best") == folder / "step20-best"
    assert checkpoint_path(folder, epoch=4, must_exist=False) == folder / "epoch4"


@pytest.mark.parametrize("groups", [1, 2])
def test_parameter_groups_are_restored(folder: Path, groups: int) -> None:
    first, second = Training(3, groups=groups), Training(1, seed=1, groups=groups)
    save_checkpoint(folder / "step3", 7, *first.parts)
    assert load_checkpoint(folder / "step3", *second.parts) == (7, {})
    assert same(second.state, first.state)


def test_a_training_is_saved_and_loaded_twice(folder: Path) -> None:
    first, second, third = Training(2), Training(seed=1), Training(seed=2)
    save_checkpoint(folder / "last", 1, *first.parts)
    load_checkpoint(folder / "last", *second.parts)
    for training in (first, second):
        training.train(5)
    save_checkpoint(folder / "last", 2, *second.parts)
    assert load_checkpoint(folder / "last", *third.parts)[0] == 2
    assert same(third.state, first.state)


def with_a_third_layer() -> Training:
    training = Training(seed=1)
    training.model.append(nn.Linear(2, 2))
    return training


@pytest.mark.parametrize(
    ("save_schedule", "into", "reason"),
    [
        (True, lambda: Training(kind=torch.optim.SGD), "Nothing was loaded"),
        (False, lambda: Training(1, seed=1), "has no lr_scheduler"),
        (True, with_a_third_layer, r"2\.weight: missing in the checkp"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(
    folder: Path, save_schedule: bool, into: Callable[[], Training], reason: str
) -> None:
    """Refused with what does not fit, and nothing is changed."""
    first, second = Training(2), into()
    save_checkpoint(folder / "step2", 1, *first.parts[: 3 if save_schedule else 2])
    before = second.state
    with pytest.raises((CheckpointError, UserError), match=reason) as caught:
        load_checkpoint(folder / "step2", *second.parts)
    assert isinstance(caught.value, ValueError)
    assert same(second.state, before)


@pytest.mark.parametrize("file", ["manifest.json", "rank0.safetensors", "rank0.json"])
def test_a_damaged_checkpoint_is_a_value_error(folder: Path, file: str) -> None:
    training = Training(2)
    save_checkpoint(folder / "step2", 1, *training.parts)
    content = bytearray((folder / "step2" / file).read_bytes())
    content[-9] ^= 1
    (folder / "step2" / file).write_bytes(content)
    before = training.state
    with pytest.raises(ValueError, match=str(folder / "step2")) as caught:
        load_checkpoint(folder / "step2", *training.parts)
    assert isinstance(caught.value, CheckpointError)
    assert same(training.state, before)


@pytest.mark.parametrize("finetune", [False, True])
def test_the_model_is_loaded_alone(folder: Path, finetune: bool) -> None:
    """The model without its optimizer, at the epoch of the checkpoint, or at 0 to train it further."""
    first, second = Training(2), Training(1, seed=1)
    save_checkpoint(folder / "step2", 3, *first.parts)
    before = second.state
    arguments = second.parts if finetune else (second.model,)
    assert cast("Any", load_checkpoint)(folder / "step2", *arguments, finetune=finetune) == (0 if finetune else 3, {})
    assert same(second.state, before | {"model": first.state["model"]})


@pytest.mark.parametrize(
    ("format", "background"),
    [(format, background) for format in ("tensors", "archive", "torch_file") for background in (False, True)],
)
def test_formats_save_whole_trainings_at_once_and_in_the_background(
    folder: Path, format: str, background: bool
) -> None:
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


def test_master_weights_are_written_in_the_background(folder: Path) -> None:
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
        saving.written.result(500)
    assert same(dict(make_sync_checkpointer().load(folder / "step2")), expected)


def test_an_export_in_several_files_has_an_index(folder: Path) -> None:
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
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def compile_eagerly(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (nn.parallel.DistributedDataParallel, "module."),
        pytest.param(compile_eagerly, "_orig_mod.", marks=pytest.mark.campaign),
    ],
)
def test_a_wrapped_model_is_loaded_into_a_plain_one(
    folder: Path, wrap: Callable[[nn.Module], Any], prefix: str
) -> None:
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


@pytest.mark.parametrize(("shape", "placements"), [((2,), (Shard(0),)), ((2, 2), (Shard(0), Shard(1)))])
def test_a_sharded_state_is_loaded_whole_and_divided_anew(
    folder: Path, shape: tuple[int, ...], placements: tuple[Shard, ...]
) -> None:
    """Parts of several ranks: whole in one process, and divided anew among others."""
    first, second = Training(2), Training(seed=1)
    save_checkpoint(folder / "whole", 4, *first.parts)
    whole = dict(make_sync_checkpointer().load(folder / "whole"))
    save_as(folder, shape, lambda mesh, rank: divided(whole, mesh, *placements), "step2")
    assert len(list((folder / "step2").glob("rank*.safetensors"))) == torch.Size(shape).numel()
    assert load_checkpoint(folder / "step2", *second.parts)[0] == 4
    assert same(second.state, first.state)
    weight = first.model.get_parameter("0.weight").detach()
    for rank in range(4):
        with rank_of(rank, (4,)) as mesh:
            part = parted(torch.zeros(4, 4), mesh, Shard(1))
            for name in ("step2", "whole"):
                part.to_local().zero_()
                make_sync_checkpointer().load(folder / name, {"model": {"0.weight": part}})
                assert torch.equal(part.to_local(), weight[:, rank : rank + 1])


def test_other_strategies_are_refused(folder: Path) -> None:
    for strategy in ("gemini", "low_level_zero", "hybrid", "moe"):
        assert main(["config", f"parallel.strategy={strategy}"]) == 2
    assert list(folder.iterdir()) == []
