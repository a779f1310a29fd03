"""Ranks end together, with the code of the first that failed, whatever ends one of them or asks all to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.addons.jobs import launch as module
from trainer_cli.addons.jobs.launch import RankProcesses, set_rank_variables

LIMIT_S = 500.0
GOES_ON = "sleep 600 & wait"
SAVES = "trap 'sleep 0.3; touch saved; exit 75' TERM; touch ready; sleep 600 & wait"
STOPS = "trap 'exit 75' TERM; sleep 600 & wait"
AT_THE_SECOND = "trap 'touch saved$n; [ $n ] && exit 130; n=2' INT; touch ready; while :; do sleep 600 & wait; done"
TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
AT_ONCE = ((0.0, TERM, 0), (0.0, KILL, 0))
"""Signals that leave the other ranks no time."""


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of the ranks in the current folder, of which nothing is left afterwards."""
    monkeypatch.chdir(tmp_path)
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, KILL)
        process.wait(LIMIT_S)


def end(processes: list[subprocess.Popen[bytes]], scripts: list[str], *signals: signal.Signals) -> int:
    """Run a script on each rank, and send this process signals once the file `ready` is there. The exit code."""

    def send() -> None:
        until = time.monotonic() + LIMIT_S
        while not Path("ready").exists() and time.monotonic() < until:
            time.sleep(0.01)
        for number in signals:
            os.kill(os.getpid(), number)
            # Two at once would be one.
            time.sleep(0.2)

    sender = threading.Thread(target=send)
    with RankProcesses() as rank_processes:
        for script in scripts:
            processes.append(subprocess.Popen(["bash", "-c", script], start_new_session=True))
            rank_processes.add(processes[-1])
        if signals:
            sender.start()
        code = rank_processes.wait()
    if signals:
        sender.join()
    assert all(process.returncode is not None for process in processes)
    return code


@pytest.mark.parametrize(
    ("scripts", "code", "message"),
    [
        pytest.param(["exit 0", "exit 0"], 0, "", id="all are done"),
        pytest.param(["exit 0", "exit 3"], 3, "", id="one fails"),
        pytest.param(["sleep 0.5; exit 1", "exit 3"], 3, "", id="the first failure counts"),
        pytest.param(["exit 75", GOES_ON], 75, "", id="one stops alone"),
        pytest.param(["sleep 0.5; exit 75", "exit 1"], 75, "", id="rank 0 can be resumed, whatever the others say"),
        pytest.param(["exit 1", "sleep 0.5; exit 75"], 1, "", id="another rank does not know that"),
        pytest.param(["kill -9 $$", GOES_ON], 1, "rank 0 was killed by SIGKILL", id="one is killed"),
        pytest.param([GOES_ON, "kill -6 $$"], 1, "rank 1 was killed by SIGABRT", id="one aborts"),
        pytest.param(["trap '' TERM; sleep 600", "exit 4"], 4, "", id="one fails, the other hangs"),
        pytest.param(["kill -STOP $$", "sleep 0.1; exit 1"], 1, "", id="one fails, the other is stopped"),
    ],
)
def test_all_end_when_one_fails(
    ranks: list[Any],
    scripts: list[str],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "_AFTER_A_FAILURE", ((0.6, TERM, 0), (0.7, KILL, 0)))
    assert end(ranks, scripts) == code
    assert capsys.readouterr().err == (f"train: error: {message}\n" if message else "")


@pytest.mark.parametrize(
    ("scripts", "signals", "code"),
    [
        pytest.param([STOPS, SAVES], [TERM], 75, id="one saves longer than the other"),
        pytest.param([SAVES, GOES_ON], [TERM], 75, id="one has not handled signals yet"),
        pytest.param([SAVES, f"trap 'exit 0' TERM; {GOES_ON}"], [TERM], 75, id="one was done"),
        pytest.param([f"trap 'exit 0' TERM; touch ready saved; {GOES_ON}"], [TERM], 0, id="all were done"),
        pytest.param([SAVES.replace("75", "1")], [TERM], 1, id="the save fails"),
        pytest.param([SAVES.replace("TERM", "INT")], [INT], 75, id="Ctrl-C"),
        pytest.param([AT_THE_SECOND], [INT, INT], 130, id="Ctrl-C twice"),
        pytest.param([AT_THE_SECOND.replace("130", "1")], [INT, INT], 130, id="Ctrl-C twice, and a failure"),
    ],
)
def test_a_signal_is_forwarded_and_the_ranks_take_their_time(
    ranks: list[Any], scripts: list[str], signals: list[signal.Signals], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AFTER_A_FAILURE", AT_ONCE)
    assert end(ranks, scripts, *signals) == code
    assert Path("saved").exists()


def test_rank_0_has_time_to_save_after_the_failure_of_another(
    ranks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AFTER_A_FAILURE", ((0.1, TERM, 1), (0.2, KILL, 1), (60.0, KILL, 0)))
    assert end(ranks, ["sleep 1; touch saved; exit 3", "exit 4", "trap '' TERM; sleep 600 & wait"]) == 4
    assert Path("saved").exists()


def test_a_suspended_rank_0_is_not_waited_for(ranks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AFTER_A_FAILURE", ((0.1, TERM, 1), (0.5, KILL, 1), (3600.0, KILL, 0)))
    assert end(ranks, ["kill -STOP $$", "sleep 0.2; exit 4"]) == 4
    assert ranks[0].returncode == -KILL


def test_ranks_that_handle_no_signal_are_killed_after_a_second_ctrl_c(
    ranks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AFTER_A_FAILURE", ((0.1, TERM, 0), (0.2, KILL, 0)))
    assert end(ranks, ["trap '' INT TERM; touch ready; sleep 600 & wait"], INT, INT) == 130


def test_a_rank_that_starts_after_a_signal_stops(ranks: list[Any]) -> None:
    before = signal.getsignal(TERM)
    with RankProcesses() as rank_processes:
        signal.raise_signal(INT)
        ranks.append(subprocess.Popen(["bash", "-c", GOES_ON], start_new_session=True))
        rank_processes.add(ranks[0])
        assert rank_processes.wait() == 75
    assert signal.getsignal(TERM) == before


def test_ranks_share_the_cores_and_log_few_warnings_of_torch_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    set_rank_variables(2)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["TORCH_CPP_LOG_LEVEL"]) == ("3", "INFO")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    set_rank_variables(10**6)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["TORCH_CPP_LOG_LEVEL"]) == ("1", "ERROR")
