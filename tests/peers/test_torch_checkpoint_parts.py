"""The claims of the tests of torch's experimental Checkpointer about its parts: stager, writing process, barrier."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_checkpoints import MAKERS, WAIT_S, Writer, assert_same, closing, save, state_of
from peer_claims import Claim, claims, each, try_claim
from thread_ranks import ThreadGroup, on_ranks

from trainer_cli import AsyncCheckpointer, SaveError, make_async_checkpointer, make_sync_checkpointer
from trainer_cli.checkpoint.snapshot import CopyStager, LiveStager


def check_no_such_part(folder: Path, argument: str) -> None:
    with pytest.raises(TypeError, match=argument):
        make_sync_checkpointer(**{argument: 3})


def check_ranks_without_barrier(folder: Path) -> None:
    """Each of two ranks saves its part of one checkpoint, which is committed once both have written."""

    def act(group: ThreadGroup) -> Any:
        checkpointer = make_sync_checkpointer(group=group)
        checkpointer.save({"shared": torch.ones(2), "rng": torch.tensor(group.rank)}, folder / "step1")
        return checkpointer.load(folder / "step1")["rng"].item()

    assert on_ranks(2, act) == [0, 1]
    with pytest.raises(TypeError, match="barrier"):
        make_sync_checkpointer(barrier=object())  # type: ignore[call-arg]


def check_changed_after_staging(folder: Path) -> None:
    state, expected = state_of(), state_of()
    with closing(make_async_checkpointer()) as checkpointer:
        staged, written = checkpointer.save(state, folder / "step1")
        staged.result(WAIT_S)
        state["model"]["layer.weight"].zero_()
        state["optimizer"]["param_groups"][0]["lr"] = 9.0
        written.result(WAIT_S)
        assert_same(dict(checkpointer.load(folder / "step1")), expected)


def check_staged_at_once(folder: Path) -> None:
    with closing(make_async_checkpointer()) as checkpointer:
        assert checkpointer.save(state_of(), folder / "step1").staged.done()


def check_stager_of_ones_own(folder: Path) -> None:
    with closing(AsyncCheckpointer(stager=LiveStager())) as checkpointer:
        assert checkpointer.save(state_of(), folder / "step1").written.done(), "without a copy it is written at once"
    with closing(AsyncCheckpointer(stager=CopyStager(available=lambda: 1 << 30))) as checkpointer:
        save(checkpointer, state_of(), folder / "step2")
        assert checkpointer.stager.held_bytes > 0


def check_one_stager_for_several_states(folder: Path) -> None:
    stager = CopyStager()
    states = [state_of(1), {"other": torch.arange(100)}, state_of(2)]
    with closing(AsyncCheckpointer(stager=stager)) as checkpointer:
        for step, state in enumerate(states):
            save(checkpointer, state, folder / f"step{step}")
        for step, state in enumerate(states):
            assert_same(dict(checkpointer.load(folder / f"step{step}")), state)


def writer_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "checkpoint-writer"}


def check_life_of_the_writer(folder: Path) -> None:
    before = writer_threads()
    checkpointer = make_async_checkpointer()
    save(checkpointer, state_of(), folder / "step1")
    (thread,) = writer_threads() - before
    assert thread.is_alive()
    checkpointer.close()
    assert not thread.is_alive()


def check_state_made_later(folder: Path) -> None:
    future: Future[Any] = Future()
    future.set_result(state_of(1))
    checkpointer = make_sync_checkpointer()
    save(checkpointer, future.result, folder / "step1")
    save(checkpointer, lambda: state_of(2), folder / "step2")
    for seed in (1, 2):
        assert_same(dict(checkpointer.load(folder / f"step{seed}")), state_of(seed))


def check_save_after_close(folder: Path) -> None:
    checkpointer = make_async_checkpointer()
    save(checkpointer, state_of(1), folder / "step1")
    checkpointer.close()
    save(checkpointer, state_of(2), folder / "step2")
    checkpointer.close()
    assert_same(dict(make_sync_checkpointer().load(folder / "step2")), state_of(2))


def check_shared_memory(folder: Path) -> None:
    tensor = torch.arange(5.0).share_memory_()
    with closing(make_async_checkpointer()) as checkpointer:
        save(checkpointer, {"shared": tensor}, folder / "step1")
        assert tensor.is_shared()
        assert_same(checkpointer.load(folder / "step1")["shared"], torch.arange(5.0))


def check_part_that_fails_to_start(folder: Path) -> None:
    def fail(root: Path) -> Any:
        raise ConnectionError(f"no store at {root}")

    for make in MAKERS.values():
        with closing(make(storage=fail)) as checkpointer, pytest.raises(ConnectionError, match="no store at"):
            checkpointer.save(state_of(), folder / "step1")


def check_no_protocol_of_a_process(folder: Path) -> None:
    """The writer is a thread: what it fails with is the exception itself, in the future."""
    error = ValueError("of the writer")
    checkpointer = AsyncCheckpointer(writer=Writer(error))
    assert checkpointer.save(state_of(), folder / "step1").written.exception(WAIT_S) is error
    with pytest.raises(SaveError):
        checkpointer.close()


THREAD = "test_checkpoint_process.py"
CLAIMS: list[Claim] = [
    *claims(
        "test_barriers.py: all tests",
        check_ranks_without_barrier,
        {"a barrier over a TCP store, with a key for each of its uses, joins the ranks": ()},
        difference="There is no barrier class: a process group joins the ranks of a save, by default torch's own.",
    ),
    *claims(
        "test_builder.py: config=, rank_info=",
        check_no_such_part,
        {"the maker takes a config object": ("config",), "the maker takes the rank": ("rank_info",)},
        difference="Parts are keyword arguments of the constructor, and the rank is that of the process group.",
    ),
    *claims(
        f"{THREAD}: types of requests, time limits",
        check_no_protocol_of_a_process,
        {"requests to the writing process and its answers have types": ()},
        difference="A thread writes the copy, so there is no protocol; its exception itself is in the future.",
    ),
    *claims(
        f"{THREAD}: test_checkpoint_process_initialization",
        check_life_of_the_writer,
        {"what writes is alive after it has started and gone after close": ()},
    ),
    *claims(
        f"{THREAD}: test_checkpoint_write_future_state_dict",
        check_state_made_later,
        {"the state may be a result that comes later": ()},
    ),
    *claims(
        f"{THREAD}: test_communication_error_handling",
        check_save_after_close,
        {"a save raises when what writes is gone": ()},
        difference="A save after close() starts a new thread and is committed, so there is nothing to raise.",
    ),
    *claims(
        f"{THREAD}: test_shared_memory_tensor_ipc",
        check_shared_memory,
        {"tensors in shared memory are saved and stay there": ()},
    ),
    *claims(
        f"{THREAD}: test_subprocess_initialization_failure",
        check_part_that_fails_to_start,
        {"a part that cannot be set up raises its error": ()},
    ),
    *claims(
        "test_checkpoint_writer.py: test_write_calls_barrier",
        check_ranks_without_barrier,
        {"a barrier object is called once for each write": ()},
        difference="No barrier is an argument: a save is committed once all ranks of its group have written.",
    ),
    *claims(
        "test_checkpoint_writer.py: CheckpointWriterConfig test_default_values",
        check_no_such_part,
        {"the time limit of the barrier is an option of the writer": ("write_barrier_timeout_secs",)},
        difference="The time limit is that of the process group, which is given where the group is made.",
    ),
    *claims(
        "test_staging.py: test_sync_staging, test_multiple_staging_operations",
        check_one_stager_for_several_states,
        {"one stager takes different states in turn": ()},
    ),
    *claims(
        "test_staging.py: what is staged",
        check_changed_after_staging,
        {"the state may be changed once it is staged": ()},
    ),
    *claims(
        "test_staging.py: test_async_staging",
        check_staged_at_once,
        {"staging itself runs in the background": ()},
        difference="The state is copied before save returns, so that it may change at once; staged is done by then.",
    ),
    *claims(
        "test_staging.py: test_different_option_combinations",
        check_stager_of_ones_own,
        {"options choose pinned or shared memory": ()},
        difference="Memory is pinned where the state is on a GPU; for anything else a stager is given as an argument.",
    ),
    *claims(
        "test_types.py: test_rank_info",
        check_ranks_without_barrier,
        {"an object tells the rank and the number of ranks": ()},
        difference="The process group tells them: that of the argument group=, or torch's default group.",
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
