"""The claims of the tests of torch.distributed.checkpoint's experimental Checkpointer: saves and their futures."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from peer_checkpoints import CLASSES, MAKERS, WAIT_S, Writer, assert_same, closing, save, state_of

from trainer_cli import AsyncCheckpointer, Checkpointer, SaveError, make_async_checkpointer, make_sync_checkpointer


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
        make_sync_checkpointer().save(state_of(), folder / "step1", **{argument: 3})
    assert not list(folder.iterdir())


def test_a_writer_that_fails_does_not_make_save_raise_but_waiting_for_its_future(folder: Path) -> None:
    checkpointer = AsyncCheckpointer(writer=Writer(RuntimeError("Write failed")))
    staged, written = checkpointer.save(state_of(), folder / "step1")
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
            saves.append(checkpointer.save(state_of(seed), folder / f"step{seed}"))
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
