"""What every format of checkpoints promises, and what other programs read of it."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import tarfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from states import reseal, same

from trainer_cli.addons.formats import huggingface
from trainer_cli.addons.formats.addon import ADDON
from trainer_cli.addons.formats.archive import ArchiveFormat
from trainer_cli.addons.formats.huggingface import HuggingFaceFormat
from trainer_cli.addons.formats.torch_file import TorchFileFormat
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import (
    AsyncCheckpointer,
    CheckpointMetadata,
    SyncCheckpointer,
    make_sync_checkpointer,
)
from trainer_cli.commands.ckpt_inspect import opened
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.format.base import Format
from trainer_cli.format.open import new_format
from trainer_cli.format.sharded import DividedFormat, TensorsFormat
from trainer_cli.manifest import DamagedCheckpoint, Manifest
from trainer_cli.schema.checkpoint_config import CheckpointFormat, Compression
from trainer_cli.storage.local import LocalStorage

FORMATS: dict[str, Format] = {
    "tensors": TensorsFormat(),
    "torch_file": TorchFileFormat(),
    "huggingface": HuggingFaceFormat(),
    **{f"archive {compression.value}": ArchiveFormat(compression) for compression in Compression},
}


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    tied = torch.randn(5, 3, generator=generator)
    return {
        "model": {
            "emb.weight": tied,
            "head.weight": tied,
            "half": torch.randn(7, generator=generator).bfloat16(),
            "turned": torch.randn(3, 4, generator=generator).t(),
            "count": torch.tensor(3),
            "none": torch.zeros(0, 2),
            "mask": torch.tensor([True, False]),
        },
        "optimizer": {"state": {"emb.weight": {"step": torch.tensor(2.0), "exp_avg": torch.ones(5, 3)}}},
        "rng": {"keys": np.arange(6, dtype=np.uint32), "number": np.float64(0.5)},
        "progress": {"step": 3, "loss": math.nan, "seen": {1: ("a", b"\x00\xff"), None: 2**70}},
    }


METADATA = CheckpointMetadata(run_id="r", step=3)


def save(path: Path, name: str, tree: Any = None) -> Path:
    SyncCheckpointer(format=FORMATS[name]).save(state() if tree is None else tree, path, metadata=METADATA)
    return path


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


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
    for other in {"tensors", "torch_file", "archive", "zarr"} - {manifest.format}:
        (path / "manifest.json").write_bytes(replace(manifest, format=other).to_bytes())
        assert catalog.why_damaged(catalog.entry("step3")) is not None, other


@pytest.mark.parametrize("name", ["tensors", "huggingface", "archive none"])
def test_the_plan_has_the_bytes_that_a_save_takes(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = huggingface.HuggingFaceLayout
    monkeypatch.setattr(huggingface, "HuggingFaceLayout", lambda **given: usual(**given, shard_bytes=70))
    SyncCheckpointer(format=FORMATS[name]).save(state(), tmp_path / "step3")
    files = SyncCheckpointer().manifest(tmp_path / "step3").files
    planned = FORMATS[name].plan(state(), shapes_only=True).total_bytes
    assert planned == sum(entry.size_bytes for entry in files.values())


def test_every_format_of_the_config_can_be_written_and_read() -> None:
    assert {f"format.{name}" for name in CheckpointFormat} == {"format.tensors", *ADDON.parts}
    assert [new_format(name).name for name in CheckpointFormat] == list(CheckpointFormat)


@pytest.mark.parametrize("name", CheckpointFormat)
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


def test_a_torch_file_is_read_by_torch_alone(tmp_path: Path) -> None:
    SyncCheckpointer(format=FORMATS["torch_file"]).save(state(), tmp_path / "step3")
    loaded = torch.load(tmp_path / "step3/rank0.pt", weights_only=True)["tensors"]
    assert torch.equal(loaded["model/turned"], state()["model"]["turned"])
    assert loaded["model/emb.weight"].data_ptr() == loaded["model/head.weight"].data_ptr()


@pytest.mark.parametrize("compression", list(Compression))
def test_an_archive_is_read_by_tar_and_safetensors(tmp_path: Path, compression: Compression) -> None:
    SyncCheckpointer(format=ArchiveFormat(compression)).save(state(), tmp_path / "step3")
    (path,) = (tmp_path / "step3").glob("rank0.tar*")
    assert path.suffix == (".tar" if compression is Compression.none else f".{compression.value}")
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["rank0.safetensors", "rank0.json"]
        file = archive.extractfile("rank0.safetensors")
        assert file is not None
        tensors = safetensors.torch.load(file.read())
    assert torch.equal(tensors["model/half"], state()["model"]["half"])


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


# What an archive holds after its own digest was mended, and the reason given.
BAD_ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "larger than the memory": (
        lambda: gzip.compress(_header("rank0.safetensors", 10**15) + bytes(10**6), 1),
        "larger than the free memory",
    ),
    "another file": (
        lambda: gzip.compress(_header("more", 10**6) + bytes(10**6), 1),
        "it holds 'more', which does not belong there",
    ),
    "a file twice": (
        lambda: gzip.compress(_header("rank0.json", 0) * 2, 1),
        "it holds 'rank0.json', which does not belong there",
    ),
    "zeros": (lambda: gzip.compress(bytes(400 * 10**6), 1), "it lacks rank0.json"),
    "half a gzip": (lambda: gzip.compress(_header("rank0.json", 9) + b"x")[:-4], "cannot be decompressed"),
}


@pytest.mark.parametrize("kind", BAD_ARCHIVES)
def test_an_archive_that_fits_its_digest_but_not_the_memory_is_refused(tmp_path: Path, kind: str) -> None:
    content, why = BAD_ARCHIVES[kind]
    SyncCheckpointer(format=ArchiveFormat(Compression.gz)).save(state(), tmp_path / "step3")
    reseal(tmp_path / "step3", "rank0.tar.gz", content())
    with pytest.raises(CheckpointError, match=why):
        SyncCheckpointer().load(tmp_path / "step3")


def test_transformers_reads_a_checkpoint(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    files = {"config.json": config.to_json_string().encode()}
    SyncCheckpointer(format="huggingface").save(
        {"model": model.state_dict(), "x": 1}, tmp_path / "step3", metadata=CheckpointMetadata(step=3, files=files)
    )
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "step3").eval()
    tokens = torch.arange(6)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_a_large_model_is_sharded_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = huggingface.HuggingFaceLayout
    monkeypatch.setattr(huggingface, "HuggingFaceLayout", lambda **given: usual(**given, shard_bytes=70))
    SyncCheckpointer(format="huggingface").save(state(), tmp_path / "step3")
    table = json.loads((tmp_path / "step3/model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(table.values())) > 1
    for name, file in table.items():
        found = safetensors.torch.load_file(tmp_path / "step3" / file)[name]
        assert torch.equal(found, state()["model"][name])
    assert same(dict(SyncCheckpointer().load(tmp_path / "step3")), state())


def of_torch_alone() -> dict[str, Any]:
    """A tensor of each type that safetensors has no name for, and an array."""
    raw = torch.arange(96, dtype=torch.uint8).reshape(2, 48)
    types = (torch.complex128, torch.complex32, torch.float8_e8m0fnu)
    tensors = {str(dtype): raw.view(dtype) for dtype in types}
    return {"model": {**tensors, "turned": tensors["torch.complex128"].t().conj(), "array": np.arange(3) * 1j}}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", [SyncCheckpointer, AsyncCheckpointer])
def test_a_torch_file_holds_types_that_safetensors_cannot(tmp_path: Path, kind: type[SyncCheckpointer]) -> None:
    checkpointer = kind(format=TorchFileFormat())
    checkpointer.save(of_torch_alone(), tmp_path / "step3", metadata=METADATA)
    checkpointer.close()
    assert same(dict(SyncCheckpointer().load(tmp_path / "step3")), of_torch_alone())
    with opened(tmp_path / "step3") as content:
        norms = {name: tensor.norm() for name, tensor in content.tensors.items()}
    assert norms["model/array"] == pytest.approx(math.sqrt(5))
    values = of_torch_alone()["model"]["torch.complex32"].to(torch.complex128)
    assert norms["model/torch.complex32"] == pytest.approx(float(values.norm()), nan_ok=True)


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
