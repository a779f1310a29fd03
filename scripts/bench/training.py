"""A training of a GPT that is saved while it goes on: `python scripts/bench/training.py JSON SAVER...`.

Prints JSON on its last line: for each saver samples by column, or why there are none. What is measured has a process
for each saver, so that none finds memory of another.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

import disk
import own_checkpointers
from savers import SAVERS, TRAIN, TRAIN_SYNC, Handed, Saver, done
from state import CONTEXT, VOCABULARY, Tree
from timing import Skipped, seconds
from trainer_cli.addons.text.gpt import GPT

Gate = Callable[[], object]
WARM = 12
"""Steps before those that count where saves are made after every few. Two saves are made in them, after the fifth and
the tenth: the first gets the memory for all, and the second is the first that is made with it."""
_WARM_SAVES = (5, 10)


@dataclass(frozen=True, slots=True)
class Plan:
    """How large the model is, how many saves are made, and how many steps of the training there are to each."""

    folder: str
    size: str
    """`smoke`, `quick` or `whole`: of the model."""
    steps: int
    saves: int = 0
    every: Sequence[int] = ()
    """Steps from save to save, each measured over at least `steps`, in place of `saves` single ones."""

    def model(self) -> GPT:
        vocabulary, layers, width = {
            "smoke": (64, 1, 32), "quick": (8_192, 4, 256), "whole": (VOCABULARY, 12, 768),
        }[self.size]  # fmt: skip
        return GPT(vocabulary, CONTEXT, layers=layers, heads=4, width=width)


class Training:
    """Model, optimizer and one batch; a step waits at the gate before it changes a parameter."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(0)
        self.model = plan.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(self.model.tokens.num_embeddings, (1, CONTEXT + 1))
        self.batch = tokens[:, :-1], tokens[:, 1:].contiguous()
        self.gate: Gate | None = None
        for _ in range(3):
            self.step()
        self._named = dict(self.model.named_parameters())

    def step(self) -> None:
        self.model(self.batch)["loss"].backward()
        if self.gate is not None:
            self.gate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> Tree:
        """The live tensors: weights and both moments."""
        kept = self.optimizer.state
        moments: Tree = {
            moment: {name: kept[one][moment] for name, one in self._named.items()}
            for moment in ("exp_avg", "exp_avg_sq")
        }
        return {"model": {name: one.detach() for name, one in self._named.items()}, **moments}


def single_saves(plan: Plan, saver: str) -> dict[str, list[float]]:
    """Each save: what the training waited for it, what it and the stretch of steps behind it took longer than the
    stretches before and after that, which have no save, and when it was durable."""
    training, save, folder = Training(plan), SAVERS[saver](), Path(plan.folder)
    found: dict[str, list[float]] = {"stall": [], "lost": [], "durable": [], "step": []}

    def stretch() -> None:
        for _ in range(plan.steps):
            training.step()

    usual = seconds(stretch)
    for number in range(plan.saves + 1):
        path = folder / f"step{number + 1}"
        began = time.perf_counter()
        handed = save(training.state(), path)
        stall = time.perf_counter() - began
        at_rest = _noted(handed.written)
        waited: list[float] = []
        training.gate = partial(_wait, handed, waited)
        stretch()
        took = time.perf_counter() - began
        training.gate = None
        handed.written.result(timeout=300)
        disk.remove(path)
        before, usual = usual, seconds(stretch)
        if number == 0:  # The first allocates what the others use again.
            continue
        found["stall"].append(stall + sum(waited))
        found["lost"].append(took - (before + usual) / 2)
        found["durable"].append(at_rest[0] - began)
        found["step"].append(usual / plan.steps)
    return found


def frequent_saves(plan: Plan, saver: str) -> dict[str, list[float]]:
    """Milliseconds a step, until the last save is durable, by the steps from save to save; 0 for none at all, before
    and after the others. The first steps are not counted, nor their saves, which prepare what all others use."""
    folder, training = Path(plan.folder), Training(plan)
    by_trainer = saver in (TRAIN_SYNC, TRAIN)
    save = None if by_trainer else SAVERS[saver]()
    took: dict[str, list[float]] = {}
    for number, every in enumerate((0, *plan.every, 0)):
        steps = WARM + max(plan.steps, every)
        place = folder / str(number)
        place.mkdir()
        times = (
            _by_trainer(training, steps, every, place, saver) if save is None
            else _by_hand(training, steps, every, place, save)
        )  # fmt: skip
        took.setdefault(str(every), []).append((times[steps] - times[WARM]) / (steps - WARM) * 1e3)
        disk.remove(place)
    return {every: [mean(samples)] for every, samples in took.items()}


def _by_hand(training: Training, steps: int, every: int, folder: Path, save: Saver) -> list[float]:
    """A plain loop that keeps the newest checkpoint. When each step began, and when all was durable."""
    times: list[float] = []
    newest: Path | None = None
    last: Any = done()
    for step in range(1, steps + 1):
        times.append(time.perf_counter())
        training.step()
        if every and (step in _WARM_SAVES or step % every == 0):
            last.result(timeout=300)
            handed = save(training.state(), folder / f"step{step}")
            training.gate, last = handed.staged, handed.written
            if newest is not None:
                disk.remove(newest)
            newest = folder / f"step{step}"
    training.gate = None
    last.result(timeout=300)
    return [*times, time.perf_counter()]


def _by_trainer(training: Training, steps: int, every: int, folder: Path, saver: str) -> list[float]:
    """The Trainer with its CheckpointerCallback, which keeps the newest ephemeral checkpoint. What the end of a run
    deletes once, however many steps it had, comes after that."""
    from trainer_cli import Callback, Logging, Trainer, TrainingLoop

    times: list[float] = []

    class Stopwatch(Callback):
        def on_train_step_start(self, trainer: Trainer, model: Any, batch: Any) -> None:
            times.append(time.perf_counter())

        def on_fit_end(self, trainer: Trainer, loop: TrainingLoop) -> None:
            times.append(time.perf_counter())

    callback = own_checkpointers.checkpoint_callback(
        folder, asynchronous=saver == TRAIN, enabled=every > 0, save_interval=None,
        ephemeral_save_interval=every or None, fixed_steps=_WARM_SAVES if every else (),
        pre_train_checkpoint=False, save_final=False,
    )  # fmt: skip
    trainer = Trainer(
        model=training.model, optimizer=training.optimizer, checkpoint=callback, callbacks=[Stopwatch()],
        loop=TrainingLoop(max_duration=steps, eval_interval=None),
        logging=Logging(level="error", console="off"),
    )  # fmt: skip
    batches: Any = DataLoader(cast("Any", [training.batch] * steps), batch_size=None)
    trainer.fit(batches, ckpt_path=None)
    return times


def _wait(handed: Handed, waited: list[float]) -> None:
    waited.append(seconds(handed.staged))


def _noted(future: Future[Any]) -> list[float]:
    """When the future is done, by the clock, once it is."""
    times: list[float] = []
    future.add_done_callback(lambda _: times.append(time.perf_counter()))
    return times


@contextmanager
def _answers() -> Iterator[Callable[[Any], None]]:
    """What is printed inside goes to stderr; the answer alone to stdout."""
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        yield lambda answer: print(json.dumps(answer), file=stdout, flush=True)
    finally:
        sys.stdout = stdout


def main(plan: Plan, savers: Sequence[str]) -> None:
    logging.disable(logging.WARNING)
    answers: dict[str, Any] = {}
    with _answers() as answer:
        for number, saver in enumerate(savers):
            folder = Path(plan.folder, str(number))
            folder.mkdir()
            try:
                answers[saver] = (frequent_saves if plan.every else single_saves)(
                    replace(plan, folder=str(folder)), saver
                )
            except Skipped as reason:
                answers[saver] = {"skipped": str(reason)}
        answer(answers)


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])), sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Savers of others leave threads and processes that are not joined.
    os._exit(0)
