"""safetensors: what it accepts, and how it writes."""

from __future__ import annotations

import json
import os
import stat
import struct
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file


def test_safetensors_refuses_a_file_with_a_changed_byte(tmp_path: Path) -> None:
    """The format has no checksum: the manifest has a digest of every file."""
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.zeros(10)}, path)
    content = bytearray(path.read_bytes())
    content[-20] = 1
    path.write_bytes(content)
    try:
        changed = int(load_file(path)["weight"].count_nonzero())
    except SafetensorError:
        return
    assert changed == 0


def test_safetensors_refuses_a_name_that_occurs_twice(tmp_path: Path) -> None:
    """Which of two tensors counts is not defined. `tensor_files/header.py` refuses such files."""
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    header = f'{{"weight": {entry}, "weight": {entry}}}'.encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    try:
        weights = load_file(path)
    except SafetensorError:
        return
    assert weights == {}


def test_safetensors_keeps_the_permissions_that_the_umask_gives(tmp_path: Path) -> None:
    """Its files can be read by their owner alone. `addons/formats/export.py` sets their mode."""
    path = tmp_path / "x.safetensors"
    umask = os.umask(0o022)
    try:
        save_file({"weight": torch.zeros(1)}, path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
