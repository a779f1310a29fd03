"""Saves, loads and futures of checkpointers without a trainer, and their parts."""

from __future__ import annotations

import functools
import inspect
import shutil
import tempfile
import threading
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpointer_states import CLASSES, MAKERS, WAIT_S, Writer, assert_same, closing, save, state_of
from small_parts import present
from states import same
from thread_ranks import ThreadGroup, on_ranks
from torch import nn

from trainer_cli import (
    AsyncCheckpointer,
    Checkpointer,
    SaveError,
    SyncCheckpointer,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from trainer_cli.checkpoint.snapshot import CopyStager, LiveStager
from trainer_cli.errors import UserError


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_saved_tree_comes_back(folder: Path, kind: str) -> None:
    with closing(MAKERS[kind]()) as checkpointer:
        saving = checkpointer.save(state_of(), folder / "step1")
        assert (saving is None) == (kind == "sync")
        if saving is not None:
            saving.written.result(WAIT_S)
        assert_same(dict(checkpointer.load(folder / "step1")), state_of())


@pytest.mark.parametrize("argument", ["hook_arg"])
def test_a_commit_hook_gets_the_path_alone(folder: Path, argument: str) -> None:
    with pytest.raises(TypeError, match=argument):
        cast("Any", make_sync_checkpointer()).save(state_of(), folder / "step1", **{argument: 3})
    assert not list(folder.iterdir())


def test_a_failed_write_is_raised_by_its_future(folder: Path) -> None:
    checkpointer = AsyncCheckpointer(writer=Writer(RuntimeError("Write failed")))
    staged, written = present(checkpointer.save(state_of(), folder / "step1"))
    assert staged.result(WAIT_S) is None
    with pytest.raises(RuntimeError, match="Write failed"):
        written.result(WAIT_S)
    with pytest.raises(SaveError, match="Write failed"):
        checkpointer.close()


@pytest.mark.parametrize("count", [2, 3])
def test_saves_come_one_after_another(folder: Path, count: int) -> None:
    with closing(make_async_checkpointer()) as checkpointer:
        saves = []
        for seed in range(count):
            saves.append(present(checkpointer.save(state_of(seed), folder / f"step{seed}")))
            assert all(before.written.done() for before in saves[:-1])
    for seed in range(count):
        assert_same(dict(make_sync_checkpointer().load(folder / f"step{seed}")), state_of(seed))


def test_close_may_be_called_twice(folder: Path) -> None:
    for make in MAKERS.values():
        checkpointer = make()
        save(checkpointer, state_of(), folder / "step1")
        checkpointer.close()
        checkpointer.close()


def test_torch_load_of_the_written_file_gives_the_tensors(folder: Path) -> None:
    save(make_sync_checkpointer(format="torch_file"), state_of(), folder / "step1")
    saved = torch.load(folder / "step1" / "rank0.pt", weights_only=True)
    assert_same(saved["tensors"]["model/layer.weight"], state_of()["model"]["layer.weight"])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_makers_need_no_arguments(kind: str) -> None:
    with closing(MAKERS[kind]()) as checkpointer:
        assert isinstance(checkpointer, Checkpointer)
        assert type(checkpointer) is CLASSES[kind]


@pytest.mark.parametrize(
    ("format", "files"),
    [("tensors", ("rank0.json", "rank0.safetensors")), ("torch_file", ("rank0.pt",)), ("archive", ("rank0.tar",))],
)
def test_files_are_where_the_manual_says(folder: Path, format: str, files: tuple[str, ...]) -> None:
    save(make_sync_checkpointer(format=format), state_of(), folder / "step1")
    assert sorted(path.name for path in (folder / "step1").iterdir()) == ["manifest.json", *files]


def test_a_module_state_dict_is_saved_as_it_is(folder: Path) -> None:
    module = torch.nn.Linear(2, 2)
    state = module.state_dict()
    assert isinstance(state, OrderedDict)
    assert hasattr(state, "_metadata")
    save(make_sync_checkpointer(), state, folder / "step1")
    other = torch.nn.Linear(2, 2)
    other.load_state_dict(make_sync_checkpointer().load(folder / "step1"))
    assert_same(other.state_dict(), state)


@pytest.mark.parametrize("argument", ["config", "rank_info", "write_barrier_timeout_secs"])
def test_options_of_torchs_own_parts_are_refused(argument: str) -> None:
    with pytest.raises(TypeError, match=argument):
        cast("Any", make_sync_checkpointer)(**{argument: 3})


def test_ranks_need_no_barrier(folder: Path) -> None:
    """Each of two ranks saves its part of one checkpoint, which is committed once both have written."""

    def act(group: ThreadGroup) -> Any:
        checkpointer = make_sync_checkpointer(group=group)
        checkpointer.save({"shared": torch.ones(2), "rng": torch.tensor(group.rank)}, folder / "step1")
        return checkpointer.load(folder / "step1")["rng"].item()

    assert on_ranks(2, act) == [0, 1]
    with pytest.raises(TypeError, match="barrier"):
        cast("Any", make_sync_checkpointer)(barrier=object())


def test_the_state_may_be_changed_once_it_is_staged(folder: Path) -> None:
    state, expected = state_of(), state_of()
    with closing(make_async_checkpointer()) as checkpointer:
        staged, written = present(checkpointer.save(state, folder / "step1"))
        staged.result(WAIT_S)
        state["model"]["layer.weight"].zero_()
        state["optimizer"]["param_groups"][0]["lr"] = 9.0
        written.result(WAIT_S)
        assert_same(dict(checkpointer.load(folder / "step1")), expected)


def test_a_stager_may_be_given(folder: Path) -> None:
    with closing(AsyncCheckpointer(stager=LiveStager())) as checkpointer:
        assert present(checkpointer.save(state_of(), folder / "step1")).written.done(), (
            "without a copy it is written at once"
        )
    with closing(AsyncCheckpointer(stager=CopyStager(available=lambda: 1 << 30))) as checkpointer:
        save(checkpointer, state_of(), folder / "step2")
        assert checkpointer.stager.held_bytes > 0


def test_one_stager_takes_different_states_in_turn(folder: Path) -> None:
    stager = CopyStager()
    states = [state_of(1), {"other": torch.arange(100)}, state_of(2)]
    with closing(AsyncCheckpointer(stager=stager)) as checkpointer:
        for step, state in enumerate(states):
            save(checkpointer, state, folder / f"step{step}")
        for step, state in enumerate(states):
            assert_same(dict(checkpointer.load(folder / f"step{step}")), state)


def writer_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "checkpoint-writer"}


def test_the_writer_thread_lives_until_close(folder: Path) -> None:
    before = writer_threads()
    checkpointer = make_async_checkpointer()
    save(checkpointer, state_of(), folder / "step1")
    (thread,) = writer_threads() - before
    assert thread.is_alive()
    checkpointer.close()
    assert not thread.is_alive()


def test_the_state_may_be_a_result_that_comes_later(folder: Path) -> None:
    future: Future[Any] = Future()
    future.set_result(state_of(1))
    checkpointer = make_sync_checkpointer()
    save(checkpointer, future.result, folder / "step1")
    save(checkpointer, lambda: state_of(2), folder / "step2")
    for seed in (1, 2):
        assert_same(dict(checkpointer.load(folder / f"step{seed}")), state_of(seed))


def test_tensors_in_shared_memory_are_saved_and_stay_there(folder: Path) -> None:
    tensor: Any = torch.arange(5.0)
    tensor.share_memory_()
    with closing(make_async_checkpointer()) as checkpointer:
        save(checkpointer, {"shared": tensor}, folder / "step1")
        assert tensor.is_shared()
        assert_same(checkpointer.load(folder / "step1")["shared"], torch.arange(5.0))


def test_a_part_that_cannot_be_set_up_raises_its_error(folder: Path) -> None:
    def fail(root: Path) -> Any:
        raise ConnectionError(f"no store at {root}")

    for make in MAKERS.values():
        with closing(make(storage=fail)) as checkpointer, pytest.raises(ConnectionError, match="no store at"):
            checkpointer.save(state_of(), folder / "step1")


def test_the_error_itself_is_in_the_future(folder: Path) -> None:
    """The writer is a thread: what it fails with is the exception itself, in the future."""
    error = ValueError("of the writer")
    checkpointer = AsyncCheckpointer(writer=Writer(error))
    assert present(checkpointer.save(state_of(), folder / "step1")).written.exception(WAIT_S) is error
    with pytest.raises(SaveError):
        checkpointer.close()


@functools.cache
def saved(kind: str = "sync") -> Path:
    """A checkpoint that no row changes."""
    path = Path(tempfile.mkdtemp(prefix="peers-")) / "step1"
    checkpointer = MAKERS[kind]()
    with closing(checkpointer):
        save(checkpointer, tree(), path)
    return path


@pytest.fixture(autouse=True, scope="module")
def _saved_is_removed() -> Any:
    yield
    for kind in MAKERS:
        shutil.rmtree(saved(kind).parent)


def tree() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([1.0, 2.0])},
        "lists": [torch.ones(2), [torch.zeros(1), torch.tensor(7)], {"deep": torch.full((2,), 5)}],
        "optimizer": {"lr": 0.5, "name": "adam"},
        "epoch": 10,
    }


def assert_equal(loaded: Any, expected: Any) -> None:
    assert same(dict(loaded) if isinstance(loaded, dict) else loaded, expected), loaded


def load(path: Path, *arguments: Any, **named: Any) -> Any:
    return make_sync_checkpointer().load(path, *arguments, **named)


def save_to(folder: Path, state: Any, **made: Any) -> Path:
    make_sync_checkpointer(**made).save(state, folder / "step1")
    return folder / "step1"


def test_a_tree_with_lists_comes_back_whole() -> None:
    loaded = load(saved())
    assert_equal(dict(loaded), tree())
    assert loaded.missing == []


def test_a_target_takes_sub_trees_and_single_tensors() -> None:
    """None stands for the sub-tree as it was saved; a tensor is filled; what is not named stays out."""
    weight = torch.zeros(2, 3)
    target: dict[str, Any] = {"model": {"weight": weight}, "lists": None}
    loaded = load(saved(), target)
    assert_equal(dict(loaded), {"model": {"weight": tree()["model"]["weight"]}, "lists": tree()["lists"]})
    assert loaded["model"]["weight"] is weight


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_nested_names_are_loaded_alone(kind: str) -> None:
    loaded = MAKERS[kind]().load(saved(kind), {"model": {"bias": None}, "optimizer": {"lr": None}})
    assert_equal(dict(loaded), {"model": {"bias": tree()["model"]["bias"]}, "optimizer": {"lr": 0.5}})


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_only_the_targets_keys_are_loaded(kind: str) -> None:
    target = {"model": {"bias": torch.zeros(2)}, "epoch": None}
    loaded = MAKERS[kind]().load(saved(kind), target)
    assert_equal(target, {"model": {"bias": tree()["model"]["bias"]}, "epoch": 10})
    assert dict(loaded) == target
    assert loaded.missing == []


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        (
            {"nonexistent_key": None, "another_missing_key": {"deep": None}, "epoch": None},
            ["nonexistent_key", "another_missing_key"],
        ),
        ({"model": {"weight": None, "scale": None}, "epoch": None}, ["model/scale"]),
    ],
)
def test_missing_names_are_listed(target: dict[str, Any], missing: list[str]) -> None:
    loaded = load(saved(), target)
    assert loaded.missing == missing
    assert_equal(loaded["epoch"], 10)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_missing_key_is_an_error_if_strict(kind: str) -> None:
    target = {"epoch": None, "other": None}
    with pytest.raises(RuntimeError, match="lacks other"):
        MAKERS[kind]().load(saved(kind), dict(target), strict=True)
    assert MAKERS[kind]().load(saved(kind), target, strict=False)["epoch"] == 10


@pytest.mark.parametrize("dtype", [torch.complex128])
def test_a_type_without_a_name_in_safetensors_needs_a_torch_file(folder: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(4).to(dtype)
    with pytest.raises(UserError, match=str(dtype)):
        save_to(folder, {"a": tensor})
    assert not (folder / "step1").exists()
    assert_equal(load(save_to(folder, {"a": tensor}, format="torch_file"), {"a": None})["a"], tensor)


@pytest.mark.parametrize("tensor", [torch.tensor(3.5), torch.zeros(0, 3), torch.arange(6.0).reshape(2, 3).t()])
def test_odd_shapes_are_read_in_part(folder: Path, tensor: torch.Tensor) -> None:
    path = save_to(folder, {"a": tensor, "b": 1})
    assert_equal(load(path, {"a": torch.zeros_like(tensor)})["a"], tensor)
    assert_equal(load(path, {"a": None})["a"], tensor)


def test_load_takes_the_arguments_of_torchs_own() -> None:
    for kind in (Checkpointer, SyncCheckpointer, AsyncCheckpointer):
        parameters = inspect.signature(kind.load).parameters
        assert list(parameters)[:5] == ["self", "path", "state_dict", "default_map_location", "strict"]
        assert parameters["strict"].default is False
    loaded = load(saved(), {"epoch": None}, default_map_location="cpu", strict=False)
    assert dict(loaded) == {"epoch": 10}


def test_a_module_state_dict_as_the_target_changes_the_module() -> None:
    module = nn.Linear(3, 2)
    weight = module.weight
    load(saved(), {"model": module.state_dict()})
    assert module.weight is weight
    assert_equal(dict(module.state_dict()), tree()["model"])


def test_a_list_of_tensors_in_the_target_is_filled() -> None:
    first = torch.zeros(2)
    target = {"lists": [first, [torch.zeros(1), torch.tensor(0)], {"deep": torch.zeros(2, dtype=torch.int64)}]}
    assert_equal(load(saved(), target)["lists"], tree()["lists"])


def test_the_state_of_an_optimizer_comes_back(folder: Path) -> None:
    def trained() -> torch.optim.Optimizer:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer

    state = trained().state_dict()
    path = save_to(folder, {"optimizer": state})
    loaded = load(path)["optimizer"]
    assert_equal(loaded, state)
    fresh = trained()
    fresh.load_state_dict(loaded)
    assert_equal(fresh.state_dict(), state)


def test_load_reads_a_folder_with_checkpoint_0_pt_as_a_state(folder: Path) -> None:
    (folder / "other").mkdir()
    state = {"model": {"weight": torch.ones(2)}, "epoch": 3}
    torch.save(state, folder / "other" / "checkpoint_0.pt")
    assert_equal(load(folder / "other"), state)
