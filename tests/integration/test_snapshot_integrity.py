"""A checkpoint holds the state of its step and nothing later, however weights, buffers and optimizer are written.

A model of a user's own writes to its state in twelve ways, at every step from the fourth of each process on, beginning
as soon as a save has returned. At each save a callback notes the digest of every tensor; afterwards each committed
checkpoint must have these digests.

`TRAIN_WRITERS_STEPS` and `TRAIN_WRITERS_KILLS` make it long (scripts/faults).
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from command import Running, make_project, names, running

from trainer_cli.checkpoint.checkpointer import SyncCheckpointer

STEPS = int(os.environ.get("TRAIN_WRITERS_STEPS", "16"))
KILLS = int(os.environ.get("TRAIN_WRITERS_KILLS", "1"))

CODE = '''
"""A model that writes to its state in twelve ways, and a callback that notes what is there at each save."""

import json
import threading

import torch
import xxhash
from torch import nn
from torch.nn.utils import parametrize, prune

from trainer_cli import Callback


class Symmetric(nn.Module):
    def forward(self, weight):
        return (weight + weight.T) / 2

    def right_inverse(self, weight):
        return weight


class Writers(nn.Module):
    def __init__(self, rows=500, rows_only=False):
        super().__init__()
        self.rows_only = rows_only
        self.codebook = nn.Embedding(rows, 64)
        self.numpy, self.dlpack = nn.Parameter(torch.zeros(rows, 8)), nn.Parameter(torch.zeros(rows, 8))
        self.inner = nn.Parameter(torch.ones(rows, 4))
        self.symmetric = parametrize.register_parametrization(nn.Linear(8, 8), "weight", Symmetric())
        self.pruned = prune.l1_unstructured(nn.Linear(8, 1), "weight", 0.3)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("threaded", torch.zeros(rows, 16))
        self.register_buffer("counted", torch.zeros(rows, 4))
        self.register_buffer("hooked", torch.zeros(rows, 4))
        self.register_buffer("hooked_late", torch.zeros(rows, 4))
        self.symmetric.register_forward_hook(self.after_forward)
        self.calls = 0
        self.second = torch.optim.SGD([self.inner], lr=0.1, momentum=0.9)
        self.inner.register_post_accumulate_grad_hook(self.step_second)

    def after_forward(self, *_):
        if not self.rows_only:
            self.hooked.add_(self.writes)

    @property
    def writes(self):
        return self.calls > 3

    def step_second(self, parameter):
        # A second optimizer, within backward.
        if not self.rows_only:
            self.second.step()
            parameter.grad = None

    def forward(self, batch):
        x, y = batch
        self.calls += self.training
        if self.training and self.writes:
            rows = torch.randint(len(self.codebook.weight), (50,))
            self.codebook.weight.data[rows] = torch.randn(50, 64)
        if self.training and self.writes and not self.rows_only:
            self.numpy.detach().numpy()[:] += 1
            torch.from_dlpack(self.dlpack.detach()).add_(1)
            self.counted.add_(1)
            self.pruned.weight_mask.data.copy_(torch.rand(1, 8) > 0.3)
        index = (x[:, 0] * 100).long().clamp(0, len(self.codebook.weight) - 1)
        found = self.codebook(index)[:, :8] + self.inner[index].sum(1, keepdim=True)
        guess = self.pruned(self.norm(self.symmetric(found))).squeeze(1)
        return (guess - y).square().mean() + 1e-9 * (self.numpy.sum() + self.dlpack.sum())


class Writes(Callback):
    """What writes from outside of the model: a thread, and hooks of the optimizer's step."""

    def on_fit_start(self, trainer, *_):
        model, optimizer = trainer.model, trainer.optimizer
        if model.rows_only:
            return

        def before(*_):
            for state in optimizer.state.values() if model.writes else ():
                state["exp_avg"].data.mul_(1.01)

        def after(*_):
            model.hooked_late.add_(model.writes)
            for state in optimizer.state.values() if model.writes else ():
                state["exp_avg_sq"].detach().numpy()[...] += 1e-6

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def on_train_batch_start(self, trainer, model, *_):
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.write, args=(model.threaded,), daemon=True)
        if not model.rows_only:
            self.thread.start()

    def write(self, buffer):
        while not self.ended.is_set():
            buffer.data[::7].add_(1)

    def on_before_optimizer_step(self, *_):
        self.ended.set()
        if self.thread.ident is not None:
            self.thread.join()


class Notes(Callback):
    def on_save_checkpoint(self, trainer, state):
        found = {}
        walk(state, "", found)
        with open("notes.jsonl", "a") as file:
            file.write("\\n" + json.dumps({"step": trainer.progress.step, "digests": found}))


def walk(state, path, found):
    if isinstance(state, torch.Tensor):
        raw = state.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
        found[path] = xxhash.xxh3_128_hexdigest(raw.tobytes())
    elif isinstance(state, dict):
        for key, value in state.items():
            walk(value, f"{path}/{key}", found)
    elif isinstance(state, list | tuple):
        for key, value in enumerate(state):
            walk(value, f"{path}/{key}", found)
'''
FIT = (
    "fit", "experiment=mine", "name=run", "+callbacks.writes._target_=mine.writers.Writes",
    "+callbacks.notes._target_=mine.writers.Notes", "checkpoint.save_async=true", "checkpoint.remove=never",
    "loop.eval_interval=2", "optimizer.lr=1e-4",
)  # fmt: skip


def project_of(root: Path, rows: int, *, rows_only: bool) -> Path:
    model = f"# Writers\n_target_: mine.writers.Writers\nrows: {rows}\nrows_only: {str(rows_only).lower()}\n"
    return make_project(root, **{"mine/writers.py": CODE, "configs/model/line.yaml": model})


def digests(state: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(state, torch.Tensor):
        raw = state.contiguous().reshape(-1).view(torch.uint8).numpy()
        yield path, xxhash.xxh3_128_hexdigest(raw.tobytes())
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from digests(value, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from digests(value, f"{path}/{index}")


def differing(project: Path) -> dict[str, list[str]]:
    """Every committed checkpoint, and the tensors in it that are not those of its step. Each is deleted."""
    noted: dict[int, list[dict[str, str]]] = defaultdict(list)
    for line in (project / "notes.jsonl").read_text().splitlines():
        try:
            note = json.loads(line)
        except ValueError:
            continue  # A kill cut it short, or it is the first line.
        noted[note["step"]].append(note["digests"])
    found = {}
    folder = project / "runs/run/checkpoints"
    for name in names(folder):
        saved = dict(digests(SyncCheckpointer().load(folder / name)))
        # A step that is made again after a kill is noted again.
        others = [[key for key in own.keys() | saved.keys() if own.get(key) != saved.get(key)]
                  for own in noted[int(name.removeprefix("step"))]]  # fmt: skip
        found[name] = min(others, key=len)
    return found


def killed(project: Path, fit: tuple[str, ...], moments: random.Random) -> bool:
    """Start, and kill at a random moment after a checkpoint was committed; False where it ended first."""
    run = project / "runs/run/checkpoints"
    before = len(names(run)) if run.is_dir() else 0
    with running(*fit, cwd=project) as started:
        if not wait_for_checkpoint(started, run, before):
            return False
        time.sleep(0.1 * moments.random())
        started.signal(signal.SIGKILL)
        return started.end().code == -signal.SIGKILL


def wait_for_checkpoint(started: Running, run: Path, before: int) -> bool:
    while not (run.is_dir() and len(names(run)) > before):
        if started.process.poll() is not None:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.timeout(1800 + 60 * KILLS + STEPS)
@pytest.mark.parametrize(
    ("rows", "steps", "kills", "rows_only"),
    [(500, STEPS, KILLS, False), (120_000, 6, 0, False), (120_000, 7, 0, True)],
    ids=["small, killed", "large", "large, a few rows alone"],
)
def test_no_checkpoint_holds_anything_of_a_later_moment(
    tmp_path: Path, rows: int, steps: int, kills: int, rows_only: bool
) -> None:
    project = project_of(tmp_path, rows, rows_only=rows_only)
    fit: tuple[str, ...] = (*FIT, f"loop.max_duration={steps}", "checkpoint.save_interval=1")
    # A few hidden rows, and nothing else that would tell a saver to distrust the optimizer's step.
    if not rows_only:
        fit = (*fit, "callbacks=ema")
    moments = random.Random(f"{steps} {kills}")
    ended = [not killed(project, fit, moments) for _ in range(kills)]
    assert not ended or not all(ended), "no run was killed"
    with running(*fit, cwd=project) as started:
        result = started.end()
    assert result.code == 0, result.err
    found = differing(project)
    print(f"{len(found)} checkpoints, {sum(map(bool, found.values()))} differ")
    assert len(found) == steps + 1
    assert {name: rows for name, rows in found.items() if rows} == {}
    sizes = {sum(file.stat().st_size for file in path.iterdir()) for path in project.glob("runs/run/checkpoints/*")}
    assert (max(sizes) > 100 << 20) is (rows > 100_000)
