"""What two gloo ranks exchange, and how they start and lose one another."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

from ranks import HERE, on_ranks
from trainer_cli.errors import UserError
from trainer_cli.parallel import rendezvous
from trainer_cli.parallel.process_group import ALONE, from_environment
from trainer_cli.parallel.rendezvous import LostRankError, noted_activity, noting

ZERO = "ZeroDivisionError: division by zero"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    ends = on_ranks(2, [HERE / "group_claims.py", folder])
    assert [code for code, _ in ends] == [0, 0], ends
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_a_rank_that_does_not_come_within_the_limit_is_named(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["timed out"]
    assert answers[0]["lost"] == "rank 1 (HOST) has ended or hangs; the others waited at step 17"


@pytest.mark.slow
def test_others_hear_what_the_first_rank_that_failed_has_said(answers: list[dict[str, Any]]) -> None:
    assert answers[0]["first"] == [True, False]
    assert answers[0]["failure_of_rank_0"] == "rank 0 failed: ZeroDivisionError: its own"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "rank_0", "rank_1"),
    [
        ("rank", [0, 2, 0, True], [1, 2, 1, False]),
        ("broadcast", {"run": "of rank 0", "path": [1, None]}, {"run": "of rank 0", "path": [1, None]}),
        ("gather", ["rank 0", "rank 1"], ["rank 0", "rank 1"]),
        ("sum", [2.0, 1.0], [2.0, 1.0]),
        ("later", [1.0, 20.0], [1.0, 20.0]),
        ("on_main", "step500", "step500"),
        ("ran", [11, 0], []),
        ("shared", [2.0], [2.0]),
        ("checked", f"PeerError: rank 1 failed: {ZERO}", ZERO),
        ("failed", "UserError: no such file (here).", "PeerError: rank 0 failed"),
    ],
)
def test_two_ranks_agree(answers: list[dict[str, Any]], asked: str, rank_0: Any, rank_1: Any) -> None:
    assert [answer[asked] for answer in answers] == [rank_0, rank_1]


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
        "import sys; from trainer_cli.parallel.process_group import from_environment as f;"
        "g = f({}); assert (g.gather(1), g.broadcast(2), g.on_main(lambda: 3)) == ([1], 2, 3); g.barrier(); g.close();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert from_environment({"WORLD_SIZE": "1", "RANK": "0"}) is ALONE


@pytest.mark.slow
def test_a_rank_that_does_not_start_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_SILENT", timedelta(seconds=0.2))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    with pytest.raises(LostRankError, match="ranks 1, 2 of 3 have not started in 1 s"):
        from_environment({**address, "WORLD_SIZE": "3", "RANK": "0"}, timeout_s=1)
    assert capsys.readouterr().err == "train: waiting for ranks 1, 2 of 3 processes to start\n"
    with pytest.raises(LostRankError, match=r"rank 0 does not answer rank 1 at 127\.0\.0\.1:"):
        from_environment({**address, "WORLD_SIZE": "2", "RANK": "1"}, timeout_s=1)
    port = address["MASTER_PORT"]
    assert f"train: rank 1 is waiting for rank 0 at 127.0.0.1:{port} (MASTER_ADDR" in capsys.readouterr().err


def test_a_port_in_use_is_reported_with_the_variable_that_sets_it() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with pytest.raises(UserError, match=f"rank 0 cannot listen at 127.0.0.1:{port}.*MASTER_PORT"):
            from_environment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0"})
