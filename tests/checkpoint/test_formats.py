"""What every format of checkpoints promises."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from known_formats import FORMATS, KNOWN, METADATA, files, of_torch_alone, save, state
from states import same

from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import (
    AsyncCheckpointer,
    SyncCheckpointer,
    make_sync_checkpointer,
)
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.format.open import new_format
from trainer_cli.format.sharded import DividedFormat
from trainer_cli.manifest import DamagedCheckpoint, Manifest
from trainer_cli.schema.checkpoint_config import CheckpointFormat
from trainer_cli.storage.local import LocalStorage


@pytest.mark.parametrize("name", FORMATS)
def test_a_state_comes_back_bit_for_bit_and_is_written_alike_in_the_background(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "sync/step3", name)
    background = AsyncCheckpointer(format=FORMATS[name])
    background.save(state(), tmp_path / "async/step3", metadata=METADATA)
    background.close()
    assert files(tmp_path / "async/step3") == files(path)
    loaded = SyncCheckpointer().load(path)
    assert same(dict(loaded), state())
    assert loaded["model"]["emb.weight"] is loaded["model"]["head.weight"]
    assert SyncCheckpointer().verify(path).format == FORMATS[name].name


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_not_readable_under_the_name_of_another_format(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "step3", name)
    catalog = Catalog(LocalStorage(tmp_path))
    assert catalog.why_damaged(catalog.entry("step3")) is None
    manifest = Manifest.parse((path / "manifest.json").read_bytes())
    # The files of huggingface are of the same form as those of tensors.
    for other in {*map(str, KNOWN), "zarr"} - {manifest.format, "huggingface"}:
        (path / "manifest.json").write_bytes(replace(manifest, format=other).to_bytes())
        assert catalog.why_damaged(catalog.entry("step3")) is not None, other


@pytest.mark.parametrize("name", [name for name in FORMATS if name in ("tensors", "huggingface", "archive none")])
def test_the_plan_has_the_bytes_that_a_save_takes(tmp_path: Path, name: str) -> None:
    SyncCheckpointer(format=FORMATS[name]).save(state(), tmp_path / "step3")
    files = SyncCheckpointer().manifest(tmp_path / "step3").files
    planned = FORMATS[name].plan(state(), shapes_only=True).total_bytes
    assert planned == sum(entry.size_bytes for entry in files.values())


@pytest.mark.parametrize("name", KNOWN)
def test_the_facts_of_a_format_are_what_it_does(tmp_path: Path, name: CheckpointFormat) -> None:
    format = new_format(name)
    assert name.one_process is not isinstance(format, DividedFormat)
    save(tmp_path / "step3", "archive none" if name is CheckpointFormat.archive else name)
    contents = files(tmp_path / "step3")
    assert name.has_tensor_files is any(file.endswith(".safetensors") for file in contents)
    del contents["manifest.json"]
    planned = format.plan(state(), shapes_only=True).total_bytes
    assert (name.uncounted_bytes is None) is (planned == sum(map(len, contents.values())))
    with nullcontext() if name.holds_every_dtype else pytest.raises(UserError, match="cannot hold"):
        format.plan({"model": {"weight": torch.zeros(2, dtype=torch.complex128)}})


@pytest.mark.parametrize("name", FORMATS)
def test_parts_are_loaded_alone(tmp_path: Path, name: str) -> None:
    save(tmp_path / "step3", name)
    catalog = Catalog(LocalStorage(tmp_path))
    manifest = catalog.entry("step3").manifest
    assert manifest is not None
    with catalog.storage.reading("step3") as folder:
        values = FORMATS[name].read_values(folder, manifest, ["progress", "rng"])
    assert same(values, {"rng": {"keys": None, "number": None}, "progress": state()["progress"]})
    assert same(SyncCheckpointer().read(tmp_path / "step3", ["progress"]), {"progress": state()["progress"]})
    assert same(SyncCheckpointer().read(tmp_path / "step3", ["model"]), {"model": state()["model"]})


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda whole: whole[: at % len(whole)] + bytes([whole[at] ^ 1]) + whole[at % len(whole) + 1 :]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "the first bit": flip(0),
    "a bit of the middle": lambda whole: flip(len(whole) // 2)(whole),
    "the last bit": flip(-1),
    "nothing left": lambda whole: b"",
    "half of it": lambda whole: whole[: len(whole) // 2],
    "a byte less": lambda whole: whole[:-1],
    "a byte more": lambda whole: whole + b"\0",
    "a line more": lambda whole: whole + b"\n",
    "twice": lambda whole: whole * 2,
    "zeros": lambda whole: bytes(len(whole)),
}


def is_noticed(path: Path, file: str) -> bool:
    """Whether a check and, of a file that it reads, a use refuse the checkpoint, and name the file."""
    checkpointer = SyncCheckpointer()
    for use in (checkpointer.verify, checkpointer.load)[: 1 if file == "config.yaml" else 2]:
        is_manifest = file == "manifest.json"
        with pytest.raises(CheckpointError if is_manifest else DamagedCheckpoint, match=None if is_manifest else file):
            use(path)
    return True


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [*FORMATS, "sha256"])
def test_a_change_of_any_file_is_noticed(tmp_path: Path, name: str, change: str) -> None:
    checkpointer = (
        make_sync_checkpointer(digest="sha256") if name == "sha256" else SyncCheckpointer(format=FORMATS[name])
    )
    metadata = replace(METADATA, files={"config.yaml": b"seed: 1\n"})
    checkpointer.save(state(), path := tmp_path / "step3", metadata=metadata)
    for file, content in files(path).items():
        (path / file).write_bytes(CHANGES[change](content))
        assert is_noticed(path, file)
        (path / file).write_bytes(content)
    assert same(dict(SyncCheckpointer().load(path)), state())


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_is_missing_no_file_or_of_another_checkpoint_is_noticed(tmp_path: Path, name: str) -> None:
    path, other = save(tmp_path / "step3", name), save(tmp_path / "step4", name, {"model": {}, "progress": {"step": 4}})
    for file, content in files(path).items():
        (path / file).unlink()
        assert is_noticed(path, file)
        for make in (os.mkfifo, os.mkdir):
            make(path / file)
            assert is_noticed(path, file)
            (path / file).unlink() if make is os.mkfifo else (path / file).rmdir()
        if file != "manifest.json" and (other / file).exists():
            shutil.copy(other / file, path / file)
            assert is_noticed(path, file)
        (path / file).write_bytes(content)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", ["torch.complex128", "torch.complex32", "torch.float8_e8m0fnu", "array"])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "torch_file"])
def test_other_formats_refuse_them_before_anything_is_written(tmp_path: Path, name: str, dtype: str) -> None:
    with pytest.raises(UserError, match=r"cannot hold\. Write checkpoint\.format=torch_file"):
        SyncCheckpointer(format=FORMATS[name]).save(
            {"model": {dtype: of_torch_alone()["model"][dtype]}}, tmp_path / "step3", metadata=METADATA
        )
    assert list(tmp_path.iterdir()) == []


def live_views() -> dict[str, torch.Tensor]:
    """Views of one storage: a slice, its tail, the transposed, the flat, another type's bits and a tied one."""
    base = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    return {
        "base": base,
        "slice": base[:2],
        "tail": base[3:, 1:],
        "turned": base.t(),
        "flat": base.view(-1),
        "bits": base.view(torch.int32),
        "tied": base.view(6, 4),
    }


@pytest.mark.parametrize("first", ["base", "slice", "turned"])
@pytest.mark.parametrize("name", FORMATS)
def test_views_of_one_storage_come_back_right_even_into_views(tmp_path: Path, name: str, first: str) -> None:
    views = live_views()
    saved = {first: views[first], **views}
    SyncCheckpointer(format=FORMATS[name]).save({"model": saved}, tmp_path / "step3", metadata=METADATA)
    assert same(SyncCheckpointer().load(tmp_path / "step3")["model"], saved)
    live = live_views()
    live["base"].zero_()
    SyncCheckpointer().load(tmp_path / "step3", {"model": live})
    assert same(live, live_views())
