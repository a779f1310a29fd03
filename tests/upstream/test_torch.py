"""torch: files of torch.save, and torch.distributed.checkpoint."""

from __future__ import annotations

import os
import pickle
import stat
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def save_by_dcp(folder: Path, value: float = 1.0) -> None:
    with warnings.catch_warnings():
        # One process: DCP says that it is not distributed.
        warnings.simplefilter("ignore")
        dcp.save({"weight": torch.full((4,), value)}, checkpoint_id=folder)


def test_torch_load_refuses_a_file_with_a_changed_byte(tmp_path: Path) -> None:
    """The archive has a checksum of each tensor, which is not compared. `checkpoint/manifest` digests every file, and
    `addons/formats/torch_file.py` compares the checksums of foreign ones."""
    path = tmp_path / "x.pt"
    torch.save({"weight": torch.zeros(1000)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(b"\0" * 4000) + 2000] = 1
    path.write_bytes(content)
    try:
        changed = int(torch.load(path, weights_only=True)["weight"].count_nonzero())
    except RuntimeError:
        return
    assert changed == 0


def test_torch_load_reads_the_names_of_an_archive_as_they_are_written(tmp_path: Path) -> None:
    """Names that differ in case are one to torch: `addons/formats/torch_file.py` refuses such files."""
    path = tmp_path / "x.pt"
    torch.save({"weight": torch.zeros(3)}, path)
    path.write_bytes(path.read_bytes().replace(b"data.pkl", b"DATA.PKL"))
    try:
        weights = torch.load(path, weights_only=True)
    except RuntimeError:
        return
    assert weights == {}


def test_dcp_writes_its_metadata_before_the_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls fsync before the buffer is flushed, so that a power cut leaves an empty `.metadata` (also reported to
    NVIDIA/nvidia-resiliency-ext#359). Checkpoints of this package are not written by DCP."""
    sizes: list[int] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    save_by_dcp(tmp_path / "x")
    assert 0 not in sizes


def test_dcp_makes_the_names_of_its_files_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is never synchronised, so that a power cut may take its files away. `storage/disk.py`
    synchronises the folder and its parent."""
    folders: list[bool] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        folders.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    save_by_dcp(tmp_path / "x")
    assert any(folders)


def test_dcp_replaces_a_checkpoint_without_a_moment_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes the old `.metadata` before it renames the new one. `storage/local.py` renames whole
    folders, and the old one goes last."""
    save_by_dcp(tmp_path / "x")
    present: list[bool] = []
    rename = Path.rename

    def note(path: Path, target: Any) -> Path:
        present.append((tmp_path / "x" / ".metadata").exists())
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", note)
    save_by_dcp(tmp_path / "x", 2.0)
    assert all(present)


def test_dcp_runs_no_code_of_a_checkpoint_that_it_reads(tmp_path: Path) -> None:
    """`.metadata` is an unrestricted pickle (pytorch#189308). `addons/formats/dcp.py` reads it with its own
    restricted reader."""
    save_by_dcp(tmp_path / "x")
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "created")))
    # What it reads is no metadata, which it reports only after the code has run.
    with suppress(AttributeError):
        dcp.FileSystemReader(tmp_path / "x").read_metadata()
    assert not (tmp_path / "created").exists()


def test_torch_save_says_which_error_of_the_disk_it_met(tmp_path: Path) -> None:
    """A full disk is a RuntimeError without an errno. `checkpoint/disk_errors.py` needs the errno, so files are written
    by `storage/folder.py`."""
    with pytest.raises((OSError, RuntimeError)) as caught:
        torch.save({"weight": torch.zeros(100_000)}, "/dev/full")
    assert isinstance(caught.value, OSError)


def test_fused_sgd_steps_a_parameter_whose_first_gradient_comes_later() -> None:
    """`foreach` and the plain loop do. `optim/optimizers.py` does not choose the kernel for SGD with momentum."""
    first, later = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([first, later], lr=0.1, momentum=0.9, fused=True)
    first.grad = torch.ones(1)
    optimizer.step()
    later.grad = torch.ones(1)
    error = None
    try:
        optimizer.step()
    except TypeError as failure:
        error = failure
    assert error is None
