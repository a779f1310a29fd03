"""Attempts of a simulated training: the real callback on a real disk and the oracle get the same events."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from faulty_disk import FaultyDisk
from oracle import NOTHING_DONE, Folder, Oracle, RefusedError, Seen

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.state_saver import AFTER_EXCEPTION, RunIdentity
from trainer_cli.checkpoint.writer_thread import WriterThread
from trainer_cli.errors import CheckpointError, SaveError, UserError
from trainer_cli.policy import Occasion
from trainer_cli.steps.intervals import Duration, Interval, StepCounts
from trainer_cli.steps.progress import Progress
from trainer_cli.strategies.strategy import Single
from trainer_cli.trainer.state import checkpoint_state
from trainer_cli.trainer.time_account import TimeAccount

METRIC = "val/loss"
EPOCH_STEPS = 3
EPOCH_SAMPLES = (4, 4, 2)
ELSEWHERE = Path("elsewhere") / "step7"
"""A checkpoint of another run, to begin from."""
FAULTS = {"mkdir": "mkdir", "write": "write", "fsync": "fsync", "names": "fsync_dir", "rename": "rename", "rest": ""}
"""Where a save fails, and at which operation on its hidden folder; `rest`: its name is not brought to rest."""


class _Trained(list[torch.Tensor]):
    """The trained parameters, of which no hook has changed one."""

    def frozen(self) -> list[torch.Tensor]:
        return []

    def state_dict(self) -> dict[str, bool]:
        return {}


class InlineThread(WriterThread):
    """Runs each job before `submit` returns."""

    def _ensure_running(self) -> bool:
        return False


class KilledError(BaseException):
    """The simulated process is dead: no further operation reaches the disk."""


class PerilousDisk(FaultyDisk):
    """Fails within the next save, at an operation given by name, or dies after a number of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: str | None = None
        self.lives: int | None = None
        self._staging = self._renamed = False

    def _do(self, name: str, on: Any, act: Any, half: Any = None) -> Any:
        if self.lives is not None:
            self.lives -= 1
            if self.lives < 0:
                raise KilledError
        hidden = not isinstance(on, int) and os.path.basename(on).startswith(".tmp.")
        if name == "mkdir" and hidden:
            self._staging = True
        fails = self.failing is not None and (
            (self._staging and name == FAULTS[self.failing] and (hidden or isinstance(on, int)))
            or (self.failing == "rest" and self._renamed and name == "fsync_dir")
        )
        if fails:
            self.failing, self._staging, self._renamed = None, False, False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if name == "rename" and hidden:
            self._staging, self._renamed = False, True
        else:
            self._renamed = False
        return act()


@dataclass(frozen=True)
class Step:
    """One optimizer step, and all that happens at it."""

    value: float | None = None
    """What its evaluation measures; None: there is none."""
    end: str | None = None
    """final, stop; owing, last_owing: a stop before the evaluation (of the last step); crash: an exception."""
    asks: bool = False
    holds: bool | None = None
    finite: bool = True
    quarters: int = 4
    """How long it takes, in quarters of a second."""
    fault: str | None = None
    lives: int | None = None
    """The process dies after so many operations on the disk."""
    hand: tuple[str, int] | None = None
    """What somebody does before it to the checkpoint of that number, counted round from the oldest."""


class Attempts:
    """A folder of checkpoints, and one attempt after the other at the training they belong to.

    After each step the folder is compared with what the oracle says. `story` tells what was done.
    """

    def __init__(self, root: Path, *, knows_epochs: bool = True, behind: bool = False) -> None:
        self.root = root / "checkpoints"
        self.oracle = Oracle(EPOCH_STEPS if knows_epochs else None)
        self.loop: Any = SimpleNamespace(
            checkpoint_interval=lambda key, interval: self._interval(interval),
            step_counts=lambda *args, **kwargs: StepCounts(),
            limits=SimpleNamespace(max_duration=Interval(Duration.parse("1e9st"))),
            counts_tokens=False,
        )
        self.number = 0
        self.alive = False
        self.story: list[str] = []
        self.owed: dict[str, float] = {}
        self.refusals = 0
        self.knows_epochs = knows_epochs
        self.behind = behind
        self._epoch_steps = EPOCH_STEPS if knows_epochs else None
        self._weight = torch.nn.Parameter(torch.zeros(1))

    def _interval(self, interval: Any) -> Interval | None:
        return None if interval is None else Interval(Duration.parse(interval), self._epoch_steps)

    # One attempt.

    def begin(
        self,
        settings: Mapping[str, Any],
        *,
        back_to: int | None = None,
        start: str = "auto",
        lives: int | None = None,
        ends: bool = False,
    ) -> bool:
        """Begin an attempt; False where it must not, or was killed. `back_to`: the checkpoint of that number;
        `start`: auto, weights (of another run), all (of its state), anew. `ends`: all steps are made already."""
        self.number += 1
        self.story.append(f"begin {dict(settings)} {back_to=} {start=} {lives=} {ends=}")
        self.held: set[str] = set()
        try:
            with self._perhaps_killed(lives):
                callback = self._callback(settings)
                source = self._source(callback, back_to, start)
                if not self._agree_to_begin(settings, source, start):
                    return False
                self.alive = True
                self._first_moments(source, ends=ends)
        except KilledError:
            self._after_kill()
        else:
            self._compare()
            assert self._hidden() == [], "remains of dead attempts are swept at the start"
            self._compare_kept()
            assert self._counted() == self.oracle.kept(), "what nothing keeps is gone"
        return self.alive

    def _callback(self, settings: Mapping[str, Any]) -> CheckpointerCallback:
        identity = RunIdentity(run_id="ours", attempt=self.number)
        self.callback = CheckpointerCallback(
            self.root, identity=identity, thread=InlineThread("inline"), save_async=self.behind, **settings
        )
        cast("Any", self.callback.storage).disk = self.disk
        return self.callback

    def _source(self, callback: CheckpointerCallback, back_to: int | None, start: str) -> Folder | None:
        """The checkpoint of this run to go on from."""
        self.oracle.past = []
        if back_to is not None or start != "auto":
            there = [folder for folder in self.oracle.by_age() if folder.sound and folder.whole]
            return there[back_to % len(there)] if back_to is not None and there else None
        try:
            wanted = self.oracle.newest()
        except RefusedError:
            wanted = Folder("refused", -1, "", NOTHING_DONE, NOTHING_DONE)
        try:
            found = callback.newest()
        except CheckpointError:
            found = self.root / "refused"
        assert (found and found.name) == (wanted and wanted.name)
        return wanted

    def _interrupt(self) -> None:
        self.trainer.interrupt_requested = True

    def _agree_to_begin(self, settings: Mapping[str, Any], source: Folder | None, start: str) -> bool:
        """Have the callback and the oracle begin, or refuse both."""
        if source is not None and source.step < 0:
            self.refusals += 1
            return False
        self.now = dict(source.now if source else NOTHING_DONE)
        self.before = dict(source.before if source else NOTHING_DONE)
        elsewhere = source is None and start in ("weights", "all")
        if elsewhere and start == "all":
            for _ in range(2):
                self._count(4)
        self.trainer: Any = cast(
            "Any",
            SimpleNamespace(
                progress=self._progress(),
                metric_logger=SimpleNamespace(
                    last={},
                    make_durable=lambda: None,
                    write_out=lambda: None,
                    state_dict=dict,
                    time=TimeAccount(),
                    last_at=lambda step: dict(self.trainer.metric_logger.last),
                ),
                model=SimpleNamespace(
                    parameters=lambda: [self._weight],
                    modules=list,
                    named_modules=lambda **_: [],
                    state_dict=lambda: {"w": self._weight},
                ),
                modes=SimpleNamespace(evaluation_weights=dict),
                optimizers={},
                callbacks={},
                schedulers=SimpleNamespace(state_dict=dict),
                loop=SimpleNamespace(state_dict=dict, has_data=False, microbatches=None),
                step=SimpleNamespace(state_dict=dict),
                module_modes=SimpleNamespace(state_dict=dict, continues=True),
                trained=_Trained([self._weight]),
                loading=SimpleNamespace(kept_generators=lambda: {"seed": 0}),
                scaler=None,
                interrupt_requested=False,
                name="run",
                run_dir=None,
                hooks=SimpleNamespace(call=lambda *args: None),
                strategy=Single(),
                agreement=None,
                loaded_from=self.root / source.name if source else ELSEWHERE if elsewhere else None,
                resumed=source is not None or (elsewhere and start == "all"),
                stop_reason=None,
                interrupt=self._interrupt,
            ),
        )
        self.trainer.checkpoint_state = partial(checkpoint_state, self.trainer)
        if source is not None:
            manifest = json.loads((self.root / source.name / "manifest.json").read_text())
            assert manifest["progress"] == self.trainer.progress.state_dict(), "the checkpoint says what was counted"
        self.callback.setup(self.trainer)
        before = self._everything()
        try:
            self.oracle.begin(settings, self.now["st"], source)
            refused = False
        except RefusedError:
            refused = True
        try:
            self.callback.on_fit_start(self.trainer, None, {}, self.loop)
        except UserError:
            assert refused, "the callback refuses what it should not"
            assert self._everything() == before, "a refusal touches nothing"
            self.refusals += 1
            return False
        assert not refused, "the callback should refuse"
        return True

    def _first_moments(self, source: Folder | None, *, ends: bool) -> None:
        """An evaluation that is owed, the moment before the first step, and an end that has come already."""
        self._weight.data.fill_(0.0)
        late = None if source is None else self.owed.get(source.name)
        self.trainer.metric_logger.last = {} if late is None else {METRIC: late}
        self._moment("pre_train")
        if ends:
            self.trainer.stop_reason = "enough"
            self._moment("final")
            self.alive = False
        else:
            self.callback.on_train_start(self.trainer, cast("Any", None), None, self.loop, 0)
        self.due = self.callback.next_step(self.trainer)

    def step(self, step: Step) -> bool:
        """One step with all that happens at it; False where the attempt is over."""
        self.story.append(str(step))
        assert self.alive
        if step.hand is not None:
            self._by_hand(*step.hand)
        if step.holds is not None:
            (self.held.add if step.holds else self.held.discard)("merge")
            (self.callback.hold_ephemeral if step.holds else self.callback.release_ephemeral)("merge")
        self._count(step.quarters)
        self.trainer.progress = self._progress()
        self._weight.data.fill_(0.0 if step.finite else float("nan"))
        if step.end == "crash":
            return self._crash()
        owes = step.end in ("owing", "last_owing")
        self.trainer.metric_logger.last = {} if step.value is None or owes else {METRIC: step.value}
        if step.asks:
            self.callback.save_requested = self.oracle.save_requested = True
        occasion = {"final": "final", "stop": "stop", "owing": "stop", "last_owing": "last_stop"}.get(
            step.end or "", "step"
        )
        self.trainer.stop_reason = "enough" if step.end else None
        name = f"step{self.now['st']}"
        try:
            with self._perhaps_killed(step.lives):
                self._moment(
                    occasion, fault=step.fault, called=bool(step.end or step.asks or self.trainer.metric_logger.last)
                )
                self.due = self.callback.next_step(self.trainer)
        except KilledError:
            self._after_kill()
        else:
            self._compare()
        if name in self.oracle.folders:
            self.owed.pop(name, None)
            if owes and step.value is not None:
                self.owed[name] = step.value
        if self.alive and step.end:
            self._compare_kept()
            self.callback.finalize()
            self.alive = False
        return self.alive

    def _moment(self, occasion: str, *, fault: str | None = None, called: bool = True) -> None:
        """The callback's moment, which comes only where it said so or something is to be recorded, and the oracle's."""
        metrics = dict(self.trainer.metric_logger.last)
        result = self.oracle.moment(
            occasion,
            self.before,
            self.now,
            metrics=metrics,
            finite=bool(torch.isfinite(self._weight).all()),
            loaded=self.trainer.loaded_from is not None,
            held=bool(self.held),
            fault=fault,
        )
        self.story.append(f"  {occasion} at {self.now['st']}: {result}, {sorted(self.oracle.folders)}")
        if not called and (self.due is None or self.now["st"] < self.due):
            return
        self.disk.failing = fault
        try:
            self.callback.on_save_opportunity(self.trainer, Occasion(occasion))
            if self.trainer.interrupt_requested:
                # As the loop does: the save that was written behind it is taken up before the next step.
                self.trainer.interrupt_requested = False
                self.callback.on_save_opportunity(self.trainer, Occasion.step)
            self.callback.drain()
        except SaveError:
            assert result == "raised", f"the callback gives up, but {result} is right"
            self.alive = False
        else:
            assert result != "raised", "the callback should give up"
        finally:
            self.disk.failing = None
        assert self.callback.save_requested == self.oracle.save_requested

    def _crash(self) -> bool:
        self.oracle.failed(self.now["st"])
        self.callback.on_fit_exception(self.trainer, ArithmeticError("out of luck"))
        self._compare()
        apart = self.root / AFTER_EXCEPTION
        assert ([path.name for path in apart.iterdir()] if apart.exists() else []) == (
            [self.oracle.apart] if self.oracle.apart else []
        )
        self.alive = False
        return False

    # What people do.

    def _by_hand(self, what: str, number: int) -> None:
        if what == "partial":
            (self.root / f"step{self.now['st'] + 1 + number}").mkdir(parents=True, exist_ok=True)
            return
        folders = self.oracle.by_age()
        if not folders:
            return
        folder = folders[number % len(folders)]
        path = self.root / folder.name
        if what == "pin":
            (path / "pinned").touch()
            folder.pinned = True
        elif what == "unpin":
            (path / "pinned").unlink(missing_ok=True)
            folder.pinned = False
        elif what == "delete":
            shutil.rmtree(path)
            del self.oracle.folders[folder.name]
        elif what == "flip":
            tensors = path / "rank0.safetensors"
            data = bytearray(tensors.read_bytes())
            data[-1] ^= 1 if folder.sound else 0
            tensors.write_bytes(data)
            folder.sound = False
        elif what == "cut":
            os.truncate(path / "rank0.safetensors", 8)
            folder.whole = folder.sound = False

    def clear_by_hand(self) -> None:
        """Somebody removes all checkpoints of the run."""
        for name in self.oracle.folders:
            shutil.rmtree(self.root / name)
        self.oracle.folders = {}
        self.refusals = 0

    # What is counted.

    def _count(self, quarters: int) -> None:
        step = self.now["st"] + 1
        self.before = dict(self.now)
        self.now = {
            "st": step,
            "ep": step // EPOCH_STEPS,
            "sp": self.now["sp"] + EPOCH_SAMPLES[(step - 1) % EPOCH_STEPS],
            "tok": self.now["tok"] + 5 + step % 4,
            "s": self.now["s"] + quarters,
        }

    def _progress(self) -> Progress:
        now, before = self.now, self.before
        return Progress(
            step=now["st"],
            epoch=now["ep"],
            batch=now["st"] % EPOCH_STEPS,
            samples=now["sp"],
            tokens=now["tok"],
            seconds=now["s"] / 4,
            last_samples=before["sp"],
            last_tokens=before["tok"],
            last_seconds=before["s"] / 4,
            last_epoch=before["ep"],
        )

    # What is on the disk.

    @contextmanager
    def _perhaps_killed(self, lives: int | None) -> Iterator[None]:
        if lives is not None or not self.alive:
            if not self.alive:
                self.disk = PerilousDisk()
            self.disk.lives = lives
        yield

    def _after_kill(self) -> None:
        self.story.append("  killed")
        self.alive = False
        found = self.found()
        assert self.oracle.killed(found), f"a kill left {found}, which is none of the states on the way"

    def _compare(self) -> None:
        assert self.found() == self.oracle.seen

    def _compare_kept(self) -> None:
        """The callback itself names what is kept. More may be there: what was unpinned stays until a save."""
        lives, self.disk.lives = self.disk.lives, None
        assert self.callback.kept().keys() == self.oracle.kept() <= self._counted()
        self.disk.lives = lives

    def _counted(self) -> set[str]:
        return {folder.name for folder in self.oracle.counted()}

    def found(self) -> dict[str, Seen]:
        """The run's checkpoints on the disk, read without any of the code that is tested."""
        seen: dict[str, Seen] = {}
        for name in os.listdir(self.root) if self.root.exists() else []:
            if name.startswith("."):
                continue
            try:
                with open(self.root / name / "manifest.json", "rb") as file:
                    manifest = json.load(file)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if manifest["run_id"] != "ours":
                continue
            assert name == f"step{manifest['step']}"
            pinned = os.path.exists(self.root / name / "pinned")
            finished = manifest["finished"] is not None
            seen[name] = (manifest["kind"], pinned, finished, manifest["finite"], frozenset(manifest["metrics"]))
        return seen

    def _hidden(self) -> list[str]:
        names = os.listdir(self.root) if self.root.exists() else []
        return [
            name for name in names if name.startswith(".") and not name.startswith(".aside.") and ".theirs." not in name
        ]

    def _everything(self) -> set[tuple[str, int]]:
        """Every file of every whole checkpoint, anybody's."""
        folders = [path.parent for path in self.root.glob("[!.]*/manifest.json")]
        return {(str(path), path.stat().st_mtime_ns) for folder in folders for path in folder.iterdir()}


@contextmanager
def quiet() -> Iterator[None]:
    """Thousands of histories say nothing."""
    log = logging.getLogger("trainer_cli")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)
