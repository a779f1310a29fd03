"""`ckpt=` of `fit` and `validate`: weights of other programs and other runs, with other names and a new head."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from command import SMALL, Result, records, run_program, train
from compare import final_state
from printed import message

NET = '''
"""A classifier of small images with 10 classes, saved by several programs; its head is to be replaced."""
from trainer_cli.models.mlp import MLP


class Net(MLP):
    """Three layers, named as in the files."""

    def __init__(self, classes=10, seed=None):
        super().__init__(hidden=[16], classes=classes)
'''
SENTENCES = '''
from torch import nn
from transformers import BertConfig, BertModel

from trainer_cli.models.classification import classification

BERT = dict(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)


class Sentences(nn.Module):
    """A transformers backbone under a new head, which reads the grey values of an image as words."""

    def __init__(self):
        super().__init__()
        self.backbone = BertModel(BertConfig(**BERT))
        self.head = nn.Linear(16, 10)

    def forward(self, batch):
        images, labels = batch
        words = images.flatten(1).round().long().clamp(0, 19)
        return classification(self.head(self.backbone(words).pooler_output), labels, training=self.training)
'''
SAVE = '''
"""Save the same weights by every program."""
import sys, warnings
import torch, torch.distributed.checkpoint as dcp
import lightning as L
from transformers import BertConfig, BertModel
from mine import Net
from sentences import BERT

warnings.simplefilter("ignore")
torch.manual_seed(0)


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.save_hyperparameters({"lr": 0.1})

    def training_step(self, batch, index):
        return self.net(batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


lit = Lit()
data = torch.utils.data.TensorDataset(torch.randn(12, 64), torch.randint(0, 10, (12,)))
trainer = L.Trainer(max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(lit, torch.utils.data.DataLoader(data, batch_size=4))
trainer.save_checkpoint("lightning.ckpt")
torch.save({"epoch": 1, "model": lit.net.state_dict(), "optimizer": {}}, "torch.pt")
dcp.save({"model": lit.net.state_dict()}, checkpoint_id="dcp")
bert = BertModel(BertConfig(**BERT))
bert.save_pretrained("bert")
bert.save_pretrained("bert_shards", max_shard_size="8KB")
torch.save(bert.state_dict(), "bert.pt")
torch.save(Net(), "whole.pt")
'''


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a model, and that model's weights as several programs save them."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "mine.py").write_text(NET)
    (folder / "sentences.py").write_text(SENTENCES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        imports = ("lightning", "transformers.models.bert.modeling_bert")
        done = run_program(SAVE, folder=folder, imports=imports)
    assert done.code == 0, done.out
    return folder


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "place")
    return tmp_path / "place"


def fit(place: Path, *overrides: str, code: int = 0, name: str = "tuned", imports: tuple[str, ...] = ()) -> Result:
    """One step with no learning rate from loaded weights."""
    short = (*SMALL, f"name={name}", "loop.max_duration=1", "optimizer.lr=0", "scheduler=null")
    done = train("fit", *short, *overrides, cwd=place, imports=imports)
    assert done.code == code, done
    return done


def weights(run: Path) -> dict[str, torch.Tensor]:
    (file,) = run.glob("checkpoints/step1/rank0.safetensors")
    loaded = safetensors.torch.load_file(file)
    return {name.removeprefix("model/"): value for name, value in loaded.items() if name.startswith("model/")}


MODEL = ("model=null", "model={_target_: mine.Net}")
MODEL_OF_12 = ("model=null", "model={_target_: mine.Net, classes: 12}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ckpt", "more", "program"),
    [
        ("torch.pt", (), "torch file"),
        ("dcp", (), "DCP folder"),
        ("lightning.ckpt", ("load.key_mapping={net.*: *}",), "Lightning checkpoint"),
    ],
)
def test_weights_of_another_program_are_fine_tuned_with_a_new_head(
    place: Path, ckpt: str, more: tuple[str, ...], program: str
) -> None:
    trained_weights = torch.load(place / "torch.pt")["model"]
    done = fit(place, *MODEL_OF_12, f"ckpt={ckpt}", "load.ignore_keys=[layers.4.*]", *more)
    assert f"{ckpt} is a {program}" in done.err
    assert "(2 of 4 tensors)" in done.err
    tuned = weights(place / "runs/tuned")
    assert tuned["layers.4.weight"].shape == (12, 16)
    assert all(torch.equal(tuned[name], trained_weights[name]) for name in ("layers.1.weight", "layers.1.bias"))


@pytest.mark.slow
@pytest.mark.parametrize("ckpt", ["bert", "bert_shards", "bert.pt"])
def test_a_backbone_of_transformers_is_fine_tuned(place: Path, ckpt: str) -> None:
    bert = torch.load(place / "bert.pt")
    fit(
        place,
        "model=null",
        "model={_target_: sentences.Sentences}",
        f"ckpt={ckpt}",
        "load.ignore_keys=[head.*]",
        "load.key_mapping={*: backbone.*}",
        "loop.limit_train_batches=1",
        "loop.eval_steps=1",
        imports=("transformers.models.bert.modeling_bert",),
    )
    tuned = weights(place / "runs/tuned")
    assert {name.removeprefix("backbone.") for name in tuned} == {*bert, "head.weight", "head.bias"}
    assert all(torch.equal(tuned[f"backbone.{name}"], value) for name, value in bert.items())


@pytest.mark.slow
def test_what_does_not_fit_is_one_table_with_its_cure(place: Path) -> None:
    done = fit(place, *MODEL_OF_12, "ckpt=torch.pt", code=2)
    assert "layers.4.weight: has shape (12, 16) in this model, but (10, 16) in the checkpoint" in done.err
    cure = "Nothing was loaded. To keep the model's own values of these layers, add 'load.ignore_keys=[layers.4.*]'."
    assert cure in done.err
    done = fit(place, *MODEL, "ckpt=lightning.ckpt", code=2)
    assert "add 'load.key_mapping={net.*: *}'" in done.err
    done = fit(place, *MODEL, "ckpt=torch.pt", "load.states=[all]", code=2)
    assert "torch.pt is a torch file, from which only the weights can be loaded" in done.err
    assert not (place / "runs").exists() or not list((place / "runs").glob("*/checkpoints/*"))


@pytest.mark.slow
def test_a_file_that_runs_code_needs_a_flag_on_the_command_line(place: Path) -> None:
    done = fit(place, *MODEL, "ckpt=whole.pt", code=3)
    assert "loading it can run any code (whole.pt). If you trust the file, add --allow-pickle." in message(done.err)
    assert "weights from whole.pt (4 tensors)" in fit(place, *MODEL, "ckpt=whole.pt", "--allow-pickle").err


@pytest.mark.slow
def test_a_foreign_checkpoint_is_validated_under_an_experiment(place: Path) -> None:
    done = train("validate", "ckpt=torch.pt", cwd=place)
    assert (done.code, "holds no config.yaml. Name its experiment: train validate NAME ckpt=" in message(done.err)) == (
        3,
        True,
    )
    done = train(
        "validate",
        "ckpt=[torch.pt,lightning.ckpt]",
        "experiment=digits_mlp",
        *MODEL,
        "load.key_mapping={net.*: *}",
        "validate.folder=out",
        cwd=place,
    )
    rows = records(place / "out/validation.jsonl")
    assert sorted((row["checkpoint"], row["step"]) for row in rows) == [("lightning.ckpt", 3), ("torch.pt", 0)]
    assert rows[0]["val/loss"] == rows[1]["val/loss"], done


@pytest.mark.slow
@pytest.mark.parametrize(
    "ckpt", ["runs/base", "runs/base/checkpoints", "runs/base/checkpoints/step*", "runs/base@latest"]
)
def test_a_run_its_checkpoints_and_a_glob_mean_the_newest(base: Path, tmp_path: Path, ckpt: str) -> None:
    shutil.copytree(base, tmp_path / "place")
    done = fit(tmp_path / "place", f"ckpt={ckpt}")
    assert "weights from runs/base/checkpoints/step20 step 20 (4 tensors)" in done.err
    done = train("validate", f"ckpt={ckpt}", "data.batch_size=32", cwd=tmp_path / "place")
    steps = [row["step"] for row in records(tmp_path / "place/runs/base/validation/validation.jsonl")]
    assert steps == ([0, 10, 20] if "*" in ckpt else [20])


@pytest.mark.slow
def test_chosen_states_are_loaded_and_no_other(base: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    shutil.copytree(base, place)
    before = final_state(place / "runs/base")
    done = fit(place, "ckpt=runs/base", "load.states=[model,optimizer]", "loop.max_duration=1", name="moments")
    assert "loaded model, optimizer from runs/base/checkpoints/step20" in done.err
    moments = final_state(place / "runs/moments")
    step = "optimizer/state/layers.1.weight/step"
    counts = [struct.unpack("<f", state[step][2])[0] for state in (before, moments)]
    assert counts == [20.0, 21.0]
    (manifest,) = place.glob("runs/moments/checkpoints/step1/manifest.json")
    assert json.loads(manifest.read_text())["progress"]["samples"] < 200


@pytest.mark.slow
def test_the_rules_of_a_fork_are_none_for_its_own_checkpoints(base: Path, tmp_path: Path) -> None:
    """The recovered config says how the run began; its own head must not be left out."""
    place = tmp_path / "place"
    shutil.copytree(base, place)
    fit(place, "ckpt=runs/base", "load.ignore_keys=[layers.4.*]", name="fork")
    train("validate", "ckpt=[runs/fork]", cwd=place)
    (row,) = records(place / "runs/fork/validation/validation.jsonl")
    last = [one for one in records(place / "runs/fork/metrics.jsonl") if "val/loss" in one][-1]
    assert row["val/loss"] == pytest.approx(last["val/loss"], rel=1e-6)


@pytest.mark.slow
def test_several_with_a_comma_are_several(base: Path) -> None:
    train("validate", "ckpt=runs/base@step10,runs/base@step20", "validate.folder=out", cwd=base)
    assert [row["step"] for row in records(base / "out/validation.jsonl")] == [10, 20]
