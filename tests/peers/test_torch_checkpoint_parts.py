"""The claims of the tests of torch's experimental Checkpointer about its parts: stager, writing process, barrier."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_checkpoints import MAKERS, WAIT_S, Writer, assert_same, closing, save, state_of
from thread_ranks import ThreadGroup, on_ranks

from trainer_cli import AsyncCheckpointer, SaveError, make_async_checkpointer, make_sync_checkpointer
from trainer_cli.checkpoint.snapshot import CopyStager, LiveStager


@pytest.mark.parametrize("argument", ["config", "rank_info", "write_barrier_timeout_secs"])
def test_options_of_torchs_own_parts_are_refused(argument: str) -> None:
    with pytest.raises(TypeError, match=argument):
        make_sync_checkpointer(**{argument: 3})


def test_ranks_need_no_barrier(folder: Path) -> None:
    """Each of two ranks saves its part of one checkpoint, which is committed once both have written."""

    def act(group: ThreadGroup) -> Any:
        checkpointer = make_sync_checkpointer(group=group)
        checkpointer.save({"shared": torch.ones(2), "rng": torch.tensor(group.rank)}, folder / "step1")
        return checkpointer.load(folder / "step1")["rng"].item()

    assert on_ranks(2, act) == [0, 1]
    with pytest.raises(TypeError, match="barrier"):
        make_sync_checkpointer(barrier=object())  # type: ignore[call-arg]


def test_the_state_may_be_changed_once_it_is_staged(folder: Path) -> None:
    state, expected = state_of(), state_of()
    with closing(make_async_checkpointer()) as checkpointer:
        staged, written = checkpointer.save(state, folder / "step1")
        staged.result(WAIT_S)
        state["model"]["layer.weight"].zero_()
        state["optimizer"]["param_groups"][0]["lr"] = 9.0
        written.result(WAIT_S)
        assert_same(dict(checkpointer.load(folder / "step1")), expected)


def test_a_stager_may_be_given(folder: Path) -> None:
    with closing(AsyncCheckpointer(stager=LiveStager())) as checkpointer:
        assert checkpointer.save(state_of(), folder / "step1").written.done(), "without a copy it is written at once"
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


def test_what_writes_is_alive_after_it_has_started_and_gone_after_close(folder: Path) -> None:
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
    tensor = torch.arange(5.0).share_memory_()
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
    assert checkpointer.save(state_of(), folder / "step1").written.exception(WAIT_S) is error
    with pytest.raises(SaveError):
        checkpointer.close()
