"""Steps and optimizers of a user's own, by the real command: docs/training-step.md, killed and resumed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from command import ROOT, train, trained
from compare import assert_same_run, checkpoints, final_state, metrics
from printed import message

PAGE = (ROOT / "docs/training-step.md").read_text(encoding="utf-8")
DIES = '''
"""Kills its process after step 6, once."""

import os
import signal

from trainer_cli import Callback


class Dies(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.progress.step == 6 and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
'''


def _block(language: str, containing: str) -> str:
    (found,) = (text for text in re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S) if containing in text)
    return str(found)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    (root / "configs/experiment").mkdir(parents=True)
    (root / "gan.py").write_text(_block("python", "class GanStep"))
    (root / "dies.py").write_text(DIES)
    (root / "configs/experiment/gan.yaml").write_text(_block("yaml", "GanStep"))
    (root / "configs/experiment/two.yaml").write_text(_block("yaml", "Muon"))
    return root


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.campaign), "fp16"])
def test_a_gan_that_is_killed_goes_on_bit_for_bit(project: Path, precision: str) -> None:
    (project / "died").touch()
    own = (
        "experiment=gan",
        "+callbacks.dies._target_=dies.Dies",
        "checkpoint.save_interval=4",
        f"precision={precision}",
        "checkpoint.save_async=false",
        "checkpoint.pre_train_checkpoint=false",
    )
    straight, killed = project / f"runs/straight_{precision}", project / f"runs/killed_{precision}"
    trained(*own, f"run_dir={straight}", cwd=project)
    (project / "died").unlink()
    assert train("fit", *own, f"run_dir={killed}", cwd=project).code == -signal.SIGKILL
    assert checkpoints(killed) == ["step4"]
    assert "from step4 (" in trained(*own, f"run_dir={killed}", cwd=project).err
    assert_same_run(killed, straight)
    state = final_state(straight)["state"]["state"]
    assert "optimizer" not in state
    assert list(state["optimizers"]) == ["generator", "discriminator"]
    assert list(state["schedulers"]) == ["generator", "discriminator"]
    records = [record for record in metrics(straight) if "train/loss" in record]
    assert len(records) == 8
    assert {"train/d_loss", "train/g_loss", "train/lr/generator", "train/grad_norm/discriminator"} <= set(records[0])
    by_epoch = [record["train/lr/discriminator"] for record in records]
    assert by_epoch == pytest.approx([0.05] * 4 + [0.045] * 4), "torch documents ExponentialLR by epochs"


def test_two_optimizers_train_one_loss(project: Path) -> None:
    trained("experiment=two", cwd=project)
    state = final_state(project / "runs/two")["state"]["state"]
    assert list(state["schedulers"]) == ["matrices", "rest.warm", "rest.decay"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.generator.params='gen.*'", "optimizer.generator.params: 'gen.*' matches no trained parameter"),
        (
            "optimizer.generator.params=3",
            "generator.params is 3, but it must be a string or a list of strings",
        ),
        ("optimizer.discriminator.params='*'", "is in two optimizers, generator and discriminator"),
        ("optimizer.generator.params='generator.0.*'", "no optimizer has the parameter generator.2.weight"),
        ("+optimizer.generator.lrr=1", "optimizer.generator.lrr"),
        ("+scheduler.gen={_target_:trainer_cli.WarmupCosine}", "there is no optimizer 'gen'"),
        ("step._target_=gan.Circle", "expected TrainStep, got Circle"),
        ("loop.grad_accum_steps=2", "Step it in update()"),
    ],
)
def test_mistakes_are_reported_with_their_place(project: Path, override: str, said: str) -> None:
    extra = ("~step.smoothing",) if "Circle" in override else ()
    result = train("fit", "experiment=gan", "name=mistaken", override, *extra, cwd=project)
    assert result.code in (1, 2)
    assert said in message(result.err)
    assert "Traceback" not in result.err
