"""Start the ranks of one machine, and end them together.

    this process:  start the process of the store, then one of each rank -> wait until all have ended
    a rank:        an ordinary `train fit`, which meets the others at the store; it ends when this process is gone

They are forks of one server (fork_server.py), so that torch is imported once. The store is in a process of its own: a
rank that is killed or stopped does not take along what the others need to name it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer_cli.addons.jobs.fork_server import Process, ProcessStarter
from trainer_cli.errors import ExitCode
from trainer_cli.processes import own_command
from trainer_cli.ranks import ON_NCCL_ERROR, variables_of_rank
from trainer_cli.signals import STOPPING, SignalHandlers

STORE = "_store"
"""The verb of the process of the store."""
_AFTER_A_FAILURE = ((10.0, signal.SIGTERM, 1), (30.0, signal.SIGKILL, 1), (600.0, signal.SIGKILL, 0))
"""Seconds after which the ranks that still run are sent a signal, and the first rank that gets it. Most end by
themselves before the first, and report in which step they lost the rank that failed. Rank 0 may have to save the state
after the failure, to finish the save in flight and to write the summary; not if a SIGSTOP has suspended it."""
_POLL_S = 0.05
"""Seconds between two checks of the processes."""


def set_rank_variables(processes: int) -> None:
    """Set the variables that torch reads when a rank imports it, unless the user has.

    Each rank would otherwise use all cores. And a rank whose store ends first would log a warning of thirty lines.
    Called before other processes are started: ranks of restarts are forks of a server with the same variables.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def launch_ranks(arguments: Sequence[str], processes: int) -> int:
    """Run `train ARGUMENTS` in this number of processes. Returns 0, or the exit code of the first that failed.

    Signals are forwarded, and the ranks may take any time to save and stop. After a failure of one, or a second Ctrl-C,
    the others are killed in half a minute, but rank 0, which may be saving, in ten.
    """
    set_rank_variables(processes)
    starter, ranks = ProcessStarter(for_ranks=True), RankProcesses()
    # In this order: at the end of this block the ranks have ended, then the store, then the server.
    with contextlib.closing(starter), contextlib.ExitStack() as started:
        store = starter.start(own_command([STORE]), output=subprocess.PIPE, new_session=True)
        started.enter_context(store)
        assert store.stdout is not None
        assert store.stderr is not None
        port = store.stdout.readline()
        if not port:
            sys.stderr.write(store.stderr.read().decode(errors="replace"))
            return int(ExitCode.FAILED)
        started.enter_context(ranks)
        for rank in range(processes):
            # As torchrun does: a rank ends when a collective on GPUs fails.
            env = {ON_NCCL_ERROR: "1", **os.environ, **variables_of_rank(rank, processes, int(port))}
            # A session of its own: otherwise the terminal sends Ctrl-C to the ranks too, a second time.
            process = starter.start(own_command(arguments), env, new_session=True)
            started.enter_context(process)
            ranks.add(process)
        return ranks.wait()


class RankProcesses:
    """The processes of the ranks. While entered, forwards signals to them."""

    def __init__(self) -> None:
        self._processes: list[Process] = []
        self._received: list[int] = []
        self._handlers = SignalHandlers(self._forward)

    def add(self, process: Process) -> None:
        """Add the process of the next rank."""
        self._processes.append(process)
        # A signal that came before was not forwarded to it.
        if self._received:
            process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait until all have ended. Returns 0, or the exit code of the first that failed.

        75 of rank 0 stands over another's: only rank 0 knows that the run can be resumed, e.g. after a full disk.
        """
        running, signals_left = dict(enumerate(self._processes)), list(_AFTER_A_FAILURE)
        failed, failed_at = None, float("inf")
        while running:
            time.sleep(_POLL_S)
            codes = {rank: code for rank, process in running.items() if (code := process.poll()) is not None}
            for rank, code in codes.items():
                del running[rank]
                if rank == 0 and code == ExitCode.STOPPED_EARLY and failed is not None:
                    failed = rank, code
                if code and failed is None:
                    failed = rank, code
                    # After a signal ranks end with 75, rank 0 perhaps much later than the others.
                    failed_at = float("inf") if self._is_stop(code) else time.monotonic()
            if self._received.count(signal.SIGINT) > 1:
                # A rank that waits outside of Python handles no signal.
                failed_at = min(failed_at, time.monotonic())
            while signals_left and time.monotonic() - failed_at > signals_left[0][0]:
                _, number, first_rank = signals_left.pop(0)
                _signal_groups([process for rank, process in running.items() if rank >= first_rank], number)
                if number == signal.SIGKILL:
                    _signal_groups(filter(_is_suspended, running.values()), number)
        return 0 if failed is None else self._exit_code(*failed)

    def _is_stop(self, code: int) -> bool:
        """Whether a process with this exit code was ended by a signal that was forwarded to it."""
        # Such a signal kills a process that has not yet set its handlers.
        return bool(self._received) and (code == ExitCode.STOPPED_EARLY or -code in STOPPING)

    def _exit_code(self, rank: int, code: int) -> int:
        """The exit code of the launch after a rank failed with this code."""
        if self._received.count(signal.SIGINT) > 1:
            return int(ExitCode.INTERRUPTED)
        if self._is_stop(code):
            return int(ExitCode.STOPPED_EARLY)
        # Negative: the number of the signal that killed the process.
        if code < 0:
            print(f"train: error: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
            return int(ExitCode.FAILED)
        return code

    def _forward(self, number: int, frame: object) -> None:
        """Handle a signal: note it, and send it to all ranks."""
        self._received.append(number)
        for process in self._processes:
            process.send_signal(number)

    def __enter__(self) -> RankProcesses:
        self._handlers.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._handlers.__exit__()


def _is_suspended(process: Process) -> bool:
    """Whether a signal has stopped a process, which then does nothing until it is continued."""
    try:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False  # Not on Linux, or it has ended.
    return state == "T"


def _signal_groups(processes: Iterable[Process], number: signal.Signals) -> None:
    """Send a signal to processes that lead a session, and to those that they have started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
