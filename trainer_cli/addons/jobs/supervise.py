"""Compose the config of a fit, choose the process that trains it, and run child processes.

A config is trained in this process, in child processes that are restarted after a failure (`restarts.max`), or in one
process per rank.

    this process:  start a child -> wait -> ask `decide_restart` -> pause -> start the next child …
    the child:     an ordinary `train fit`, which resumes; it ends when this process is gone

A signal is forwarded to the child, which saves and exits with 75. During a pause it ends this process with 75.

The stdin of a child is a pipe whose other end only the parent holds. When the parent ends for any reason, the pipe
closes, and a child that called `stop_with_parent` stops as at a SIGTERM: it saves and exits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from trainer_cli.addons.jobs.fork_server import Process, ProcessStarter, own_command
from trainer_cli.addons.jobs.launch import launch_ranks, set_rank_variables
from trainer_cli.addons.jobs.restart import Ended, decide_restart
from trainer_cli.addons.jobs.sweep_jobs import text_of
from trainer_cli.catalog import Catalog
from trainer_cli.config import Composed, compose, from_yaml, given_value, share_moment
from trainer_cli.errors import ExitCode, UserError
from trainer_cli.files import as_path
from trainer_cli.messages import to_console
from trainer_cli.parallel import (
    ALONE,
    LostRankError,
    PeerError,
    ProcessGroup,
    is_of_peer,
    join_processes,
    noted_activity,
    noting,
)
from trainer_cli.ranks import (
    is_restarted,
    read_ranks,
    refuse_other_processes,
    tasks_of_mpi,
    tasks_without_srun,
)
from trainer_cli.runs import RunDir
from trainer_cli.schema import ANEW, RESUME_WORDS, TrainConfig
from trainer_cli.selection import ckpt_argument, run_of
from trainer_cli.signals import SignalHandlers
from trainer_cli.steps import RunStatus, Unit
from trainer_cli.terminal import format_count
from trainer_cli.values import check_duration

log = logging.getLogger(__name__)


def compose_fit(overrides: Sequence[str], *, config_dir: Path | None = None, config_name: str = "config") -> Composed:
    """Compose the config of a fit.

    With `resume=RUN`, `resume=RUN@step500` and the like it is the config of that run, with the overrides on top.

    Raises:
        UserError: they name another run than `resume=` does.
    """
    named = given_value(overrides, "resume")
    names_checkpoint = named is not None and named not in RESUME_WORDS
    if named is not None and names_checkpoint:
        run = run_of(named)
        directory = RunDir(run)
        if directory.exists_as_run():
            changes = [override for override in overrides if not override.startswith("resume=")]
            _refuse_other_run(directory, named, changes)
            resume = "must" if run == named else text_of(named)
            # The run may have been moved: its config still names the directory in which it began.
            changes += [f"run_dir={text_of(str(directory.path))}", f"resume={resume}"]
            return from_yaml(directory.config_file, changes, config_dir=config_dir, config_name=config_name)
    composed = compose(overrides, config_dir=config_dir, config_name=config_name)
    # Otherwise the run that `resume=` names does not exist, and a later check reports that.
    if not names_checkpoint:
        composed.refuse_shipped_default()
    return composed


def _refuse_other_run(run: RunDir, named: str, changes: Sequence[str]) -> None:
    """Refuse a `name` or `run_dir` of another run beside `resume=RUN`, which continues that run."""
    name, directory = given_value(changes, "name"), given_value(changes, "run_dir")
    other = None
    if name is not None and "{" not in name and name != run.path.name:
        stored = from_yaml(run.config_file, trusted=True, missing_ok=True).config.name
        other = f"name={name}" if name != stored else None
    if directory is not None and "{" not in directory and Path(directory).resolve() != run.path.resolve():
        other = f"run_dir={directory}"
    if other is not None:
        fork = shlex.join(["train", "fit", *changes]) + (
            "" if given_value(changes, "ckpt") else f" {ckpt_argument(named)}"
        )
        raise UserError(
            f"resume={named} continues the run {run.path}, and {other} names another",
            where="resume",
            cure=f"To begin that one with these weights: `{fork}`; to continue {run.path}, leave {other} out.",
        )


def fit_in_processes(
    compose: Callable[[], Composed], again: Sequence[str], *, supervised: bool, allow_pickle: bool = False
) -> int:
    """Fit, and return the exit code.

    Args:
        compose: composes the config; called once, on rank 0.
        again: arguments of `train` with which a child process does the same; it ends with this process.
        supervised: this process is such a child.
    """
    with share_moment():
        return _fit_in_processes(compose, again, supervised=supervised, allow_pickle=allow_pickle)


def _fit_in_processes(
    compose: Callable[[], Composed], again: Sequence[str], *, supervised: bool, allow_pickle: bool
) -> int:
    ranks = read_ranks(os.environ)
    if ranks.world_size > 1:

        def composed_by_main() -> Composed:
            composed = _resume_if_restarted(compose())
            refuse_other_processes(ranks, composed.config.parallel.processes_per_node)
            composed.check_processes(ranks.world_size)
            return composed

        return run_as_rank(composed_by_main, partial(_fit, allow_pickle=allow_pickle))
    composed = _resume_if_restarted(compose())
    config = composed.config
    processes = config.parallel.processes_per_node or 1
    # Once, here: each child would find the same mistake, after it has imported torch.
    if not supervised and (config.restarts.max > 0 or processes > 1):
        _refuse_early(composed, processes)
    mpi_rank, mpi_size = tasks_of_mpi(os.environ) or (0, 1)
    if mpi_size > 1 and mpi_rank == 0 and not supervised:
        print(
            f"train: warning: mpirun has started {format_count(mpi_size, 'process')}, whose ranks are not used: each "
            "trains alone; start them by torchrun or srun",
            file=sys.stderr,
        )
    if processes > 1:
        set_rank_variables(processes)
    if config.restarts.max > 0 and not supervised:
        return supervise(config, again)
    if processes > 1:
        return launch_ranks(again, processes)
    if config.parallel.strategy != "single" and (tasks := tasks_without_srun(os.environ)) is not None:
        print(
            f"train: warning: the Slurm job has {tasks} tasks, but srun did not start this process: it trains alone",
            file=sys.stderr,
        )
    elif config.parallel.strategy == "ddp" and config.parallel.processes_per_node is None:
        print(
            "train: warning: parallel=ddp trains in this process alone: for two add parallel.processes_per_node=2, or "
            "start torchrun --nproc-per-node 2 -m trainer_cli fit NAME parallel=ddp",
            file=sys.stderr,
        )
    if config.parallel.strategy == "fsdp":
        # One process needs a group, too.
        return run_as_rank(lambda: composed, partial(_fit, allow_pickle=allow_pickle))
    return _fit(composed, ALONE, allow_pickle=allow_pickle)


def _resume_if_restarted(composed: Composed) -> Composed:
    """Without `resume=anew` where Slurm or torchrun starts the command again, which would move the new run away."""
    if composed.config.resume == ANEW and is_restarted(os.environ):
        return composed.with_values({"resume": "auto"})
    return composed


def _fit(composed: Composed, group: ProcessGroup, *, allow_pickle: bool) -> int:
    # Imported here: a mistake in the config is reported before torch is imported.
    from trainer_cli.running import fit

    return fit(composed, allow_pickle=allow_pickle, group=group)


def _refuse_early(composed: Composed, processes: int) -> None:
    """Check the config and the run directory once, before each child process would report the same error.

    Raises:
        TrainError: `fit` would refuse them.
    """
    from trainer_cli.running import accepted_changes, refuse_no_optimizer
    from trainer_cli.runs import RunDir

    with composed.placing():
        refuse_no_optimizer(composed)
        composed.check_processes(processes)
        run = RunDir(composed.config.run_dir)
        if run.exists_as_run() and composed.config.resume != ANEW:
            accepted_changes(run, composed)


def run_as_rank(compose: Callable[[], Composed], work: Callable[[Composed, ProcessGroup], int]) -> int:
    """Do the work of one of the processes that torchrun or srun has started, with the config that rank 0 composes.

    Only the rank that fails reports the error; all ranks exit with its code.

    Args:
        work: called on every rank; returns the exit code.
    """
    # If rank 0, which serves the store, ends first, torch logs a warning of thirty lines on each other rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        group = join_processes(os.environ, alone_too=True)
    except PeerError as error:
        return _after_a_peer(error, ALONE)
    try:
        with noting("while rank 0 composed the config"):
            composed = group.on_main(compose)
        # Only now: the limit is in the config, which rank 0 has just sent.
        group.set_timeout(composed.config.parallel.timeout_s)
        code = work(composed, group)
        # A launcher kills all ranks when one exits with 75, and rank 0 may still be writing the summary.
        with noting("while the ranks ended"):
            group.barrier()
        return code
    except Exception as error:
        if is_of_peer(error):
            return _after_a_peer(error, group)
        # The first rank to claim reports; on the others the same error would only repeat it.
        if not group.claim_failure(error):
            return int(getattr(error, "exit_code", ExitCode.FAILED))
        if not group.is_main:
            print(f"train: on rank {group.rank} of {group.world_size}:", file=sys.stderr)
        raise
    finally:
        group.close()


def _after_a_peer(error: Exception, group: ProcessGroup) -> int:
    """The exit code after another rank failed. The first rank that notices the loss reports it."""
    if not isinstance(error, PeerError):
        error = group.lost_error(noted_activity(error, "while the run was started"))
    if isinstance(error, LostRankError) and group.claim_failure():
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


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
        # The open end of the pipe to its stdin is what tells the child that this process lives.
        if self._log_of is None:
            self._processes[name] = self._starter.start(command, env)
            return
        # Not by a pipe: a child that outlives this process can still write.
        with open(self._log_of(name), "ab") as log_file:
            self._processes[name] = self._starter.start(command, env, output=log_file.fileno())

    def wait(self) -> Iterator[tuple[str, int]]:
        """Pause; then yield each process that has ended, with its exit code."""
        time.sleep(_POLL_S)
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


def stop_with_parent() -> None:
    """Stop this process as at a SIGTERM when its stdin ends. Nothing else can read stdin afterwards."""
    # stdin becomes /dev/null, so that neither the user's code nor a debugger reads from the pipe.
    watched = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(watched, 1):
                pass
        # To the main thread, so that a blocking call in it is interrupted.
        signal.pthread_kill(main, signal.SIGTERM)

    # A daemon: it blocks in a read that nothing ends when the training is done.
    threading.Thread(target=watch, name="stop-with-parent", daemon=True).start()


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
            before = _newest_step(folder)
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
                Ended(code, reason, progressed=_newest_step(folder) > before),
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
