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
from typing import Any

import torch
from torch.utils.data import DataLoader

import disk
import ours
from savers import BESIDE, SAVERS, TORCH, Handed, done
from state import CONTEXT, VOCABULARY, Tree
from timing import Skipped, seconds
from trainer_cli.models.gpt import GPT

Gate = Callable[[], None]
EVERY = 5
"""Steps to a save, where not each has one."""
WARM = 12
"""Steps before those that count: two saves where one is made after every fifth step. The first gets the memory for all,
and the second is the first that is made with it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How large the model is, how many saves are made, and how many steps of the training there are to each."""

    folder: str
    size: str
    """`smoke`, `quick` or `whole`: of the model."""
    saves: int
    steps: int
    often: bool
    """Saves after every step and every fifth of many, in place of single ones."""
    batch: int = 1
    """Sequences a step: more make it longer, and the state no larger."""

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
        tokens = torch.randint(self.model.tokens.num_embeddings, (plan.batch, CONTEXT + 1))
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
    """Seconds a step, until the last save is durable, with one after every fifth, after every step, and, before and
    after these, without any. The first steps are not counted, nor their saves, which get ready what all others use.

    `between`: a step of those with one after every fifth that comes when it has long been written.
    """
    folder, training = Path(plan.folder), Training(plan)
    runner = _by_hand if saver in (TORCH, BESIDE) else _by_trainer
    took: dict[str, list[float]] = {}
    for name, every in (("no saves", None), (f"every {EVERY}", EVERY), ("every step", 1), ("no saves", None)):
        # What one save in several steps costs is little: it takes more of them to tell.
        steps = WARM + plan.saves * plan.steps * (2 if every == EVERY else 1)
        place = folder / name.replace(" ", "-")
        place.mkdir()
        times = runner(training, steps, every, place, saver)
        took.setdefault(name, []).append((times[steps] - times[WARM]) / (steps - WARM))
        if every == EVERY:
            took["between"] = between(times)
        disk.remove(place)
    return {name: [mean(own)] for name, own in took.items()}


def between(times: Sequence[float]) -> list[float]:
    """Of the steps that count, with a save after every fifth, how long the third and the fourth after each took; from
    when each step began, and when all was durable."""
    return [times[step] - times[step - 1] for step in range(WARM + 1, len(times)) if step % EVERY in (3, 4)]


def _by_hand(training: Training, steps: int, every: int | None, folder: Path, saver: str) -> list[float]:
    """A plain loop that keeps the newest checkpoint. When each step began, and when all was durable."""
    save, times, last = SAVERS[saver](), [], done()
    for step in range(1, steps + 1):
        times.append(time.perf_counter())
        training.step()
        if every is not None and step % every == 0:
            last.result()
            last = save(training.state(), folder / f"step{step}").written
            disk.remove(folder / f"step{step - every}")
    last.result()
    return [*times, time.perf_counter()]


def _by_trainer(training: Training, steps: int, every: int | None, folder: Path, saver: str) -> list[float]:
    """The Trainer with its CheckpointerCallback, which keeps the newest ephemeral checkpoint. What the end of a run
    deletes once, however many steps it had, comes after that."""
    from trainer_cli import Callback, Logging, Trainer, TrainingLoop

    times: list[float] = []

    class Stopwatch(Callback):
        def on_train_step_start(self, trainer: Trainer, model: Any, batch: Any) -> None:
            times.append(time.perf_counter())

        def on_fit_end(self, trainer: Trainer, loop: TrainingLoop) -> None:
            times.append(time.perf_counter())

    callback = ours.checkpoint_callback(
        folder, asynchronous=saver == "train, async", enabled=every is not None, save_interval=None,
        ephemeral_save_interval=every, pre_train_checkpoint=False, save_final=False,
    )  # fmt: skip
    trainer = Trainer(
        model=training.model, optimizer=training.optimizer, checkpoint=callback, callbacks=[Stopwatch()],
        loop=TrainingLoop(max_duration=steps, eval_interval=None),
        logging=Logging(level="error", console="off"),
    )  # fmt: skip
    batches: Any = DataLoader([training.batch] * steps, batch_size=None)  # type: ignore[arg-type]
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
                answers[saver] = (frequent_saves if plan.often else single_saves)(
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
