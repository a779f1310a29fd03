"""Fit in child processes: one after another, each started again after a failure, or one for each rank.

    this process:  start a child -> wait -> ask `decide_restart` -> pause -> start the next child …
    the child:     an ordinary `train fit`, which resumes; it ends when this process is gone

A signal is forwarded to the child, which saves and exits with 75. During a pause it ends this process with 75.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from trainer_cli.addons.jobs.fork_server import Forked, Process, ProcessStarter
from trainer_cli.addons.jobs.launch import launch_ranks, set_rank_variables
from trainer_cli.addons.jobs.restart import Ended, decide_restart
from trainer_cli.catalog import Catalog
from trainer_cli.errors import ExitCode
from trainer_cli.files import as_path
from trainer_cli.messages import to_console
from trainer_cli.processes import own_command
from trainer_cli.runs import RunDir
from trainer_cli.schema import ANEW, TrainConfig
from trainer_cli.signals import SignalHandlers
from trainer_cli.steps import RunStatus, Unit
from trainer_cli.values import check_duration

log = logging.getLogger(__name__)

_POLL_S = 0.05
"""Seconds between two checks of the child processes."""
_KILL_TIMEOUT_S = 10.0


class Children:
    """Running child processes by name.

    Args:
        log_of: returns the file to which the output of a process with this name is appended; None: the output goes
            where that of this process goes.
    """

    promise = "the running jobs stop after this step, and no other job starts"
    """What happens at a signal, for the message to the user."""

    def __init__(self, log_of: Callable[[str], Path] | None = None) -> None:
        self._log_of = log_of
        self._starter = ProcessStarter()
        self._processes: dict[str, Process] = {}

    def __len__(self) -> int:
        return len(self._processes)

    def state(self, name: str) -> str | None:
        """`running` for a running process, else None."""
        return RunStatus.running if name in self._processes else None

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a process in this process group, so that the terminal's Ctrl-C and Ctrl-Z reach it too."""
        # The starter gives the child a pipe as stdin. It closes when this process ends, however that happens, and then
        # the child saves and stops, which may take a while.
        if self._log_of is None:
            self._processes[name] = self._starter.start(command, env)
            return
        # A file, not a second pipe: a child that saves after the end of this process can still write.
        with open(self._log_of(name), "ab") as log_file:
            self._processes[name] = self._starter.start(command, env, output=log_file.fileno())

    def wait(self) -> Iterator[tuple[str, int]]:
        """Pause, at most until one has ended; then yield each process that has ended, with its exit code."""
        with selectors.DefaultSelector() as selector:
            # A fork tells of its end at once. The next run of a search waits for it.
            for process in self._processes.values():
                if isinstance(process, Forked):
                    selector.register(process, selectors.EVENT_READ)
            selector.select(_POLL_S)
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                self._forget(name, process)
                yield name, code

    def signal(self, number: signal.Signals) -> None:
        """Send every process a signal."""
        for process in self._processes.values():
            process.send_signal(number)

    def kill(self) -> None:
        """Kill every process."""
        for name, process in list(self._processes.items()):
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_TIMEOUT_S)
            self._forget(name, process)

    def close(self) -> None:
        """Start no more. Running processes are left alone: they stop when this process ends."""
        self._starter.close()

    def _forget(self, name: str, process: Process) -> None:
        """Remove a process that has ended."""
        del self._processes[name]
        if process.stdin is not None:
            process.stdin.close()


class Child:
    """Runs one child process after another in a session of its own. While entered, forwards signals to it.

    Args:
        for_ranks: whether it starts the ranks of a run, as forks of the same server.
    """

    def __init__(self, *, for_ranks: bool = False) -> None:
        self.received: list[int] = []
        self._starter = ProcessStarter(for_ranks=for_ranks)
        self._process: Process | None = None
        self._wake = threading.Event()
        self._handlers = SignalHandlers(self._forward)

    @property
    def stopped(self) -> bool:
        """Whether a signal has asked for a stop."""
        return bool(self.received)

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        """Start it, wait for its end, and return its exit code; negative for a signal."""
        # A session of its own: otherwise the terminal sends Ctrl-C to the child too, a second time.
        with self._starter.start(command, env, new_session=True) as process:
            # Before the check below: a signal from here on is forwarded by the handler.
            self._process = process
            # A signal that came before the child existed was not forwarded.
            if self.stopped:
                process.send_signal(signal.SIGTERM)
            try:
                return process.wait()
            finally:
                self._process = None

    def pause(self, seconds: float) -> bool:
        """Wait; True, at once, if a stop was requested."""
        return self._wake.wait(seconds) or self.stopped

    def _forward(self, number: int, frame: object) -> None:
        """Handle a signal: note it, end a pause, and send it to the child."""
        self.received.append(number)
        self._wake.set()
        if self._process is not None:
            self._process.send_signal(number)

    def __enter__(self) -> Child:
        self._handlers.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._starter.close()
        self._handlers.__exit__()


def fit_in_children(config: TrainConfig, again: Sequence[str], *, supervised: bool) -> int:
    """Fit in child processes, and return the exit code.

    Args:
        again: arguments of `train` with which each child fits.
        supervised: whether this process is itself a child that is started again after a failure.
    """
    processes = config.parallel.processes_per_node or 1
    if processes > 1:
        set_rank_variables(processes)
    if config.restarts.max > 0 and not supervised:
        return supervise(config, again)
    return launch_ranks(again, processes)


def supervise(config: TrainConfig, arguments: Sequence[str]) -> int:
    """Fit in child processes until one is done or must not be restarted. Returns the last exit code.

    Args:
        arguments: of `train`, for each child.
    """
    # This process has no log file: train.log is that of the child, which holds the run's lock.
    to_console(config.logging.level)
    backoff = check_duration("restarts.backoff", config.restarts.backoff, units=(Unit.SECOND,))
    backoff_s = 0.0 if backoff is None else float(backoff.value)
    command = own_command(arguments)
    run, failures = RunDir(config.run_dir), 0
    earlier_id = run.run_id if config.resume == ANEW and run.exists_as_run() else None
    folder = run.checkpoints_folder if config.checkpoint.folder is None else as_path(config.checkpoint.folder)
    with Child(for_ranks=(config.parallel.processes_per_node or 1) > 1) as child:
        while True:
            # Progress, not the exit code alone, decides whether another restart makes sense.
            earlier_step = _newest_step(folder)
            code = child.run(command)
            if config.resume == ANEW and run.exists_as_run() and run.run_id != earlier_id:
                # The new run is made: a restart resumes it.
                command = own_command([*arguments, "resume=auto"])
            # After a signal no restart: the user or the scheduler asked for a stop.
            if child.stopped:
                return code if code >= 0 else int(ExitCode.STOPPED_EARLY)
            # From the summary: the exit code alone does not say which error it was.
            reason = str(run.attempts[-1].get("reason") or "") if run.attempts else ""
            decision = decide_restart(
                Ended(code, reason, progressed=_newest_step(folder) > earlier_step),
                failures=failures,
                most=config.restarts.max,
                backoff_s=backoff_s,
            )
            failures = decision.failures
            if decision.pause_s is None:
                if code not in (ExitCode.DONE, ExitCode.STOPPED_EARLY):
                    log.error("not restarted: %s", decision.why)
                return code if code >= 0 else int(ExitCode.FAILED)
            log.warning("the attempt failed (%s); restarting in %g s", decision.why, decision.pause_s)
            if child.pause(decision.pause_s):
                return int(ExitCode.STOPPED_EARLY)


def _newest_step(folder: Path) -> int:
    """The step of the newest checkpoint from which a resume may start; -1 without one."""
    newest = Catalog.of(folder).newest_valid()
    return -1 if newest is None else newest.step
