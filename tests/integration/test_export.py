"""`train ckpt export`, `average` and `strip`, through the real command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from command import SMALL, records, train, trained
from printed import message

pytestmark = pytest.mark.slow
EMA = "callbacks={ema: {_target_: trainer_cli.EMA, decay: 0.9}}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    trained(*SMALL, "name=base", EMA, cwd=folder)
    return folder


def saved(checkpoint: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(checkpoint / "rank0.safetensors")


def test_an_export_holds_the_weights_or_their_averages(place: Path) -> None:
    tensors = saved(place / "runs/base/checkpoints/step20")
    for more, kept, said in (((), "callbacks/ema/average", True), (("--ema", "none", "--overwrite"), "model", False)):
        done = train("ckpt", "export", "runs/base@latest", "--format", "torch", *more, cwd=place)
        assert (done.code, done.out.startswith("exported: runs/base/export/step20.pt (4 tensors, ")) == (0, True)
        assert ("weights: the average of callback 'ema', which evaluations saw" in done.out) is said
        plain = torch.load(place / "runs/base/export/step20.pt", weights_only=True)
        assert all(torch.equal(plain[name], tensors[f"{kept}/{name}"]) for name in plain)
    shards = ("--format", "huggingface", "--shard-size", "20kb")
    done = train("ckpt", "export", "runs/base@step10", *shards, "--ema", "-o", "hf", cwd=place)
    assert "no config.json is written" in done.err
    index = json.loads((place / "hf/model.safetensors.index.json").read_text())
    averaged: dict[str, Any] = {}
    for file in sorted(set(index["weight_map"].values())):
        averaged |= safetensors.torch.load_file(place / "hf" / file)
    tensors = saved(place / "runs/base/checkpoints/step10")
    assert all(torch.equal(averaged[name], tensors[f"callbacks/ema/average/{name}"]) for name in averaged)
    assert train("ckpt", "export", "hf", "--format", "torch", "-o", "hf.pt", cwd=place).code == 0
    assert torch.load(place / "hf.pt", weights_only=True).keys() == averaged.keys()
    again = train("fit", *SMALL, "name=tuned", "ckpt=hf", "loop.max_duration=1", cwd=place)
    assert "weights from hf (4 tensors)" in again.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["export", "runs/base@latest", "--format", "onnx"], 2, "ONNX is not written: torch.onnx.export does it"),
        (["export", "runs/base@latest"], 2, "train ckpt export needs --format"),
        (
            ["export", "runs/base@latest", "--format", "torch", "--shard-size", "big"],
            2,
            "'big' is not a size such as 500MB",
        ),
        (["export", "runs/base@latest", "--format", "torch", "--key-mapping", "x"], 2, "'x' is not OLD=NEW"),
        (["export", "runs/base@latest", "--format", "torch", "--ema", "swa"], 3, "It has those of ema"),
        (["export", "runs/base@latest", "--format", "torch", "--hf-config", "c"], 2, "--hf-config is for"),
        *(
            (["export", "runs/base@latest", "--format", format, "--shard-size", "5GB"], 2, said)
            for format, said in (
                ("torch", "--shard-size is for --format huggingface. Leave --shard-size out"),
                ("safetensors", "--shard-size is for --format huggingface. Leave --shard-size out"),
                (
                    "archive",
                    "only --output and --overwrite apply to it (--format archive). Leave the other options out",
                ),
            )
        ),
        (["export", "runs/base/checkpoints/step*", "--format", "torch"], 2, "names 3 checkpoints, but one is expected"),
        (["export", "runs/nowhere", "--format", "torch"], 3, "matches nothing"),
        (["average", "runs/base@step10", "-o", "m"], 2, "an average is of several"),
        (["average", "runs/base/checkpoints/step*", "-o", "m", "--weights", "1,2"], 2, "2 numbers for 3"),
        (["strip", "runs/base@latest", "-o", "runs/base/checkpoints/step10"], 2, "exists. Choose another --output"),
    ],
)
def test_a_mistake_is_one_message(base: Path, arguments: list[str], code: int, said: str) -> None:
    done = train("ckpt", *arguments, cwd=base)
    assert done.code == code, done
    assert said in message(done.err)
    assert "Traceback" not in done.err


@pytest.mark.parametrize("verb", ["validate", pytest.param("predict", marks=pytest.mark.addon("predict"))])
def test_the_trained_weights_are_evaluated_without_the_average(verb: str, place: Path) -> None:
    results = []
    for override in ((), ("load.average=false",), ("callbacks.ema=null",)):
        done = train(verb, "ckpt=runs/base@latest", f"{verb}.folder=out", *override, cwd=place)
        assert done.code == 0, done.err
        assert ("average of ema" in done.out) == (verb == "validate" and not override)
        [file] = (place / "out").rglob("*.jsonl")
        record = json.loads(file.read_text().splitlines()[-1])
        results.append({name: value for name, value in record.items() if name not in ("time", "average")})
        if verb == "predict" and not override:
            again = train(verb, "ckpt=runs/base@latest", "predict.folder=out", "load.average=false", cwd=place)
            assert "were made with another load.average" in again.err
        shutil.rmtree(place / "out")
    assert results[1] == results[2] != results[0]


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (("ckpt", "export", "runs/base@latest", "--format", "torch", "load.average=false"), "Write --ema none"),
        (("ckpt", "strip", "runs/base@latest", "-o", "s", "load.average=false"), "Write --ema none"),
        (("validate", "ckpt=runs/base@latest", "--ema", "none"), "load.average=false takes the trained weights"),
        pytest.param(
            ("predict", "ckpt=runs/base@latest", "--ema", "none"),
            "load.average=false takes the trained weights",
            marks=pytest.mark.addon("predict"),
        ),
        (("fit", "name=b", "ckpt=runs/base@latest", "--ema", "none"), "load.average=false takes the trained weights"),
    ],
)
def test_a_spelling_of_another_verb_is_refused_with_the_right_one(words: list[str], cure: str, place: Path) -> None:
    done = train(*words, cwd=place)
    assert done.code == 2
    assert cure in message(done.err)


def test_an_average_is_a_checkpoint_that_is_evaluated_and_forked(place: Path) -> None:
    done = train(
        "ckpt", "average", "runs/base@step10", "runs/base@step20", "-o", "runs/mean", "--ema", "none", cwd=place
    )
    assert done.code == 0, done
    mean, *both = (
        saved(place / f"runs/{name}") for name in ("mean", "base/checkpoints/step10", "base/checkpoints/step20")
    )
    for name, value in mean.items():
        assert torch.equal(value, ((both[0][name].double() + both[1][name].double()) / 2).float())
    done = train("validate", "ckpt=runs/mean", "validate.folder=out", cwd=place)
    assert (done.code, records(place / "out/validation.jsonl")[0]["step"]) == (0, 20)
    assert "weights from runs/mean step 20" in train("fit", *SMALL, "name=f", "ckpt=runs/mean", cwd=place).err
    shown = train("ckpt", "show", "runs/mean", cwd=place).out
    assert "average of step10, step20" in shown


def test_weights_of_an_average_belong_to_the_checkpoints_as_they_are_named(place: Path) -> None:
    newest_first = ("runs/base@step20", "runs/base@step10", "--weights", "3,1")
    assert train("ckpt", "average", *newest_first, "-o", "runs/mean", "--ema", "none", cwd=place).code == 0
    mean, old, new = (
        saved(place / f"runs/{name}") for name in ("mean", "base/checkpoints/step10", "base/checkpoints/step20")
    )
    for name, value in mean.items():
        torch.testing.assert_close(value, old[name] / 4 + new[name] * 3 / 4)


@pytest.mark.parametrize("lost", ["manifest.json", "rank0.safetensors"])
def test_an_average_is_of_all_that_were_named_or_of_none(place: Path, lost: str) -> None:
    (place / "runs/base/checkpoints/step0" / lost).unlink()
    done = train("ckpt", "average", "runs/base/checkpoints/step*", "-o", "runs/mean", cwd=place)
    assert (done.code, "it is not valid: " in done.err, "step0" in done.err) == (3, True, True)
    assert not (place / "runs/mean").exists()


def test_stripped_weights_are_evaluated_and_cannot_be_resumed(place: Path) -> None:
    assert train("ckpt", "strip", "runs/base@latest", "-o", "runs/slim", cwd=place).code == 0
    assert sorted(path.name for path in (place / "runs/slim").iterdir()) == [
        "config.yaml", "manifest.json", "rank0.json", "rank0.safetensors"
    ]  # fmt: skip
    assert all(name.startswith("model/") for name in saved(place / "runs/slim"))
    assert train("validate", "ckpt=runs/slim", "validate.folder=out", cwd=place).code == 0
    done = train("fit", *SMALL, "name=f", "ckpt=runs/slim", "load.states=[all]", cwd=place)
    assert done.code == 2
    assert re.search(r"^  optimizer +missing in the checkpoint$", done.err, re.MULTILINE)


def test_an_archive_of_a_checkpoint_is_evaluated_and_forked(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = str(tmp_path / "cache")
    done = train("ckpt", "export", "runs/base@step10", "--format", "archive", "-o", "step10.tar.gz", cwd=place)
    assert (done.code, done.out.startswith("exported: step10.tar.gz (")) == (0, True)
    done = train("validate", "ckpt=step10.tar.gz", "validate.folder=out", cwd=place, XDG_CACHE_HOME=cache)
    assert done.code == 0, done
    (row,) = records(place / "out/validation.jsonl")
    assert row["step"] == 10
    own = [one for one in records(place / "runs/base/metrics.jsonl") if one["step"] == 10 and "val/loss" in one][-1]
    assert row["val/loss"] == own["val/loss"]
    done = train("fit", *SMALL, "name=f", "ckpt=step10.tar.gz", cwd=place, XDG_CACHE_HOME=cache)
    assert "step10 step 10 (4 tensors)" in done.err
    done = train("ckpt", "export", "runs/base", "--format", "archive", "--ema", cwd=place)
    assert (done.code, "an archive is a copy of the whole checkpoint" in done.err) == (2, True)
