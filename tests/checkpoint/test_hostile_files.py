"""Hostile checkpoints run no code, write nothing, end in seconds and little memory, and give one line that names them.

A process reads them all; where a case ends it, another reads the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import Raw, build, call, dcp, named, opcodes, pickled, safetensors, tensor, tensor_arguments, torch_zip
from hostile_cases import OWN, entry, foreign_cases, own_checkpoint
from hostile_pickles import MARKER, Case

from trainer_cli.checkpoint.foreign.read import read_foreign
from trainer_cli.errors import CheckpointError

READER = Path(__file__).with_name("hostile_reader.py")
MOST_BYTES = 200 << 20
MOST_S = 60
CASES: Mapping[str, Case] = {**foreign_cases(), **{f"own: {name}": case for name, case in OWN.items()}}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What reading each case said; nothing else may happen."""
    root = tmp_path_factory.mktemp("hostile")
    lines = {}
    for number, (name, case) in enumerate(CASES.items()):
        folder = root / f"case{number}"
        folder.mkdir()
        lines[name] = json.dumps([name, str(case(folder)), name.startswith("own: ")])
    empty = tmp_path_factory.mktemp("empty")
    before = _seen(root)
    results = _read_all(lines, _good_lines(tmp_path_factory.mktemp("good")), empty)
    assert not (root / MARKER).exists(), "code ran"
    assert _seen(root) == before
    assert not list(empty.iterdir())
    return {name: {**one, "path": json.loads(lines[name])[1]} for name, one in results.items()}


def _seen(root: Path) -> dict[str, Any]:
    """Every file with its size and time."""
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in root.rglob("*")}


def _good_lines(folder: Path) -> list[str]:
    """Good checkpoints of each kind: what reading them takes is no fault of the hostile ones."""
    paths = {
        torch_zip(folder / "x.pt", pickled({"w": tensor()})): False,
        safetensors(folder / "x.safetensors", entry()): False,
        dcp(folder / "dcp"): False,
        own_checkpoint()(folder): True,
    }
    return [json.dumps(["good", str(path), own]) for path, own in paths.items()]


def _read_all(lines: Mapping[str, str], good: list[str], cwd: Path) -> dict[str, dict[str, Any]]:
    """What each case said. Of one that ended its process: how; another process then reads the rest."""
    results: dict[str, dict[str, Any]] = {}
    while left := [name for name in lines if name not in results]:
        run = subprocess.run(
            [sys.executable, str(READER)],
            input="\n".join([*good, *(lines[name] for name in left)]),
            capture_output=True,
            text=True,
            cwd=cwd,
            env={**os.environ, "TMPDIR": str(cwd), "OMP_NUM_THREADS": "1"},
            timeout=300,
        )
        found = [json.loads(line) for line in run.stdout.splitlines()]
        assert [one["error"] for one in found[: len(good)]] == [None] * len(good), run.stdout + run.stderr
        results |= {one["name"]: one for one in found[len(good) :]}
        if ended := [name for name in left if name not in results][:1]:
            results[ended[0]] = {"error": f"the process ended with {run.returncode}: {run.stderr[-500:]}", "text": ""}
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_checkpoint_is_refused_in_one_line(said: dict[str, dict[str, Any]], name: str) -> None:
    one = said[name]
    assert set(one["error"] or []) & {"CheckpointError", "UserError"}, one
    assert Path(one["path"]).name in one["text"]
    assert one["text"].isprintable()
    assert len(one["text"]) < 600 + 2 * len(one["path"])
    assert one["seconds"] < MOST_S
    assert one["bytes"] < MOST_BYTES


def test_attributes_that_a_file_gives_a_tensor_are_left_out(tmp_path: Path) -> None:
    hides = call(
        named("torch._tensor", "_rebuild_from_type_v2"),
        *(named("torch._utils", "_rebuild_tensor_v2"), named("torch", "Tensor"), tensor_arguments()),
        {"contiguous": 3, "to": 3},
    )
    torch_zip(tmp_path / "x.pt", pickled({"w": hides}))
    found = read_foreign(tmp_path / "x.pt").model["w"]
    assert torch.equal(found.to(torch.float64).contiguous(), torch.zeros(4, dtype=torch.float64))


def test_a_mapping_whose_methods_a_file_hides_is_read(tmp_path: Path) -> None:
    held = Raw(opcodes(call(named("collections", "OrderedDict"))) + b"(" + opcodes("w") + opcodes(tensor()) + b"u")
    torch_zip(tmp_path / "x.pt", pickled(build(held, {"get": 3, "items": 3, "keys": 3})))
    assert list(read_foreign(tmp_path / "x.pt").model) == ["w"]


def test_an_archive_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(4)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read_foreign(tmp_path / "x.pt").model["w"], torch.ones(4))


def test_metadata_cannot_change_the_classes_of_torch(tmp_path: Path) -> None:
    content = pickled(build(named("torch.distributed.checkpoint.metadata", "Metadata"), (None, {"planner_data": 7})))
    dcp(tmp_path / "dcp")
    (tmp_path / "dcp/.metadata").write_bytes(content)
    with pytest.raises(CheckpointError):
        read_foreign(tmp_path / "dcp")
    assert list(read_foreign(dcp(tmp_path / "again")).model) == ["w"]
