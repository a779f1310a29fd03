"""Predictions have each sample once and in order, also after a kill and by several processes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_cli import load_model
from trainer_cli.addons.predict.predict import predict
from trainer_cli.commands.command_line import main
from trainer_cli.data.datasets import Digits
from trainer_cli.ranks import Ranks

PARTS = """
import os

import torch
from torch import nn

from trainer_cli import CNN, Datasets, Digits, PredictionWriter


class Stops(PredictionWriter):
    def write(self, path, rows):
        if "1.jsonl" in path.name and os.environ.get("STOP"):
            super().write(path, [next(iter(rows))])
            raise KeyboardInterrupt
        super().write(path, rows)


class Nowhere(PredictionWriter):
    suffix = ".txt"

    def __init__(self, method):
        self.method = method

    def write(self, path, rows):
        if self.method == "write":
            list(rows)
        else:
            super().write(path, rows)

    def join(self, parts, path):
        pass


class Numbers(nn.Module):
    def __init__(self, returns):
        super().__init__()
        self.returns, self.weight = returns, nn.Parameter(torch.ones(()))

    def forward(self, batch):
        values = self.weight * torch.as_tensor(batch[0] if isinstance(batch, list) else batch).float()
        values = values.reshape(len(values), -1).mean(1)
        if self.training:
            return values.mean()
        return eval(self.returns, {"values": values, "nan": float("nan")})


class Unlabelled(Datasets):
    def __init__(self):
        digits = Digits()
        super().__init__(digits.train, digits.val, torch.arange(7.0))
"""
FOLDER = "runs/digits_mlp/predictions/step8"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "parts.py").write_text(PARTS)
        more = ["loop.max_duration=8", "logging.console=off", "loggers.tensorboard=null", "model.dropout=0"]
        assert main(["fit", "+experiment=digits_mlp", *more, "data.val_fraction=0.9", "report=false"]) == 0
    return folder


@pytest.fixture
def place(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(run)
    return run


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def straight(place: Path) -> bytes:
    """The predictions of one process that was not stopped."""
    assert main(["predict", "ckpt=runs/digits_mlp@latest", "predict.folder=straight"]) == 0
    return (place / "straight/step8/val.jsonl").read_bytes()


def test_every_sample_is_predicted_once_in_order_with_the_weights_of_the_checkpoint(place: Path) -> None:
    assert main(["predict", "ckpt=runs/digits_mlp@latest"]) == 0
    predicted = rows(place / FOLDER / "val.jsonl")
    assert [row["sample"] for row in predicted] == list(range(1617))
    val, model = Digits(val_fraction=0.9).val, load_model("runs/digits_mlp@latest").eval()
    assert [row["labels"] for row in predicted] == [val[index][1] for index in range(1617)]
    images = torch.stack([val[index][0] for index in range(5)])
    with torch.no_grad():
        expected = model((images, torch.zeros(5, dtype=torch.long)))["logits"]
    assert torch.allclose(torch.tensor([row["logits"] for row in predicted[:5]]), expected, atol=1e-6)
    assert sorted(path.name for path in (place / FOLDER).iterdir()) == ["val.jsonl", "val.jsonl.predictions.json"]


def test_a_finished_file_is_not_written_again(straight: bytes, place: Path) -> None:
    before = (place / "straight/step8/val.jsonl").stat().st_mtime_ns
    assert main(["predict", "ckpt=runs/digits_mlp@latest", "predict.folder=straight"]) == 0
    assert (place / "straight/step8/val.jsonl").stat().st_mtime_ns == before


def test_checkpoints_of_several_runs_are_kept_apart_below_one_folder(place: Path) -> None:
    shutil.copytree("runs/digits_mlp", "runs/others/copy", dirs_exist_ok=True)
    patterns = "ckpt=[runs/digits_mlp/checkpoints/step8,runs/others/copy/checkpoints/step8]"
    assert main(["predict", patterns, "predict.folder=both"]) == 0
    files = sorted(str(path.relative_to(place)) for path in place.glob("both/**/val.jsonl"))
    assert files == ["both/digits_mlp/step8/val.jsonl", "both/others/copy/step8/val.jsonl"]
    shutil.rmtree("runs/others")


def test_what_was_interrupted_goes_on_with_the_missing_part(
    straight: bytes, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["predict", "ckpt=runs/digits_mlp@latest", "predict.folder=cut", "predict.writer={_target_: parts.Stops}"]
    monkeypatch.setenv("STOP", "1")
    assert main(command) == 130
    parts = place / "cut/step8/.val.jsonl.parts"
    assert [path.name for path in parts.iterdir()] == ["00000000.jsonl"]
    monkeypatch.delenv("STOP")
    assert main(command) == 0
    assert (place / "cut/step8/val.jsonl").read_bytes() == straight
    assert not parts.exists()


def test_several_processes_write_the_file_of_one(straight: bytes, place: Path) -> None:
    # Another number of processes may go on.
    for name, following in (("ranks", Ranks(0, 2)), ("others", Ranks(2, 3)), ("single", Ranks())):
        command, file = ["ckpt=runs/digits_mlp@latest", f"predict.folder={name}"], place / f"{name}/step8/val.jsonl"
        assert predict(command, Ranks(0, 3) if name == "others" else Ranks(1, 2)) == 0
        assert not file.exists()
        if name == "others":
            assert predict(command, Ranks(1, 3)) == 0
        assert predict(command, following) == 0
        assert file.read_bytes() == straight


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ("predict.outputs=[labels]", "predict.outputs"),
        ("data.batch_size=64", "config"),
        ("load.ignore_keys=[layers.1.*]", "load"),
        ("predict.writer={_target_: parts.Stops}", "predict.writer"),
    ],
)
def test_parts_that_were_made_otherwise_are_refused(
    straight: bytes, capfd: pytest.CaptureFixture[str], changed: str, what: str
) -> None:
    assert main(["predict", "ckpt=runs/digits_mlp@latest", "predict.folder=straight", changed]) == 2
    assert f"were made with another {what}" in capfd.readouterr().err


def test_predictions_of_a_file_that_was_replaced_are_refused(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = place / "weights.pt"
    state = load_model("runs/digits_mlp@latest").state_dict()
    torch.save(state, weights)
    command = ["predict", f"ckpt={weights.name}", "+experiment=digits_mlp", "predict.folder=other"]
    assert main(command) == 0
    assert main(command) == 0
    torch.save({name: 2 * value for name, value in state.items()}, weights)
    assert main(command) == 2
    assert "were made with another checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        ("{'a': values, 'mean': values.mean(), 'b': list('xyz')[: len(values)]}", {"a", "b"}),
        ("(None, {'a': values})", {"a"}),
        ("(values.mean(), {'a': values})", {"a"}),
        ("(values, values)", {"output_0", "output_1"}),
        ("[{'boxes': [value, nan]} for value in values]", {"boxes"}),
        ("values.bfloat16()", {"output"}),
        ("values.mean()", "returned a tensor of shape () for 3 samples, which has no output for each of them"),
        ("{'loss': values.mean(), 'b': [1]}", "returned a mapping of loss, b for 3 samples"),
    ],
)
def test_outputs_with_a_value_for_each_sample_are_written(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], returns: str, expected: Any
) -> None:
    code = main(
        [
            "predict", "ckpt=runs/digits_mlp@latest", "load.strict=false", f"predict.folder={tmp_path}",
            "data=null", "data={_target_: parts.Unlabelled, batch_size: 3}",
            "model=null", f'model={{_target_: parts.Numbers, returns: "{returns}"}}', "trust=[parts]",
        ]
    )  # fmt: skip
    if isinstance(expected, str):
        assert (code, list(tmp_path.glob("*/*.jsonl"))) == (2, [])
        assert expected in capfd.readouterr().err
        return
    assert code == 0
    # The part `predict` of the data, which has no labels.
    predicted = rows(tmp_path / "step8/predict.jsonl")
    assert [row["sample"] for row in predicted] == list(range(7))
    assert {name for row in predicted for name in row} == {"sample", *expected}
    if "boxes" in expected:
        assert predicted[6]["boxes"] == [6.0, "nan"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "predict needs ckpt=, whose weights to use"),
        (["ckpt=runs/digits_mlp@latest", "predict.loader=vall"], "there is no loader 'vall'"),
        (["ckpt=runs/digits_mlp@latest", "predict.outputs=[logitz]", "predict.folder=new"], "no output is called so"),
        (
            ["ckpt=runs/digits_mlp@latest", "predict.writer={_target_: trainer_cli.MLP}"],
            "must be a subclass of Predict",
        ),
        *[
            (
                [
                    "ckpt=runs/digits_mlp@latest",
                    f"predict.writer={{_target_: parts.Nowhere, method: {method}}}",
                    f"predict.folder=nowhere_{method}",
                ],
                f"Nowhere.{method} has not written the file",
            )
            for method in ("write", "join")
        ],
        (["ckpt=runs/digits_mlp@latest", "predict.foldr=x"], "no key 'predict.foldr'"),
    ],
)
def test_mistakes_are_explained(
    place: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["predict", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_parquet_has_a_column_for_each_output(straight: bytes, place: Path) -> None:
    parquet = pytest.importorskip(
        "pyarrow.parquet", reason="pyarrow is not installed: pip install 'trainer-cli[parquet]'"
    )
    writer = "predict.writer={_target_: trainer_cli.ParquetWriter}"
    assert main(["predict", "ckpt=runs/digits_mlp@latest", "predict.folder=table", writer]) == 0
    assert parquet.read_table(place / "table/step8/val.parquet").to_pylist() == rows(place / "straight/step8/val.jsonl")


def test_the_extra_of_parquet_is_named(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where it is not installed.
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    command = ["predict", "ckpt=runs/digits_mlp@latest", "predict.folder=none"]
    assert main([*command, "predict.writer={_target_: trainer_cli.ParquetWriter}"]) == 2
    assert 'pip install "trainer-cli[parquet]"' in capfd.readouterr().err
