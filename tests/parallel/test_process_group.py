"""What two gloo ranks exchange, how they start and lose one another, and what they save of an FSDP2 model."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import HERE, on_ranks

from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.errors import UserError
from trainer_cli.parallel import rendezvous
from trainer_cli.parallel.distributed_group import join_processes
from trainer_cli.parallel.peer_errors import LostRankError, noted_activity, noting
from trainer_cli.parallel.process_group import ALONE
from trainer_cli.storage.local import LocalStorage

pytestmark = pytest.mark.slow

ZERO = "ZeroDivisionError: division by zero"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one start of two ranks left behind, of which rank 1 is killed at the end."""
    folder = tmp_path_factory.mktemp("ranks")
    ends = on_ranks(2, HERE / "rank_claims.py", str(folder))
    assert [code for code, _ in ends] == [0, -signal.SIGKILL], ends
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_rank_that_does_not_come_within_the_limit_is_named(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["timed out"]
    assert answers[0]["lost"] == "rank 1 (HOST) has ended or hangs; the others waited at step 17"


def test_others_hear_what_the_first_rank_that_failed_has_said(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["first"] == [True, False]
    assert answers[0]["failure of rank 0"] == "rank 0 failed: ZeroDivisionError: its own"


@pytest.mark.parametrize(
    ("asked", "rank_0", "rank_1"),
    [
        ("rank", [0, 2, 0, True], [1, 2, 1, False]),
        ("broadcast", {"run": "of rank 0", "path": [1, None]}, {"run": "of rank 0", "path": [1, None]}),
        ("gather", ["rank 0", "rank 1"], ["rank 0", "rank 1"]),
        ("gather_on_main", ["rank 0", "rank 1"], []),
        ("sum", [2.0, 1.0], [2.0, 1.0]),
        ("later", [1.0, 20.0], [1.0, 20.0]),
        ("on_main", "step500", "step500"),
        ("ran", [11, 0], []),
        ("shared", [2.0], [2.0]),
        ("checked", f"PeerError: rank 1 failed: {ZERO}", ZERO),
        ("failed", "UserError: no such file (here).", "PeerError: rank 0 failed"),
        ("machines", [1, 2], [1, 2]),
    ],
)
def test_two_ranks_agree(answers: list[dict[str, Any]], asked: str, rank_0: Any, rank_1: Any) -> None:
    assert [answer[asked] for answer in answers] == [rank_0, rank_1]


@pytest.mark.parametrize("how", ["return", "break", "ValueError", "UserError", "StopIteration"])
@pytest.mark.parametrize(("block", "failing"), [("leading", 0), ("checking", 1)])
def test_however_a_block_ends_on_one_rank_the_other_hears_of_it(
    answers: list[dict[str, Any]], block: str, failing: int, how: str
) -> None:
    outcomes = [_outcome(answer, f"{block} {how}") for answer in answers]
    exit_code = 2 if how == "UserError" else 1
    own = None if how in ("return", "break") else f"UserError {exit_code}" if how == "UserError" else how
    assert outcomes[failing] == [own, True]
    assert outcomes[1 - failing] == [own and f"PeerError {exit_code}", True]


@pytest.mark.parametrize("how", ["KeyboardInterrupt", "SystemExit"])
def test_an_interrupt_of_rank_0_in_its_block_ends_the_other(answers: list[dict[str, Any]], how: str) -> None:
    assert [_outcome(answer, f"leading {how}") for answer in answers] == [[how, True], ["PeerError 1", True]]


def _outcome(answer: dict[str, Any], begin: str) -> Any:
    return next(outcome for name, outcome in answer["blocks"].items() if name.replace("'", "").startswith(begin))


def test_after_a_rank_is_lost_the_innermost_activity_is_reported_and_of_other_errors_none() -> None:
    for message, expected in (
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer", "while evaluating"),
        ("CUDA out of memory", "otherwise"),
    ):
        with pytest.raises(RuntimeError) as caught, noting("while trained"), noting("while evaluating"):
            raise RuntimeError(message)
        assert noted_activity(caught.value, "otherwise") == expected


def test_one_process_needs_no_torch_distributed() -> None:
    code = (
        "import sys; from trainer_cli.parallel.distributed_group import join_processes as f;"
        "g = f({}); assert (g.gather(1), g.broadcast(2), g.on_main(lambda: 3)) == ([1], 2, 3); g.barrier(); g.close();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert join_processes({"WORLD_SIZE": "1", "RANK": "0"}) is ALONE


def test_a_rank_that_does_not_start_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_SILENT", timedelta(seconds=0.2))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    with pytest.raises(LostRankError, match="ranks 1, 2 of 3 have not started in 1 s"):
        join_processes({**address, "WORLD_SIZE": "3", "RANK": "0"}, timeout_s=1)
    assert capsys.readouterr().err == "train: waiting for ranks 1, 2 of 3 processes to start\n"
    with pytest.raises(LostRankError, match=r"rank 0 does not answer rank 1 at 127\.0\.0\.1:"):
        join_processes({**address, "WORLD_SIZE": "2", "RANK": "1"}, timeout_s=1)
    port = address["MASTER_PORT"]
    assert f"train: rank 1 is waiting for rank 0 at 127.0.0.1:{port} (MASTER_ADDR" in capsys.readouterr().err


def test_a_port_in_use_is_reported_with_the_variable_that_sets_it() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with pytest.raises(UserError, match=f"rank 0 cannot listen at 127.0.0.1:{port}.*MASTER_PORT"):
            join_processes({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0"})


@pytest.mark.parametrize(
    ("asked", "answer"), [("faults", []), ("bits", True), ("async is sync", True), ("goes on", True)]
)
def test_a_sharded_training_comes_back_bit_for_bit(answers: list[dict[str, Any]], asked: str, answer: Any) -> None:
    assert [one[asked] for one in answers] == [answer, answer]


def test_one_process_reads_what_the_ranks_gathered(folder: Path) -> None:
    gathered = torch.load(folder / "gathered.pt", weights_only=True)
    loaded = make_sync_checkpointer().read(folder / "async")
    compared = 0
    for name, value in gathered["model"].items():
        assert torch.equal(loaded["model"][name], value), name
        compared += 1
    for name, kept in gathered["optimizer"]["state"].items():
        for key, value in kept.items():
            assert torch.equal(loaded["optimizer"]["state"][name][key], value), (name, key)
            compared += 1
    assert compared > 20
    assert loaded["model"]["head.weight"] is loaded["model"]["embed.weight"]


@pytest.mark.addon("text")
def test_divided_layers_come_back_in_any_layout(folder: Path, answers: list[dict[str, Any]]) -> None:
    assert [one["layouts"] for one in answers] == [[], []]
    compared = 0
    for number in range(3):
        loaded = make_sync_checkpointer().read(folder / "layouts" / str(number))
        for wanted in (torch.load(folder / f"layout{one}.pt", weights_only=True) for one in {0, number}):
            for name, value in wanted["model"].items():
                assert torch.equal(loaded["model"][name], value), (number, name)
                for key, kept in wanted["optimizer"]["state"].get(name, {}).items():
                    assert torch.equal(loaded["optimizer"]["state"][name][key], kept), (number, name, key)
                    compared += 1
    assert compared == 5 * 3 * 20


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_without_a_group_given_the_ranks_of_torchs_own_save_together(
    folder: Path, answers: list[dict[str, Any]], kind: str
) -> None:
    names = ["number", "own", "rank", "same"]
    for rank in range(2):
        own = [float(rank)] * 2
        assert answers[rank]["default group"][kind] == [rank, own, [5.0] * 3, 1, names, rank, own]
    state = make_sync_checkpointer().load(folder / "default" / kind)
    assert [of_rank["rank"] for of_rank in state["ranks"]] == [0, 1]
    manifest = make_sync_checkpointer().verify(folder / "default" / kind)
    assert [name for of_file in manifest.shards.values() for name in of_file] == ["same"]


def test_a_rank_can_save_alone_beside_torchs_group(answers: list[dict[str, Any]]) -> None:
    assert [one["default group"]["alone"] for one in answers] == [0, 1]


def test_other_values_beside_shared_tensors_are_refused(answers: list[dict[str, Any]]) -> None:
    for one in answers:
        assert "the ranks have different values under 'all', which also holds tensors" in one["default group"]["mixed"]


@pytest.mark.addon("text")
def test_what_a_tensor_group_does_not_divide_is_written_once(folder: Path) -> None:
    manifest = make_sync_checkpointer().verify(folder / "layouts" / "0")
    assert (manifest.world_size, manifest.tensor_size) == (2, 2)
    parts = [
        str(of_file["model/tokens.weight"]) for of_file in manifest.shards.values() if "model/tokens.weight" in of_file
    ]
    assert parts == ["[0:300, 0:64] of [300, 64]"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_failed_write_on_rank_1_is_reported_on_both_and_leaves_no_manifest(
    folder: Path, answers: list[dict[str, Any]], kind: str
) -> None:
    said = [one["failed on a full disk"][kind] for one in answers]
    assert all("No space left on device" in message for message in said)
    assert said[0].startswith("NoSpaceError: rank 1: ")
    assert said[1].startswith("NoSpaceError: ")
    assert list((folder / f"failed-{kind}").iterdir()) == []


@pytest.mark.addon("auto")
def test_ranks_find_a_rate_while_parameters_are_frozen_and_train_as_without_it(answers: list[dict[str, Any]]) -> None:
    (_, without), (losses, after_whole), (losses_of_cut, after_cut) = answers[0]["frozen at first"]
    assert without == after_whole == after_cut
    assert len(losses) == 40 > len(losses_of_cut) > 0, "the losses of the second rise"
    assert answers[1]["frozen at first"] == answers[0]["frozen at first"]


def test_a_rank_needs_memory_for_its_shard_and_a_constant(answers: list[dict[str, Any]]) -> None:
    from rank_claims import LARGE, MEGABYTE

    for one in answers:
        print({key: f"{value / MEGABYTE:.0f} MB" for key, value in one["memory"].items()}, "of a shard of 32 MB")
        assert one["memory"]["save"] < LARGE // 2 + 24 * MEGABYTE
        assert one["memory"]["load"] < LARGE // 2 + 24 * MEGABYTE


def test_a_rank_that_is_killed_before_the_commit_leaves_the_older_checkpoints(folder: Path) -> None:
    storage = LocalStorage(folder, run_id="run", attempt=1)
    assert [entry.name for entry in Catalog(storage).entries() if entry.valid] == ["async", "step3", "large"]
    storage.sweep()
    assert not list(folder.glob(".*"))
