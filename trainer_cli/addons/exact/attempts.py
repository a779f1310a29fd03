"""Run a resume check: trainings that are stopped and started again, each in processes of their own.

On Linux a process is forked from one of two interpreters that have imported torch and this package and nothing else, in
a fraction of the time of a start. The two have different hash seeds, so that a dependence on the order of sets shows.
On other systems each process is a new interpreter. Processes that are left at the end are killed.
"""

from __future__ import annotations

import gc
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer_cli.addons.exact.digests import Call, read_calls
from trainer_cli.addons.exact.trace import OWN_FAILURE, SAVED_STEP, ProbePlan, ProbeStop, StopPlace, Trace, read_trace
from trainer_cli.auto_values import auto_keys
from trainer_cli.config import Composed, from_yaml
from trainer_cli.errors import ExitCode, TrainError, UserError
from trainer_cli.layout import CONFIG_FILE
from trainer_cli.running import values_found
from trainer_cli.schema import CheckpointConfig
from trainer_cli.steps import Duration, Unit

ERROR = "train: error: "


def run_probe(path: str) -> int:
    """Run the plan in a file, and return the exit code of the fit."""
    from trainer_cli.parallel import join_processes
    from trainer_cli.running import fit

    plan = ProbePlan.read(path)
    try:
        composed = from_yaml(
            # Samples that differ after a resume are what the check looks for.
            plan.config,
            ["resume_allow=[data]"],
            trusted=True,
            config_dir=plan.config_dir,
        )
        with ExitStack() as stack:
            if plan.calls is not None:
                from trainer_cli.addons.exact.digests import record_calls

                stack.enter_context(record_calls(plan.calls, composed.project_root))
            if composed.config.parallel.strategy != "fsdp":
                return fit(composed, suggests_replay=False)
            # It needs a group, also for one process.
            group = join_processes({}, alone_too=True)
            stack.callback(group.close)
            return fit(composed, group=group, suggests_replay=False)
    except TrainError as error:
        print(f"{ERROR}{error}", file=sys.stderr)
        return int(error.exit_code)
    except Exception:
        traceback.print_exc()
        return int(ExitCode.FAILED)


def serve(*, forks: bool = True) -> None:
    """Run a probe for each line of JSON, and print its exit code.

    No thread may run and no tensor be computed here, so that the children can fork safely. The compiler, whose import
    takes as long as torch's, is imported once a child has needed it.

    Args:
        forks: whether the process of a probe is a fork of this one, which imports everything first.
    """
    if forks:
        from trainer_cli import torch_compat
        from trainer_cli.addons.exact import recorder  # noqa: F401
        from trainer_cli.running import Builder, fit  # noqa: F401

        # A collection in a fork would write to every object, and so copy the memory that the forks share.
        gc.collect()
        gc.freeze()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    for line in sys.stdin:
        request = json.loads(line)
        # Appended, as by two processes at once: data workers write to it too.
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if not forks:
            probe = _interpreter(f"sys.exit(run_probe({request['plan']!r}))")
            code = subprocess.call(
                probe, cwd=request["cwd"], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        else:
            # In this process, so that every later fork has them.
            for module in request["imports"]:
                import_module(module)
            child = os.fork()
            if child == 0:
                code = int(ExitCode.FAILED)
                try:
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    os.dup2(output, 1)
                    os.dup2(output, 2)
                    os.chdir(request["cwd"])
                    code = run_probe(request["plan"])
                    if torch_compat.has_compiler():
                        os.write(writer, b"1")
                finally:
                    # Not sys.exit: exit handlers of this process are not for its forks.
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with suppress(BlockingIOError):
                if os.read(reader, 1):
                    torch_compat.import_compiler()
        os.close(output)
        print(code, flush=True)


RunProbe = Callable[[Path, Path], int]
"""Runs the plan in a file in a process of its own, whose output goes to the second file.

It returns the exit code, or minus the signal that killed the process."""


class Probes:
    """Runs probes by two interpreters, one at a time by each.

    Args:
        cwd: the current folder of the probes.
        forks: whether probes are forks of these interpreters. On macOS a fork of a process that has loaded its
            frameworks may not use them.
    """

    def __init__(self, cwd: Path, *, forks: bool = sys.platform == "linux") -> None:
        self._cwd = cwd
        # Two have two hash seeds.
        self._servers = [
            subprocess.Popen(
                _interpreter(f"serve(forks={forks})"),
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Of its own: Ctrl-C does not reach it, and `close` ends the probes and their data workers with it.
                process_group=0,
            )
            for _ in range(2)
        ]
        self._free: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        for server in self._servers:
            self._free.put(server)

    def __call__(self, plan: Path, output: Path, cwd: Path | None = None, imports: Sequence[str] = ()) -> int:
        """See `RunProbe`. `imports`: heavy modules that this process and later ones need, imported once before the
        fork."""
        server = self._free.get()
        try:
            assert server.stdin is not None and server.stdout is not None
            request = {"plan": str(plan), "output": str(output), "cwd": str(cwd or self._cwd), "imports": list(imports)}
            # It exists even where the process is killed before it starts.
            output.touch()
            with suppress(BrokenPipeError):
                server.stdin.write(json.dumps(request).encode() + b"\n")
                server.stdin.flush()
            answer = server.stdout.readline()
            # Without an answer the server was killed.
            return int(answer) if answer else -int(signal.SIGKILL)
        finally:
            self._free.put(server)

    def close(self) -> None:
        """Kill what still runs, data workers included."""
        for server in self._servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            for pipe in (server.stdin, server.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


def _interpreter(call: str) -> list[str]:
    """The command of an interpreter that makes a call of this module."""
    # Last on the path, so that it shadows no module of the user's.
    path = f"import sys; sys.path.append({str(Path(__file__).resolve().parents[3])!r})"
    return [sys.executable, "-P", "-c", f"{path}; from {__name__} import run_probe, serve; {call}"]


_KILLED = -9
_TRACEBACK = "Traceback (most recent call last):\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAttempt:
    """One process: where it should stop, how it ended, and its trace."""

    stop: ProbeStop | None
    """Where it should stop; None: nowhere."""
    after: ProbeStop | None
    """The stop of the process before it, which had made steps; None: this process begins the run."""
    code: int
    trace: Trace
    output: str

    @property
    def ended_as_planned(self) -> bool:
        """It was stopped as planned, or reached the end where no stop was planned."""
        if self.stop is None:
            return self.code == ExitCode.DONE
        return self.code == (_KILLED if self.stop.when is StopPlace.accumulating else ExitCode.STOPPED_EARLY)

    @property
    def failed(self) -> bool:
        """It ended neither by its stop nor at the training's end."""
        return not self.ended_as_planned and self.code != ExitCode.DONE

    @property
    def message(self) -> str:
        """The error message of a failed process, or the error of its traceback."""
        _, prefix, message = self.output.rpartition(ERROR)
        if prefix:
            # The path of the frozen config says nothing to the user.
            return re.sub(r",? ?\(?[^\s(]*/config\.yaml:\d+\)?", "", message).strip()
        _, is_traceback, traceback = self.output.rpartition(_TRACEBACK)
        lines = [line for line in traceback.splitlines() if line.strip()]
        if is_traceback:
            # The frames are indented, and notes follow the error.
            return next((line for line in lines if not line.startswith(" ")), "")
        return lines[-1].strip() if lines else f"it ended with exit code {self.code}"

    @property
    def is_own_failure(self) -> bool:
        """Whether the check failed, and not the training."""
        return self.failed and OWN_FAILURE in self.output

    def error(self) -> TrainError:
        """Its failure as an error of this process."""
        if self.is_own_failure:
            return TrainError(self.message)
        if self.code == ExitCode.USER:
            return UserError(self.message)
        return TrainError(f"the run fails without any stop:\n{self.output.strip()}\n")


@dataclass(frozen=True, slots=True)
class Chain:
    """A run and its stops. `attempts` ends where one did not come to its planned end."""

    stops: Sequence[ProbeStop]
    attempts: Sequence[ProbeAttempt]
    calls: Sequence[Call] = ()

    @property
    def trained(self) -> list[ProbeAttempt]:
        """Those that recorded something."""
        return [attempt for attempt in self.attempts if attempt.trace.records]

    def around(self, stop: ProbeStop) -> list[ProbeAttempt]:
        """The attempt that ends with this stop, and those up to the next one that trains."""
        return [attempt for attempt in self.attempts if stop in (attempt.stop, attempt.after)]


class Runner:
    """Makes runs of one experiment in a scratch folder."""

    def __init__(
        self,
        composed: Composed,
        scratch: Path,
        steps: int,
        config_dir: Path | None,
        run: RunProbe,
        show: Callable[[str], None],
    ) -> None:
        self._composed, self._scratch, self._steps = composed, scratch, steps
        self._config_dir = None if config_dir is None else config_dir.resolve()
        self._run, self._show = run, show
        self.started = 0

    def chain(
        self,
        name: str,
        stops: Sequence[ProbeStop] = (),
        *,
        notes: bool = False,
        resumed: Callable[[Chain], bool] = lambda chain: True,
        **changes: Any,
    ) -> Chain:
        """Make a run with these stops.

        `notes`: record calls of clocks and unseeded generators. `resumed` decides after each process whether to make
        the next one. `changes` are values of the config, as in `freeze`.
        """
        folder = self._scratch / name
        folder.mkdir()
        saved = [SAVED_STEP] if any(stop.when is StopPlace.accumulating for stop in stops) else []
        plan_file, noted = folder / "plan.json", folder / "calls.jsonl"
        config = freeze(self._composed, folder, steps=self._steps, plan=plan_file, fixed_steps=saved, **changes)
        attempts: list[ProbeAttempt] = []
        after: ProbeStop | None = None
        planned = [part for stop in stops for part in ([stop, ProbeStop(StopPlace.at_once)] if stop.twice else [stop])]
        for number, stop in enumerate([*planned, None]):
            plan = ProbePlan(config, folder / f"trace{number}.jsonl", self._config_dir, stop, noted if notes else None)
            plan.write(plan_file)
            output = folder / f"output{number}.txt"
            self.started += 1
            self._show(f"process {self.started}: {name}")
            code = self._run(plan_file, output)
            text = output.read_text("utf-8", errors="replace")
            attempt = ProbeAttempt(stop=stop, after=after, code=code, trace=read_trace(plan.trace), output=text)
            attempts.append(attempt)
            if not attempt.ended_as_planned or not resumed(Chain(stops, attempts)):
                break
            if stop in stops:
                after = stop
        return Chain(stops, attempts, read_calls(noted))

    def keep_found_values(self, name: str) -> None:
        """Give later runs the values that a run has found for keys that are `auto`."""
        if auto_keys(self._composed.config):
            stored = from_yaml(self._scratch / name / "run" / CONFIG_FILE, trusted=True, missing_ok=True)
            self._composed = self._composed.with_values(values_found(self._composed, stored))


RECORDER = "resume_check"
_SAVER = "checkpoint"


def freeze(
    composed: Composed, folder: Path, *, steps: int, plan: Path, fixed_steps: Sequence[int] = (), **changes: Any
) -> Path:
    """Write the config into a folder, and return its path. `changes` are values by dotted key (dots as `__`)."""
    tree = composed.raw
    config = composed.config
    loop, checkpoint = dict(tree["loop"]), dict(tree["checkpoint"])
    accum = config.loop.grad_accum_steps
    epoch = math.ceil(0.4 * steps)
    # With accumulation, the last step of an epoch has one batch less, as in most trainings.
    batches = epoch if accum == 1 else (epoch - 1) * accum + 1
    loop |= {
        "limit_train_batches": batches,
        "max_duration": _long_enough(config.loop.max_duration),
        "hard_stop": steps,
        # No stop by the clock: it would come at another step in each run.
        "max_time": None,
        "eval_interval": max(1, steps // 4),
        "eval_steps": min(2, config.loop.eval_steps or 2),
        "log_interval": max(1, steps // 3),
    }
    checkpoint |= {
        "enabled": True,
        # Saves only where the plan stops: a save more would hide what a stop loses.
        "save_interval": None,
        "ephemeral_save_interval": None,
        "ephemeral_cooldown": None,
        "fixed_steps": list(fixed_steps),
        "pre_train_checkpoint": False,
        "save_final": False,
        "save_on_stop": True,
        # What is checked is the training; a resume without a state is not exact by request.
        "leave_out": [],
    }
    callbacks = {
        # First, so that it records state before other callbacks change it.
        RECORDER: {"_target_": "trainer_cli.addons.exact.recorder.Recorder", "plan": str(plan)},
        **(tree["callbacks"] or {}),
    }
    if isinstance(saver := callbacks.get(_SAVER), Mapping):
        # Settings of the saver would win over those of the section, which the check sets.
        settings = {field.name for field in fields(CheckpointConfig)}
        callbacks[_SAVER] = {key: value for key, value in saver.items() if key not in settings}
    tree |= {
        "run_dir": str(folder / "run"),
        "resume": "auto",
        "loop": loop,
        "checkpoint": checkpoint,
        "callbacks": callbacks,
        # What a log shows is no state, and its files take time.
        "loggers": {},
        "logging": {"level": "warning", "console": "off"},
    }
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (tree[section] if section else tree)[name] = value
    path = folder / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(tree)), "utf-8")
    return path


def _long_enough(duration: Any) -> Any:
    """At least three epochs, since epochs are short here; other units unchanged."""
    parsed = Duration.parse(duration)
    return "3ep" if parsed.unit is Unit.EPOCH and parsed.value < 3 else duration
