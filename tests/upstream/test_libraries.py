"""torch, torch_checkpointing where it is installed, safetensors, fsspec and Hydra."""

from __future__ import annotations

import json
import os
import pickle
import stat
import struct
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save


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
        save({"weight": torch.full((4,), value)}, checkpoint_id=folder)


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
        FileSystemReader(tmp_path / "x").read_metadata()
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


# torch_checkpointing, where it is installed, such as in `.venv-bench`: it copies the state during the next step.


WIDTH = 8_000
SAVES = 5


class Normed(nn.Module):
    """A batch norm behind weights of 256 MB in the state, and in front of them in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(self.norm(inputs))
        return outputs


def test_a_background_save_holds_no_value_of_the_next_step(tmp_path: Path) -> None:
    """With the update guarded by `lock`, as its tutorial says. `checkpoint/snapshot` copies at the end of the step."""
    checkpointing = pytest.importorskip("torch_checkpointing")
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = checkpointing.CheckpointManager.Config.with_async_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager, model = config.build(), Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    later = set()
    for number in range(SAVES):
        at_save = {name: value.clone() for name, value in model.state_dict().items()}
        written = manager.save(str(tmp_path / f"{number}"), {"model": model.state_dict()})
        model(torch.randn(4, WIDTH) + number).square().mean().backward()
        with manager.lock():
            optimizer.step()
        optimizer.zero_grad()
        written.result()
        loaded = {name: torch.zeros_like(value) for name, value in at_save.items()}
        manager.load(str(tmp_path / f"{number}"), into={"model": loaded})
        later |= {name for name, value in loaded.items() if not torch.equal(value, at_save[name])}
    manager.close()
    assert later == set()


# safetensors: what it accepts, and how it writes.


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


# fsspec: files of object stores.


class Store(AbstractFileSystem):  # type: ignore[misc]
    """An object store that keeps which uploads were completed."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.completed: dict[str, bytes] = {}

    def _open(self, path: str, mode: str = "rb", **settings: Any) -> Upload:
        return Upload(self, path, mode)


class Upload(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self.parts = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts += self.buffer.getvalue()
        if final:
            self.fs.completed[self.path] = self.parts
        return True


def test_a_file_whose_writer_fails_is_not_completed() -> None:
    """The `with` block closes the file after an exception, too, and closing completes the upload: a part of a
    checkpoint stands under its final name. `addons/stores/object_client.py` uploads finished files."""
    store = Store()
    try:
        with store.open("checkpoint", "wb") as file:
            file.write(b"the first half")
            raise OSError("the disk with the second half")
    except OSError:
        pass
    assert store.completed == {}


# Hydra: composing, and instantiating.


def test_hydra_reports_a_defaults_list_that_leads_back_to_itself(tmp_path: Path) -> None:
    """It recurses until the stack overflows. `config/hydra_errors.py` names the line."""
    (tmp_path / "a.yaml").write_text("defaults: [b]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a]\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        try:
            compose("a")
        except HydraException:
            return
        except RecursionError as error:
            overflow = error
    assert isinstance(overflow, HydraException)


@pytest.mark.parametrize("target", ["pathlib.Path.touch", "builtins.open", "shutil.copyfile"])
def test_hydra_refuses_targets_that_write_files(target: str, tmp_path: Path) -> None:
    """It blocks some names, and says itself that this is no boundary. `components/targets.py` allows a recovered config
    only the packages that are trusted."""
    source, path = tmp_path / "source", tmp_path / "written"
    source.write_text("text")
    arguments: Any = {
        "pathlib.Path.touch": [path],
        "builtins.open": [str(path), "w"],
        "shutil.copyfile": [str(source), str(path)],
    }[target]
    try:
        made = instantiate({"_target_": target}, *arguments)
        if hasattr(made, "close"):
            made.close()
    except HydraException:
        return
    assert not path.exists()
