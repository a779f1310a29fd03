"""Starting a run again with a changed config: refused with nothing touched, and every way out that is named works."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import SMALL, environment
from forks import Done, Forks
from printed import message


@pytest.fixture(scope="module")
def base(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run called `base` was trained to step 20."""
    folder = tmp_path_factory.mktemp("base")
    assert forks.fit(folder, *SMALL, "name=base").code == 0
    return folder


@pytest.fixture
def place(base: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to go on in."""
    shutil.copytree(base, tmp_path / "place")
    return tmp_path / "place"


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with the digest of its bytes, and every folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
    }


REFUSED = {
    "model": ["model.hidden=[64]"],
    "another model": ["model=cnn"],
    "data": ["data.batch_size=8"],
    "optimizer": ["optimizer.lr=0.5"],
    "another optimizer": ["optimizer=sgd"],
    "schedule": ["scheduler=null"],
    "seed": ["seed=1"],
    "kernels": ["deterministic=true"],
    "precision": ["precision.dtype=bf16"],
    "clipping": ["precision.clip_norm=1.0"],
    "accumulation": ["loop.grad_accum_steps=2"],
    "batches": ["loop.limit_train_batches=5"],
    "callbacks": ["+callbacks.ema._target_=trainer_cli.EMA"],
    "parameter groups": ["+param_groups.bias.lr=0.1"],
    "a refused one among free ones": ["loop.max_duration=30", "seed=1", "checkpoint.max_checkpoints=1"],
    "one that was not allowed": ["seed=1", "model.dropout=0.5", "resume_allow=[seed]"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_change_leaves_the_run_byte_for_byte_as_it_was(base: Path, forks: Forks, case: str) -> None:
    before = tree(base)
    done = forks.fit(base, *SMALL, "name=base", *REFUSED[case])
    assert done.code == 2, done.err
    assert "error: the config differs from the one that runs/base was trained with" in done.err
    assert "  refused  " in done.err
    assert tree(base) == before


def test_another_value_of_an_environment_variable_is_a_change_too(forks: Forks, tmp_path: Path) -> None:
    own = ("name=base", "model.dropout='${oc.decode:${oc.env:DROPOUT}}'")
    assert forks.fit(tmp_path, *SMALL, *own, DROPOUT="0.25").code == 0
    assert "0.25" not in (tmp_path / "runs/base/config.yaml").read_text()
    before = tree(tmp_path)
    refused = forks.fit(tmp_path, *SMALL, *own, "loop.max_duration=30", DROPOUT="0.5")
    assert refused.code == 2
    assert "refused" in refused.err
    assert "model.dropout" in refused.err
    assert "which has another value now" in refused.err
    assert tree(tmp_path) == before
    allowed = "resume_allow=[model.dropout]"
    for end, dropout, more in ((24, "0.25", ()), (27, "0.5", (allowed,)), (30, "0.5", ())):
        done = forks.fit(tmp_path, *SMALL, *own, f"loop.max_duration={end}", *more, DROPOUT=dropout)
        assert done.code == 0, done.err
    assert forks.fit(tmp_path, *SMALL, *own, "loop.max_duration=30", DROPOUT="0.25").code == 2


FREE = [
    "loop.max_duration=30", "loop.eval_interval=5", "loop.eval_steps=1", "loop.log_interval=3", "loggers=jsonl",
    "logging.console=plain", "checkpoint.save_interval=7", "checkpoint.max_checkpoints=2", "checkpoint.digest=sha256",
    "data.num_workers=1", "device=cpu", "load.states=[all]", "validate.folder=elsewhere",
]  # fmt: skip


def test_what_may_change_goes_on_at_once(place: Path, forks: Forks) -> None:
    done = forks.fit(place, *SMALL, "name=base", *FREE)
    assert done.code == 0, done.err
    assert "resuming at step 20" in done.err
    assert "finished at step 30" in done.out


def rates(run: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["train/lr"] for record in records if "train/lr" in record}


def test_a_rate_that_is_allowed_is_the_one_that_a_new_run_would_have(place: Path, forks: Forks) -> None:
    longer = [*SMALL, "loop.max_duration=30", "optimizer.lr=0.5"]
    before = rates(place / "runs/base")
    done = forks.fit(place, *longer, "name=base", "resume_allow=[optimizer.lr]")
    assert done.code == 0, done.err
    assert forks.fit(place, *longer, "name=new").code == 0
    after, new = rates(place / "runs/base"), rates(place / "runs/new")
    assert {step: rate for step, rate in after.items() if step <= 20} == before
    assert {step: rate for step, rate in after.items() if step > 20} == {25: new[25], 30: new[30]}
    assert new[30] > 0


def test_a_change_that_is_allowed_but_cannot_go_on_leaves_the_config_as_it_was(place: Path, forks: Forks) -> None:
    files = [place / "runs/base" / name for name in ("config.yaml", "overrides.yaml")]
    before = [file.read_text("utf-8") for file in files]
    larger = ["loop.max_duration=30", "model.hidden=[64]", "resume_allow=['model.*']"]
    done = forks.fit(place, *SMALL, "name=base", *larger)
    assert done.code == 2, done.err
    assert "does not fit this training" in done.err
    assert [file.read_text("utf-8") for file in files] == before


def test_a_run_that_never_came_to_a_checkpoint_may_be_mended_freely(forks: Forks, tmp_path: Path) -> None:
    stopping = ("callbacks=early_stopping", "callbacks.early_stopping.metric=")
    wrong = forks.fit(tmp_path, *SMALL, *stopping[:1], stopping[1] + "val/los", "run_dir=run")
    assert wrong.code == 2
    assert "Did you mean 'val/loss'?" in wrong.err
    assert (tmp_path / "run/config.yaml").exists()
    mended = forks.fit(tmp_path, *SMALL, *stopping[:1], stopping[1] + "val/loss", "run_dir=run")
    assert mended.code == 0, mended.err
    assert "config changed: callbacks.early_stopping.metric: val/los -> val/loss" in mended.err


def test_another_name_and_the_weights_of_this_run_are_a_way_out(place: Path, forks: Forks) -> None:
    refused: Done = forks.fit(place, *SMALL, "name=base", "optimizer.lr=0.5")
    assert "name=OTHER" in refused.err
    assert "ckpt=runs/base@latest" in refused.err
    before = tree(place / "runs/base")
    done = forks.fit(place, *SMALL, "name=other", "optimizer.lr=0.5", "ckpt=runs/base@latest")
    assert done.code == 0, done.err
    assert json.loads((place / "runs/other/summary.json").read_text())["step"] == 20
    assert tree(place / "runs/base") == before


COMPARE = """
import sys
from trainer_cli.commands.main import main
code = main(["config", *sys.argv[1:]])
assert "torch" not in sys.modules
sys.exit(code)
"""


def compared(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMPARE, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    "other", ["runs/base", "runs/base@latest", "runs/base/checkpoints/step10", "runs/base/config.yaml"]
)
def test_a_config_is_compared_with_that_of_a_run_or_checkpoint(base: Path, other: str) -> None:
    before = tree(base)
    done = compared(base, "--diff", other, *SMALL, "name=base", "optimizer.lr=0.5")
    assert done.returncode == 0, done.stderr
    old, _, *changes = done.stdout.splitlines()
    assert old.startswith("# from: runs/base/")
    assert old.endswith("config.yaml")
    assert changes == ["optimizer.lr: 0.003 -> 0.5  # command line: optimizer.lr=0.5"]
    assert tree(base) == before


@pytest.mark.parametrize("below", ["", "@latest", "/checkpoints/step10"])
def test_a_config_is_compared_with_that_of_a_run_in_a_sweep(place: Path, below: str) -> None:
    (place / "runs/sweep").mkdir()
    (place / "runs/base").rename(place / "runs/sweep/seed=0")
    done = compared(place, "--diff", f"runs/sweep/seed=0{below}", *SMALL, "name=base", "seed=1")
    assert done.returncode == 0, done.stderr
    old, _, *changes = done.stdout.splitlines()
    assert old.startswith("# from: runs/sweep/seed=0/")
    assert changes == ["seed: 0 -> 1  # command line: seed=1"]


def test_a_checkpoint_that_is_not_there_or_whose_config_is_damaged_is_reported(place: Path) -> None:
    gone = compared(place, "--diff", "runs/base@step11")
    assert (gone.returncode, gone.stdout) == (3, "")
    assert "there is none (--diff). runs/base/checkpoints holds step0, step10, step20." in message(gone.stderr)
    with (place / "runs/base/checkpoints/step20/config.yaml").open("a") as file:
        file.write("seed: 9\n")
    damaged = compared(place, "--diff", "runs/base/checkpoints/step20")
    assert (damaged.returncode, damaged.stdout) == (3, "")
    assert "config.yaml" in damaged.stderr
