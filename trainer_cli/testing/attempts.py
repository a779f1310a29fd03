"""One run of a resume check, stopped and started again: its config, its processes in order, and their results."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer_cli.config.compose import Composed
from trainer_cli.config.schema import CheckpointConfig
from trainer_cli.errors import ExitCode, TrainError, UserError
from trainer_cli.testing import calls, trace
from trainer_cli.testing.calls import Call
from trainer_cli.testing.probe import ERROR
from trainer_cli.testing.processes import Run
from trainer_cli.testing.trace import OWN_FAILURE, SAVED_STEP, Plan, Stop, Trace, When
from trainer_cli.trainer.duration import Duration, Unit

_KILLED = -9


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process: where it should stop, how it ended, and its trace."""

    stop: Stop | None
    code: int
    trace: Trace
    output: str

    @property
    def came(self) -> bool:
        """It was stopped as planned, or reached the end where no stop was planned."""
        if self.stop is None:
            return self.code == ExitCode.DONE
        return self.code == (_KILLED if self.stop.when is When.accumulating else ExitCode.STOPPED_EARLY)

    @property
    def failed(self) -> bool:
        """It ended neither by its stop nor at the training's end."""
        return not self.came and self.code != ExitCode.DONE

    @property
    def message(self) -> str:
        """The error message of a failed process, or the last line of its traceback."""
        _, found, message = self.output.rpartition(ERROR)
        if found:
            return re.sub(r",? ?\(?[^\s(]*/config\.yaml:\d+\)?", "", message).strip()
        lines = [line for line in self.output.splitlines() if line.strip()]
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
        return TrainError(f"the training fails without any stop:\n{self.output.strip()}\n")


@dataclass(frozen=True, slots=True)
class Chain:
    """A run and its stops. `attempts` ends where one did not come to its planned end."""

    stops: Sequence[Stop]
    attempts: Sequence[Attempt]
    calls: Sequence[Call] = ()

    @property
    def planned(self) -> list[Stop | None]:
        """The stop of each attempt; the last has none."""
        return planned(self.stops)

    def around(self, stop: Stop) -> list[Attempt]:
        """The attempt that ends with this stop, and those up to the next one that trains."""
        first = self.planned.index(stop)
        return list(self.attempts[first : first + 2 + stop.twice])


def planned(stops: Sequence[Stop]) -> list[Stop | None]:
    """The stop of each attempt that a run needs."""
    found: list[Stop | None] = []
    for stop in stops:
        found += [stop, Stop(When.at_once)] if stop.twice else [stop]
    return [*found, None]


class Runner:
    """Makes runs of one experiment in a scratch folder."""

    def __init__(
        self,
        composed: Composed,
        scratch: Path,
        steps: int,
        config_dir: Path | None,
        run: Run,
        show: Callable[[str], None],
    ) -> None:
        self._composed, self._scratch, self._steps = composed, scratch, steps
        self._config_dir = None if config_dir is None else config_dir.resolve()
        self._run, self._show = run, show
        self.started = 0

    def chain(
        self,
        name: str,
        stops: Sequence[Stop] = (),
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
        saved = [SAVED_STEP] if any(stop.when is When.accumulating for stop in stops) else []
        plan_file, noted = folder / "plan.json", folder / "calls.jsonl"
        config = freeze(self._composed, folder, steps=self._steps, plan=plan_file, fixed_steps=saved, **changes)
        attempts: list[Attempt] = []
        for number, stop in enumerate(planned(stops)):
            plan = Plan(config, folder / f"trace{number}.jsonl", self._config_dir, stop, noted if notes else None)
            plan.write(plan_file)
            output = folder / f"output{number}.txt"
            self.started += 1
            self._show(f"process {self.started}: {name}")
            code = self._run(plan_file, output)
            text = output.read_text("utf-8", errors="replace")
            attempts.append(Attempt(stop, code, trace.read(plan.trace), text))
            if not attempts[-1].came or not resumed(Chain(stops, attempts)):
                break
        return Chain(stops, attempts, calls.read(noted))


RECORDER = "resume_check"
_SAVER = "checkpoint"


def freeze(
    composed: Composed, folder: Path, *, steps: int, plan: Path, fixed_steps: Sequence[int] = (), **changes: Any
) -> Path:
    """Write the config into a folder, and return its path. `changes` are values by dotted key (dots as `__`)."""
    tree: Any = OmegaConf.to_container(composed.raw, resolve=False)
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
        "max_time": None,
        "eval_interval": max(1, steps // 4),
        "eval_steps": min(2, config.loop.eval_steps or 2),
        "log_interval": max(1, steps // 3),
    }
    checkpoint |= {
        "enabled": True,
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
        RECORDER: {"_target_": "trainer_cli.testing.recorder.Recorder", "plan": str(plan)},
        **(tree["callbacks"] or {}),
    }
    if isinstance(saver := callbacks.get(_SAVER), Mapping):
        own = {one.name for one in fields(CheckpointConfig)}
        callbacks[_SAVER] = {key: value for key, value in saver.items() if key not in own}
    tree |= {
        "run_dir": str(folder / "run"),
        "resume": "auto",
        "loop": loop,
        "checkpoint": checkpoint,
        "callbacks": callbacks,
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
