"""What other programs read of a checkpoint in each of their formats, and what of an archive is refused."""

from __future__ import annotations

import gzip
import json
import math
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from known_formats import FORMATS, METADATA, of_torch_alone, state
from states import reseal, same

from trainer_cli.addons.formats import huggingface
from trainer_cli.addons.formats.addon import ADDON
from trainer_cli.addons.formats.archive import ArchiveFormat
from trainer_cli.addons.formats.huggingface import HuggingFaceFormat
from trainer_cli.addons.formats.torch_file import TorchFileFormat
from trainer_cli.checkpoint.checkpointer import (
    AsyncCheckpointer,
    CheckpointMetadata,
    SyncCheckpointer,
)
from trainer_cli.commands.ckpt_inspect import open_content
from trainer_cli.errors import CheckpointError
from trainer_cli.format.open import new_format
from trainer_cli.schema.checkpoint_config import CheckpointFormat, Compression


def test_every_format_of_the_config_can_be_written_and_read() -> None:
    assert {f"format.{name}" for name in CheckpointFormat} == {
        "format.tensors",
        *(part for part in ADDON.parts if part.startswith("format.")),
    }
    assert [new_format(name).name for name in CheckpointFormat] == list(CheckpointFormat)


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
    model: Any = GPT2LMHeadModel(config)
    model.eval()
    files = {"config.json": config.to_json_string().encode()}
    SyncCheckpointer(format="huggingface").save(
        {"model": model.state_dict(), "x": 1}, tmp_path / "step3", metadata=CheckpointMetadata(step=3, files=files)
    )
    loaded: Any = GPT2LMHeadModel.from_pretrained(tmp_path / "step3")
    loaded.eval()
    tokens = torch.arange(6)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_a_large_model_is_sharded_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = huggingface.HuggingFaceLayout
    monkeypatch.setattr(huggingface, "HuggingFaceLayout", lambda **given: usual(**given, shard_bytes=70))
    SyncCheckpointer(format="huggingface").save(state(), tmp_path / "step3")
    sizes = [entry.size_bytes for entry in SyncCheckpointer().manifest(tmp_path / "step3").files.values()]
    assert HuggingFaceFormat().plan(state(), shapes_only=True).total_bytes == sum(sizes)
    table = json.loads((tmp_path / "step3/model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(table.values())) > 1
    for name, file in table.items():
        found = safetensors.torch.load_file(tmp_path / "step3" / file)[name]
        assert torch.equal(found, state()["model"][name])
    assert same(dict(SyncCheckpointer().load(tmp_path / "step3")), state())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", [SyncCheckpointer, AsyncCheckpointer])
def test_a_torch_file_holds_types_that_safetensors_cannot(tmp_path: Path, kind: type[SyncCheckpointer]) -> None:
    checkpointer = kind(format=TorchFileFormat())
    checkpointer.save(of_torch_alone(), tmp_path / "step3", metadata=METADATA)
    checkpointer.close()
    assert same(dict(SyncCheckpointer().load(tmp_path / "step3")), of_torch_alone())
    with open_content(tmp_path / "step3") as content:
        norms = {name: tensor.norm() for name, tensor in content.tensors.items()}
    assert norms["model/array"] == pytest.approx(math.sqrt(5))
    values = of_torch_alone()["model"]["torch.complex32"].to(torch.complex128)
    assert norms["model/torch.complex32"] == pytest.approx(float(values.norm()), nan_ok=True)
