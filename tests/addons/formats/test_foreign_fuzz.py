"""Damaged checkpoints of other programs: refused by a CheckpointError, or read; where checksums are, read exactly.

TRAIN_FUZZ=50000 tries so many.
"""

# ruff: noqa: PT017
from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hostile import dcp, saved
from states import same_tensors

from trainer_cli.addons.formats.read import read_foreign
from trainer_cli.errors import CheckpointError

IN_ALL = int(os.environ.get("TRAIN_FUZZ", "200"))
WEIGHTS = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.arange(5), "b": torch.tensor(2.5).bfloat16()}


def _zip(folder: Path) -> Path:
    torch.save({"state_dict": WEIGHTS, "epoch": 3}, folder / "x.pt")
    return folder / "x.pt"


def _old(folder: Path) -> Path:
    torch.save(WEIGHTS, folder / "x.pt", _use_new_zipfile_serialization=False)
    return folder / "x.pt"


def _safetensors(folder: Path) -> Path:
    safetensors.torch.save_file(WEIGHTS, folder / "x.safetensors")
    return folder / "x.safetensors"


def _dcp(folder: Path) -> Path:
    part = saved(torch.ones(2, 4))
    dcp(folder, size=(4, 4), chunks=[((0, 0), (2, 4)), ((2, 0), (2, 4))], content=part)
    return folder


def _huggingface(folder: Path) -> Path:
    table = {}
    for number, name in enumerate(WEIGHTS):
        file = f"pytorch_model-{number}.bin"
        torch.save({name: WEIGHTS[name]}, folder / file)
        table[name] = file
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {"total": 70}, "weight_map": table}))
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "torch zip": _zip,
    "old torch file": _old,
    "safetensors": _safetensors,
    "DCP": _dcp,
    "Hugging Face folder": _huggingface,
}
CHECKED = (".pt", ".bin", ".distcp")
"""Files whose content has checksums, but for `old torch file`."""


def _damaged(whole: bytes, rng: random.Random) -> tuple[str, bytes]:
    """What was done, and the bytes after it."""
    at, count = rng.randrange(len(whole)), rng.choice([1, 1, 2, 4, 8, 100])
    how = rng.choice(["flip", "cut", "insert", "remove", "overwrite", "repeat"])
    match how:
        case "flip":
            new = bytearray(whole)
            for _ in range(rng.choice([1, 1, 3])):
                new[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            return how, bytes(new)
        case "cut":
            return how, whole[:at]
        case "insert":
            return how, whole[:at] + rng.randbytes(count) + whole[at:]
        case "remove":
            return how, whole[:at] + whole[at + count :]
        case "overwrite":
            return how, whole[:at] + rng.choice([b"\0", b"\xff", b"("]) * min(count, len(whole) - at) + whole[
                at + count :
            ]
    return how, whole[: at + count] + whole[at:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path)
    wanted = {name: value.clone() for name, value in read_foreign(path).model.items()}
    files = sorted(one for one in tmp_path.iterdir() if one.is_file())
    work = tmp_path / "work"
    refused = 0
    for seed in range(IN_ALL // len(KINDS)):
        rng = random.Random(seed)
        file = rng.choice(files)
        # A file that was mapped into memory must not change: each case has its own.
        work.mkdir()
        for one in files:
            shutil.copy(one, work / one.name)
        how, content = _damaged(file.read_bytes(), rng)
        (work / file.name).unlink()
        (work / file.name).write_bytes(content)
        case = (kind, seed, file.name, how)
        try:
            found = read_foreign(work if path.is_dir() else work / path.name).model
        except CheckpointError as error:
            assert str(error).isprintable(), case
            refused += 1
        else:
            checked = file.suffix in CHECKED and kind != "old torch file"
            assert same_tensors(found, wanted) or not (checked or how == "cut"), case
            assert sum(one.clone().nbytes for one in found.values()) <= 10 * len(content) + 2**20, case
        shutil.rmtree(work)
    assert refused > IN_ALL // len(KINDS) // 2
