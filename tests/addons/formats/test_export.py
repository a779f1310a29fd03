"""Exported weights load in other programs, bit for bit; an export is whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch
from command import run_program
from states import same_tensors

from trainer_cli.addons.formats.export import Average, ExportFormat, export, renamed
from trainer_cli.addons.formats.export_run import export_one, strip
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.state.weights import select_weights
from trainer_cli.storage import replacing
from trainer_cli.trainer.state import model_files
from trainer_cli.trainer.trainer import Trainer


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tied = torch.randn(6, 4, generator=generator)
    return {
        "emb.weight": tied,
        "body.weight": torch.randn(4, 6, generator=generator).t(),
        "body.count": torch.tensor(3),
        "head.weight": tied,
    }


def test_each_format_loads_as_what_it_was(tmp_path: Path) -> None:
    for format in ExportFormat:
        assert export(weights(), tmp_path / format, format) > 0
    loaded = torch.load(tmp_path / "torch", weights_only=True)
    assert same_tensors(loaded, weights())
    assert loaded["emb.weight"].data_ptr() == loaded["head.weight"].data_ptr()
    assert same_tensors(safetensors.torch.load_file(tmp_path / "safetensors"), weights())
    assert same_tensors(safetensors.torch.load_file(tmp_path / "huggingface/model.safetensors"), weights())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for format in ExportFormat:
            export(weights(), tmp_path / format, format)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}


@pytest.mark.parametrize(("limit", "shards"), [(10_000, 1), (200, 2), (1, 4)])
def test_shards_are_no_larger_than_asked_for_and_the_index_names_them(tmp_path: Path, limit: int, shards: int) -> None:
    export(weights(), tmp_path / "out", ExportFormat.huggingface, shard_bytes=limit, extra={"config.json": b"{}"})
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == shards
    assert (tmp_path / "out/config.json").read_bytes() == b"{}"
    if shards > 1:
        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights().values())
        found = {
            name: safetensors.torch.load_file(tmp_path / "out" / file)[name]
            for name, file in index["weight_map"].items()
        }
        assert same_tensors(found, weights())
    assert all(
        sum(one.nbytes for one in safetensors.torch.load_file(file).values()) <= max(limit, 96) for file in files
    )


def test_only_floating_point_tensors_are_cast(tmp_path: Path) -> None:
    export(weights(), tmp_path / "x.pt", ExportFormat.torch, dtype=torch.bfloat16)
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert {name: value.dtype for name, value in loaded.items()} == {
        "emb.weight": torch.bfloat16, "body.weight": torch.bfloat16,
        "body.count": torch.int64, "head.weight": torch.bfloat16,
    }  # fmt: skip
    assert loaded["emb.weight"].data_ptr() == loaded["head.weight"].data_ptr()


def test_names_are_mapped_and_left_out() -> None:
    found = renamed(weights(), {"body.*": "model.layer.*", "head.*": ""})
    assert list(found) == ["emb.weight", "model.layer.weight", "model.layer.count"]
    with pytest.raises(UserError, match=r"'tail\.\*' matches nothing"):
        renamed(weights(), {"tail.*": "*"})
    with pytest.raises(UserError, match=r"two tensors get the name 'emb\.weight'"):
        renamed(weights(), {"head.*": "emb.*"})


def test_averaged_weights_take_the_place_of_the_trained() -> None:
    average = {"body.weight": torch.ones(6, 4)}
    state = {"model": weights(), "callbacks": {"ema": {"average": average}, "other": {}}}
    found = select_weights(state, "x", "ema")
    assert torch.equal(found["body.weight"], average["body.weight"])
    assert torch.equal(found["emb.weight"], weights()["emb.weight"])
    tied = select_weights({**state, "callbacks": {"ema": {"average": {"emb.weight": torch.ones(6, 4)}}}}, "x", "ema")
    assert torch.equal(tied["emb.weight"], torch.ones(6, 4))
    assert tied["head.weight"] is tied["emb.weight"]
    with pytest.raises(CheckpointError, match=r"no averaged weights of a callback 'swa'.*It has those of ema"):
        select_weights(state, "x", "swa")
    with pytest.raises(CheckpointError, match="has no model"):
        select_weights({}, "x")


def test_an_output_that_exists_is_replaced_only_if_asked_and_only_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_rename(*_: Path) -> None:
        raise OSError(5, "no rename")

    out = tmp_path / "out"
    export(weights(), out, ExportFormat.huggingface)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"exists\. Choose another --output, or add --overwrite"):
        export(weights(), out, ExportFormat.torch)

    def write_half() -> None:
        with replacing(out, overwrite=True) as place:
            place.mkdir()
            (place / "half").write_bytes(b"half")
            raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert (out / "model.safetensors").read_bytes() == before
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", no_rename)
        with pytest.raises(OSError, match="no rename"):
            export(weights(), out, ExportFormat.torch, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    export(weights(), out, ExportFormat.torch, overwrite=True)
    assert out.is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_export_left_is_deleted_by_the_next_but_not_that_of_a_live_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in (".out.killed.part", ".output.killed.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_bytes(b"half")
    with replacing(out, overwrite=True) as live:
        live.write_bytes(b"live")
        export(weights(), out, ExportFormat.torch)
        assert live.exists()
    assert out.read_bytes() == b"live"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".output.killed.part", "out"]


KILLED = """
import os, signal, sys
from pathlib import Path
import safetensors.torch, torch
from trainer_cli.addons.formats.export import ExportFormat, export
out, when = Path(sys.argv[1]), sys.argv[2]
count = 0
def dying(usual, at):
    def call(*args, **more):
        global count
        count += 1
        if count == at: os.kill(os.getpid(), signal.SIGKILL)
        return usual(*args, **more)
    return call
if when == "second shard": safetensors.torch.save_file = dying(safetensors.torch.save_file, 2)
if when == "fsync": os.fsync = dying(os.fsync, 1)
if when == "rename": os.replace = dying(os.replace, 1)
weights = {name: torch.ones(9) for name in "abc"}
export(weights, out, ExportFormat.huggingface, shard_bytes=40)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["second shard", "fsync", "rename"])
def test_a_kill_leaves_nothing_under_the_name_of_the_output(tmp_path: Path, when: str) -> None:
    assert run_program(KILLED, str(tmp_path / "out"), when, folder=tmp_path).killed
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.glob(".out.*"))) == 1, "what it had written"
    export(weights(), tmp_path / "out", ExportFormat.torch)
    assert list(tmp_path.glob(".out.*")) == []


def test_the_average_is_the_mean_in_the_type_of_the_weights() -> None:
    mean = Average()
    for value, share in ((1.0, 1.0), (2.0, 1.0), (4.5, 2.0)):
        found = {"w": torch.full((3,), value).bfloat16(), "n": torch.tensor(int(value))}
        mean.add(found, "x", share)
    assert torch.equal(mean.result()["w"], torch.full((3,), 3.0).bfloat16())
    assert mean.result()["n"] == 4
    assert mean.differing == {"n"}


def test_what_cannot_be_averaged_is_one_table() -> None:
    mean = Average()
    mean.add({"a": torch.ones(2), "b": torch.ones(2)}, "one")
    with pytest.raises(CheckpointError) as caught:
        mean.add({"a": torch.ones(3), "c": torch.ones(2)}, "two")
    assert str(caught.value).splitlines() == [
        "two differs from those before:",
        "  a: (3,) of torch.float32 instead of (2,) of torch.float32",
        "  b: missing",
        "  c: only here",
    ]


@pytest.mark.slow
def test_transformers_and_dcp_load_an_export(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    model: Any = GPT2LMHeadModel(config)
    model.eval()
    trained = {f"net.{name}": value for name, value in model.state_dict().items()}
    trained["net.lm_head.weight"] = trained["net.transformer.wte.weight"]
    own = renamed(trained, {"net.*": "*"})
    tokens = torch.arange(6)[None]
    for name, limit in (("whole", 10**9), ("shards", 2000)):
        export(own, tmp_path / name, ExportFormat.huggingface, shard_bytes=limit, extra=model_files(model))
        loaded: Any = GPT2LMHeadModel.from_pretrained(tmp_path / name)
        loaded.eval()
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    export(own, tmp_path / "x.pt", ExportFormat.torch)
    torch_save_to_dcp(tmp_path / "x.pt", tmp_path / "dcp")
    assert set(FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata) == set(own)
    assert os.path.isfile(tmp_path / "dcp/.metadata")


@pytest.mark.slow
def test_a_model_of_transformers_is_exported_with_its_own_config(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    model.eval()
    tokens = torch.arange(6)[None]
    Trainer(model=model).save_checkpoint(tmp_path / "step0")
    strip(tmp_path / "step0", tmp_path / "slim")
    export_one(tmp_path / "slim", ExportFormat.huggingface, tmp_path / "hf")
    export_one(tmp_path / "hf", ExportFormat.huggingface, tmp_path / "again", dtype="float64")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    loaded.eval()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert json.loads((tmp_path / "again/config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    export_one(tmp_path / "slim", ExportFormat.torch, tmp_path / "weights.pt")
    assert (tmp_path / "weights.pt").is_file()


def test_a_model_of_another_kind_has_no_files_of_its_own() -> None:
    model = torch.nn.Linear(2, 2)
    assert model_files(model) == {}
    cast("Any", model).config = {"width": 2}
    assert model_files(model) == {}
