"""Every kind of data through the real command: killed, started again, and the same to the last bit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import make_project, train
from compare import assert_same_run, assert_same_state, checkpoints

from trainer_cli.manifest import Manifest

CODE = '''
"""A user's own data of several kinds, and a small model."""

import os
import signal
import time

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


def point(number):
    x = torch.tensor([number / 100, 1.0]) + 0.1 * torch.rand(2)
    return x, x.sum() * 3


class Points(Dataset):
    fingerprint = "points"

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == 77 and get_worker_info() is not None:
            if os.environ.get("ILL") == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if os.environ.get("ILL") == "left":
                os._exit(3)
            if os.environ.get("ILL") == "slow":
                time.sleep(60)
            if os.environ.get("ILL") == "raises":
                raise OSError(5, "no such picture")
        return point(index)


class Mapped:
    def __init__(self):
        self.train, self.val = Points(100), Points(20)


class Loaded:
    """Brings its own DataLoader."""

    def __init__(self):
        self.train, self.val = DataLoader(Points(100), 5, shuffle=True), Points(20)


class LoadedFromAGenerator:
    """The order goes on from one epoch to the next, in a generator of the loader's own."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.train, self.val = DataLoader(Points(100), 5, shuffle=True, generator=generator), Points(20)


class Stream(IterableDataset):
    def __init__(self, size):
        self.size, self.at, self.start = size, 0, 0

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        self.at, self.start = self.start, 0
        while self.at * workers + worker < self.size:
            number = self.at * workers + worker
            self.at += 1
            yield point(number)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.start = state["at"]


class Streamed:
    def __init__(self):
        self.train, self.val = Stream(100), Points(20)


class Forgetful(IterableDataset):
    def __iter__(self):
        return iter(Stream(100))


class Forgotten:
    def __init__(self):
        self.train, self.val = Forgetful(), Points(20)


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.dropout, self.out = torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)

    def forward(self, batch):
        x, y = batch
        return ((self.out(self.dropout(torch.relu(self.hidden(x)))).squeeze(1) - y) ** 2).mean()
'''
TWO_SOURCES = """# Two texts, three samples of the first for one of the second
_target_: trainer_cli.Mixture
sources:
  letters: {_target_: trainer_cli.Text, path: letters.txt, context: 8}
  numbers: {_target_: trainer_cli.Text, path: numbers.txt, context: 8}
weights: {letters: 3, numbers: 1}
epoch_samples: 90
batch_size: 4
num_workers: 0
"""
OWN = """# Our own
_target_: parts.Mapped
batch_size: 5
num_workers: 0
persistent_workers: null
worker_timeout: null
"""
TINY_GPT = ("model=gpt", "model.layers=1", "model.heads=2", "model.width=8", "model.dropout=0.1")
LINE = ("model=plain",)
EACH_KIND = {
    "mixture": (*TINY_GPT, "data=two"),
    "packed": (
        *TINY_GPT, "data=documents", "data.source.path=numbers.txt", "data.source.document=line", "data.length=16",
        "data.batch_size=4", "loop.max_duration=2000tok", "loop.eval_interval=9st",
    ),
    "tokens": (
        *TINY_GPT, "data=tokens", "data.path=ids*.bin", "data.vocab_size=90", "data.context=8", "data.end_token=0",
        "data.val_fraction=0.1", "data.batch_size=4",
    ),
    "map-style in workers": (*LINE, "data=own", "data.num_workers=2"),
    "map-style in workers of one epoch": (*LINE, "data=own", "data.num_workers=2", "data.persistent_workers=false"),
    "stream": (*LINE, "data=own", "data._target_=parts.Streamed"),
    "stream in workers": (*LINE, "data=own", "data._target_=parts.Streamed", "data.num_workers=2"),
    "stream without a position": (*LINE, "data=own", "data._target_=parts.Forgotten"),
    "stream without a position in workers": (
        *LINE, "data=own", "data._target_=parts.Forgotten", "data.num_workers=2",
    ),
    "own DataLoader": (
        *LINE, "data=own", "data._target_=parts.Loaded", "data.batch_size=null", "data.num_workers=null",
    ),
    "own DataLoader with a generator": (
        *LINE, "data=own", "data._target_=parts.LoadedFromAGenerator", "data.batch_size=null", "data.num_workers=null",
    ),
}  # fmt: skip
CADENCE = (
    "loop.log_interval=4",
    "checkpoint.save_interval=16st",
    "checkpoint.ephemeral_save_interval=5st",
    "+callbacks.interrupt._target_=interrupts.Interrupt",
    "run_dir=run",
)


def overrides(kind: str) -> list[str]:
    """The command of a kind of data: one epoch and a half of most, unless it says something else."""
    own = EACH_KIND[kind]
    lengths = () if any("max_duration" in one for one in own) else ("loop.max_duration=32", "loop.eval_interval=13st")
    return [*own, *lengths, *CADENCE]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the data of this file."""
    letters = "".join(f"{chr(97 + number % 26) * (number % 7)} {number % 5 * 'xy'}\n" for number in range(60))
    numbers = "".join(" ".join(map(str, range(number % 9 + 1))) + "\n" for number in range(80))
    root = tmp_path_factory.mktemp("project")
    files = {
        "parts.py": CODE, "configs/data/two.yaml": TWO_SOURCES, "letters.txt": letters, "numbers.txt": numbers,
        "configs/data/own.yaml": OWN, "configs/model/plain.yaml": "# A line\n_target_: parts.Line\n",
    }  # fmt: skip
    project = make_project(root, **files)
    for part in range(2):
        np.random.default_rng(part).integers(0, 90, 405, dtype=np.uint16).tofile(project / f"ids_{part}.bin")
    return project


@pytest.fixture(scope="module")
def straight(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run directory of an uninterrupted training; trained once for each config."""
    made: dict[tuple[str, ...], Path] = {}

    def get(kind: str, *more: str) -> Path:
        if (kind, *more) not in made:
            folder = tmp_path_factory.mktemp("straight")
            code, said = ran(project, folder, kind, *more)
            assert code == 0, said
            made[kind, *more] = folder / "run"
        return made[kind, *more]

    return get


def ran(project: Path, folder: Path, kind: str, *more: str, **env: Any) -> tuple[int, str]:
    """One run of a kind in a folder of its own, in the project."""
    asked = [one for one in overrides(kind) if not one.startswith("run_dir=")]
    done = train("fit", *asked, f"run_dir={folder}/run", *more, cwd=project, **env)
    return done.code, done.err


IN_CAMPAIGNS = {"map-style in workers of one epoch", "stream in workers", "stream without a position", "own DataLoader"}
"""Whose loaders go on as those of other kinds do, which the contract of loaders tests one by one."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=[
                *([pytest.mark.campaign] if kind in IN_CAMPAIGNS else []),
                *([pytest.mark.addon("text")] if kind in ("mixture", "packed", "tokens") else []),
            ],
        )
        for kind in EACH_KIND
    ],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(
    kind: str, straight: Callable[..., Path], project: Path, tmp_path: Path
) -> None:
    code, said = ran(project, tmp_path, kind, INTERRUPT="SIGKILL train 27 0")
    assert code == -9, said
    code, said = ran(project, tmp_path, kind)
    assert code == 0, said
    # The save of step 25 may have been in flight.
    assert re.search(r"resuming at step (20|25) ", said)
    assert_same_run(tmp_path / "run", straight(kind))


def test_a_mixture_evaluates_every_source_and_refuses_another_mixture(project: Path, tmp_path: Path) -> None:
    assert ran(project, tmp_path, "mixture", INTERRUPT="SIGTERM train 30 0")[0] == 75
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"letters/loss", "numbers/loss"} <= {key for record in records for key in record}
    allow = "resume_allow=[data.weights.numbers]"
    code, said = ran(project, tmp_path, "mixture", "data.weights.numbers=2", allow)
    assert code == 2
    assert "fingerprint was" in said


@pytest.mark.addon("text")
def test_a_resume_refuses_a_file_of_tokens_that_has_grown(project: Path, tmp_path: Path) -> None:
    tokens = (*EACH_KIND["tokens"][1:], f"data.path={tmp_path}/ids.bin")
    ids = (project / "ids_0.bin").read_bytes()
    (tmp_path / "ids.bin").write_bytes(ids)
    assert ran(project, tmp_path, "tokens", *tokens, INTERRUPT="SIGTERM train 7 0")[0] == 75
    (tmp_path / "ids.bin").write_bytes(ids + ids[:2])
    code, said = ran(project, tmp_path, "tokens", *tokens)
    assert code == 2
    assert "the data is not what step8 was trained with" in said


def test_a_stream_goes_on_with_its_workers_and_no_others(project: Path, tmp_path: Path) -> None:
    kind = "stream in workers"
    assert ran(project, tmp_path, kind, INTERRUPT="SIGTERM train 7 0")[0] == 75
    code, said = ran(project, tmp_path, kind, "data.num_workers=3")
    assert code == 2
    assert "continue with data.num_workers=2" in said
    assert ran(project, tmp_path, kind)[0] == 0


def test_a_resume_says_what_other_processes_and_threads_cannot_keep(project: Path, tmp_path: Path) -> None:
    assert ran(project, tmp_path, "mixture", INTERRUPT="SIGTERM train 7 0")[0] == 75
    file = tmp_path / "run/checkpoints" / checkpoints(tmp_path / "run")[-1] / "manifest.json"
    file.write_bytes(replace(Manifest.parse(file.read_bytes()), world_size=2).to_bytes())
    environment = tmp_path / "run/environment.json"
    facts = json.loads(environment.read_text())
    environment.write_text(json.dumps({**facts, "threads": 77}))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    # Another attempt, which ended before it saved.
    summary["attempts"].append({**summary["attempts"][0], "attempt": 2, "changed_environment": {"threads": 99}})
    (tmp_path / "run/summary.json").write_text(json.dumps(summary))
    code, said = ran(project, tmp_path, "mixture")
    assert code == 0, said
    assert f"step8 was made with threads: 77, and this is {facts['threads']}: " in said
    assert "OMP_NUM_THREADS=77 before the command" in said
    assert "step8 was made by 2 processes, and this is 1: samples come in the same order, but" in said


@pytest.mark.parametrize(
    ("ill", "message"),
    [
        ("killed", "was killed by SIGKILL"),
        ("left", "ended with exit code 3"),
        ("slow", "no batch came from the data workers for 1 s"),
        ("raises", "while loading sample 77 of epoch 0"),
    ],
)
def test_an_ill_worker_ends_the_run_with_1_and_loses_nothing_saved(
    ill: str, message: str, straight: Callable[..., Path], project: Path, tmp_path: Path
) -> None:
    kind = "map-style in workers"
    small = (
        "checkpoint.save_interval=1st", "checkpoint.ephemeral_save_interval=null", "loop.max_duration=20",
        "loop.eval_interval=10st", f"data.worker_timeout={'1s' if ill == 'slow' else '100s'}",
    )  # fmt: skip
    code, said = ran(project, tmp_path, kind, *small, ILL=ill)
    assert code == 1, said
    assert message in said
    assert ("DataLoader worker" if ill == "raises" else "data worker") in said
    assert ("Traceback" in said) is (ill == "raises")
    saved = checkpoints(tmp_path / "run")
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    assert not _descendants_are_left(tmp_path)
    code, said = ran(project, tmp_path, kind, *small)
    assert code == 0, said
    assert f"resuming at step {saved[-1].removeprefix('step')} " in said
    assert_same_state(tmp_path / "run", straight(kind, *small))


def _descendants_are_left(folder: Path) -> bool:
    """True where a process still holds the lock of the run, as a worker that outlived its parent would."""
    lock = os.stat(folder / "run/.lock").st_ino
    for process in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if process.stat().st_ino == lock:
                return True
        except OSError:
            continue
    return False


def test_a_setting_of_workers_that_makes_no_sense_is_a_mistake_in_the_config(project: Path, tmp_path: Path) -> None:
    for wrong in ("data.worker_timeout=3ep", "data.persistent_workers=7"):
        code, said = ran(project, tmp_path, "map-style in workers", wrong)
        assert code == 2
        assert wrong.partition("=")[0] in said
        assert not (tmp_path / "run").exists()
