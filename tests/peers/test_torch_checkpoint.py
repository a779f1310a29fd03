"""The claims of the tests of torch.distributed.checkpoint's experimental Checkpointer: saves and their futures."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from peer_checkpoints import CLASSES, MAKERS, WAIT_S, Writer, assert_same, closing, save, state_of
from peer_claims import Claim, claims, each, try_claim

from trainer_cli import AsyncCheckpointer, Checkpointer, SaveError, make_async_checkpointer, make_sync_checkpointer


def check_round_trip(folder: Path, kind: str) -> None:
    with closing(MAKERS[kind]()) as checkpointer:
        saving = checkpointer.save(state_of(), folder / "step1")
        assert (saving is None) == (kind == "sync")
        if saving is not None:
            saving.written.result(WAIT_S)
        assert_same(dict(checkpointer.load(folder / "step1")), state_of())


def check_further_arguments(folder: Path, kind: str) -> None:
    writer = Writer()
    with closing(CLASSES[kind](writer=writer)) as checkpointer:
        save(checkpointer, state_of(), folder / "step1", custom_arg="value", another_arg=42)
        assert writer.noted == [{"custom_arg": "value", "another_arg": 42}]
    with closing(MAKERS[kind]()) as checkpointer, pytest.raises(TypeError, match="custom_arg"):
        checkpointer.save(state_of(), folder / "step2", custom_arg="value")
    assert not (folder / "step2").exists()


def check_no_such_argument(folder: Path, argument: str) -> None:
    with pytest.raises(TypeError, match=argument):
        make_sync_checkpointer().save(state_of(), folder / "step1", **{argument: 3})
    assert not list(folder.iterdir())


class Hook:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bool]] = []

    def pre_commit(self, path: str) -> None:
        self.calls.append(("pre", path, Path(path).exists()))

    def post_commit(self, path: str) -> None:
        self.calls.append(("post", path, Path(path).exists()))


def check_commit_hook(folder: Path) -> None:
    hook, path = Hook(), folder / "step1"
    save(make_sync_checkpointer(commit_hook=hook), state_of(), path)
    assert hook.calls == [("pre", str(path), False), ("post", str(path), True)]


def check_failure_is_in_the_future(folder: Path) -> None:
    checkpointer = AsyncCheckpointer(writer=Writer(RuntimeError("Write failed")))
    staged, written = checkpointer.save(state_of(), folder / "step1")
    assert staged.result(WAIT_S) is None
    with pytest.raises(RuntimeError, match="Write failed"):
        written.result(WAIT_S)
    with pytest.raises(SaveError, match="Write failed"):
        checkpointer.close()


def check_next_save_raises(folder: Path) -> None:
    writer = Writer(RuntimeError("Write failed"))
    with closing(AsyncCheckpointer(writer=writer)) as checkpointer:
        checkpointer.save(state_of(), folder / "step1")
        with pytest.raises(SaveError, match="Write failed"):
            checkpointer.save(state_of(), folder / "step2")
        writer.error = None
        save(checkpointer, state_of(), folder / "step3")
    assert [path.name for path in folder.iterdir()] == ["step3"]


def check_futures(folder: Path, results: bool) -> None:
    with closing(make_async_checkpointer()) as checkpointer:
        pair = checkpointer.save(state_of(), folder / "step1")
        assert isinstance(pair, tuple)
        staged, written = pair
        assert isinstance(staged, Future)
        assert isinstance(written, Future)
        if results:
            assert (staged.result(WAIT_S), written.result(WAIT_S)) == (None, None)


def check_saves_in_order(folder: Path, count: int) -> None:
    with closing(make_async_checkpointer()) as checkpointer:
        saves = []
        for seed in range(count):
            saves.append(checkpointer.save(state_of(seed), folder / f"step{seed}"))
            assert all(before.written.done() for before in saves[:-1])
    for seed in range(count):
        assert_same(dict(make_sync_checkpointer().load(folder / f"step{seed}")), state_of(seed))


def check_closed_twice(folder: Path) -> None:
    for make in MAKERS.values():
        checkpointer = make()
        save(checkpointer, state_of(), folder / "step1")
        checkpointer.close()
        checkpointer.close()


def check_torch_file(folder: Path) -> None:
    save(make_sync_checkpointer(format="torch_file"), state_of(), folder / "step1")
    saved = torch.load(folder / "step1" / "rank0.pt", weights_only=True)
    assert_same(saved["tensors"]["model/layer.weight"], state_of()["model"]["layer.weight"])


def check_made(folder: Path, kind: str) -> None:
    checkpointer = MAKERS[kind]()
    assert isinstance(checkpointer, Checkpointer)
    assert type(checkpointer) is CLASSES[kind]
    check_round_trip(folder, kind)
    checkpointer.close()


def check_layout(folder: Path, format: str, files: tuple[str, ...]) -> None:
    save(make_sync_checkpointer(format=format), state_of(), folder / "step1")
    assert sorted(path.name for path in (folder / "step1").iterdir()) == ["manifest.json", *files]


def check_module_state(folder: Path) -> None:
    module = torch.nn.Linear(2, 2)
    state = module.state_dict()
    assert isinstance(state, OrderedDict)
    assert hasattr(state, "_metadata")
    save(make_sync_checkpointer(), state, folder / "step1")
    other = torch.nn.Linear(2, 2)
    other.load_state_dict(make_sync_checkpointer().load(folder / "step1"))
    assert_same(other.state_dict(), state)


CLAIMS: list[Claim] = [
    *claims(
        "test_builder.py: test_make_sync_checkpointer",
        check_made,
        {"the maker without arguments gives a checkpointer that saves, returns None and loads": ("sync",)},
    ),
    *claims(
        "test_builder.py: test_make_async_checkpointer",
        check_made,
        {"the maker without arguments gives one that saves with futures, loads and closes": ("async",)},
    ),
    *claims("test_checkpoint_writer.py: test_close", check_closed_twice, {"close may be called twice": ()}),
    *claims(
        "test_checkpoint_writer.py: test_write_calls_commit_hooks",
        check_commit_hook,
        {"a commit hook is called with the path before and after the commit": ()},
    ),
    *claims(
        "test_checkpoint_writer.py: test_write_calls_commit_hooks (further arguments)",
        check_no_such_argument,
        {"further arguments of save reach the commit hook": ("hook_arg",)},
        difference="A hook gets the path alone; what it needs is given where it is made, and other names are refused.",
    ),
    *claims(
        "test_checkpoint_writer.py: test_write_creates_checkpoint_file",
        check_torch_file,
        {"torch.load of the written file gives the tensors": ()},
    ),
    *claims(
        "test_checkpoint_writer.py: test_write_without_barrier, test_write_without_commit_hook",
        check_round_trip,
        {"neither is needed for a save": ("sync",)},
    ),
    *claims(
        "test_checkpointer.py: test_save_and_load_basic",
        check_round_trip,
        {
            "a saved tree comes back with all its keys, and save returns None": ("sync",),
            "a saved tree comes back with all its keys, and save returns futures": ("async",),
        },
    ),
    *claims(
        "test_checkpointer.py: test_save_with_kwargs",
        check_further_arguments,
        {
            "further arguments of a save reach the writer": ("sync",),
            "further arguments of a save in the background reach the writer": ("async",),
        },
    ),
    *claims(
        "test_checkpointer.py: test_async_returns_futures",
        check_futures,
        {"save returns a tuple of two futures": (False,)},
    ),
    *claims(
        "test_checkpointer.py: test_async_future_results",
        check_futures,
        {"both futures have the result None": (True,)},
    ),
    *claims(
        "test_checkpointer.py: test_async_sequential_saves_wait",
        check_saves_in_order,
        {"the second save waits for the first, and both are whole": (2,)},
    ),
    *claims(
        "test_checkpointer.py: test_async_multiple_saves_ordering",
        check_saves_in_order,
        {"three saves in a row each have their own content": (3,)},
    ),
    *claims(
        "test_checkpointer.py: test_async_error_handling",
        check_failure_is_in_the_future,
        {"a writer that fails does not make save raise, but waiting for its future": ()},
    ),
    *claims(
        "checkpointer.py: AsyncCheckpointer.save",
        check_next_save_raises,
        {"the next save raises the failure of the one before": ()},
    ),
    *claims(
        "checkpoint_writer.py: layout",
        check_layout,
        {
            "the files of the default format are those of the manual": (
                "tensors",
                ("rank0.json", "rank0.safetensors"),
            ),
            "a torch file is where the manual says": ("torch_file", ("rank0.pt",)),
            "an archive is where the manual says": ("archive", ("rank0.tar",)),
        },
    ),
    *claims(
        "checkpointer.py: save",
        check_module_state,
        {"a module's state_dict is saved as it is": ()},
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
