"""Steps that are computed again equal those of the run in every value, whatever the model, the data and the processes.

Ten random steps of each training; `TRAIN_REPLAY=full`, and the campaigns of two processes, take fifty (scripts/faults).
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from command import ROOT, train
from compare import tensors

from trainer_cli.addons.exact.replay import compose_replay, replay
from trainer_cli.addons.exact.replay_plan import plan_replay
from trainer_cli.commands.command_line import main

FULL = os.environ.get("TRAIN_REPLAY") == "full"
COUNT, STEPS = (50, 120) if FULL else (10, 30)
FIXED = sorted(random.Random(7).sample(range(1, STEPS), COUNT))
FIFTY = sorted(random.Random(11).sample(range(1, 120), 50))
BASE = (
    "scheduler=warmup_cosine", "scheduler.warmup=5", f"loop.max_duration={STEPS}", "loop.log_interval=4",
    "loop.eval_interval=9", "loop.eval_steps=2", "logging.console=off", "loggers.tensorboard=null",
    f"checkpoint.fixed_steps={FIXED}", "checkpoint.save_interval=null", "checkpoint.ephemeral_save_interval=null",
    "run_dir=run",
)  # fmt: skip
NORMED = ("model=null", "model={_target_: replayed_parts.Normed}", "data=null", "optimizer=adamw")
EMA = ("+callbacks.ema={_target_: trainer_cli.EMA, decay: 0.9}",)
TINY_GPT = ("model=gpt", "model.layers=1", "model.heads=2", "model.width=8", "model.dropout=0.1")
PACKED = (
    "data=null",
    "data={_target_: trainer_cli.Mixture, batch_size: 3, weights: {a: 3, b: 1}, epoch_samples: 40, sources: {"
    "a: {_target_: trainer_cli.Packing, length: 24, source: "
    "{_target_: trainer_cli.Documents, path: a.txt, document: line}}, "
    "b: {_target_: trainer_cli.Packing, length: 24, source: "
    "{_target_: trainer_cli.Documents, path: b.txt, document: line}}}}",
)
TRAININGS: Mapping[str, tuple[str, ...]] = {
    "digits": ("+experiment=digits", "model.channels=[4,8,8]", "data.batch_size=8", "loop.limit_train_batches=13"),
    "char_gpt": ("+experiment=char_gpt", *TINY_GPT[1:], "data.path=a.txt", "data.context=8", "data.batch_size=4"),
    "a mixture with packing": (*TINY_GPT, *PACKED, "optimizer=adamw"),
    "a loader that shuffles": (*NORMED, "data={_target_: replayed_parts.Loaded}"),
    "a stream with two workers": (
        *NORMED, "data={_target_: replayed_parts.Streamed, batch_size: 4, num_workers: 2}",
    ),
    "EMA, BatchNorm, dropout and accumulation": (
        *NORMED, *EMA, "data={_target_: replayed_parts.Mapped, batch_size: 2}", "loop.grad_accum_steps=2",
        "precision.clip_norm=0.5",
    ),
}  # fmt: skip

OF_TEXT = ("char_gpt", "a mixture with packing")
IN_CAMPAIGNS = ("char_gpt", "a loader that shuffles")
"""Another row has the same model, and test_data.py each kind of data."""


def write_texts() -> None:
    for name, first in (("a.txt", 0), ("b.txt", 500)):
        Path(name).write_text("".join(f"{number} {number * number}\n" for number in range(first, first + 90)))


def small_state(checkpoint: Path) -> object:
    """The small values of a checkpoint, without what depends on the clock and on the log files."""
    state = json.loads((checkpoint / "rank0.json").read_text())["state"]
    state.pop("log_marks", None)
    return {**state, "progress": {**state["progress"], "seconds": 0, "last_seconds": 0}}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=[
                *([pytest.mark.campaign] if kind in IN_CAMPAIGNS else []),
                *([pytest.mark.addon("text")] if kind in OF_TEXT else []),
            ],
        )
        for kind in TRAININGS
    ],
)
def test_every_step_is_that_of_the_run(kind: str, empty_folder: Path) -> None:
    write_texts()
    assert main(["fit", *TRAININGS[kind], *BASE]) == 0
    run, last = Path("run"), FIXED[-1]
    # From the start of the run, and from a checkpoint in the middle of it.
    shutil.rmtree(run / "checkpoints/step0", ignore_errors=True)
    for first in (1, FIXED[0] + 1):
        plan = plan_replay(run, STEPS, first=first)
        assert plan.start_step == (0 if first == 1 else FIXED[0])
        replayed = replay(plan, compose_replay(plan, ["trust=[replayed_parts]"]), keep=[last])
        passed = [step for step in (*FIXED, STEPS) if step >= first]
        assert replayed.states == dict.fromkeys(passed)
        assert str(replayed).startswith(f"verified: equal at {replayed.records} of {replayed.records} records")
        assert replayed.records == len(
            {step for step in range(first, STEPS + 1) if step % 4 == 0 or step % 9 == 0} | {STEPS}
        )
        # The comparison is not the judge of itself.
        kept, computed = run / f"checkpoints/step{last}", run / f"replayed/step{last}"
        assert tensors(computed / "rank0.safetensors") == tensors(kept / "rank0.safetensors")
        assert small_state(computed) == small_state(kept)
        shutil.rmtree(run / "replayed")


@pytest.mark.parametrize(
    ("strategy", "fixed"),
    [
        ("ddp", [3, 5, 8]),
        pytest.param("fsdp", [2, 3], marks=pytest.mark.campaign),
        pytest.param("ddp", FIFTY, marks=pytest.mark.campaign),
        pytest.param("fsdp", FIFTY, marks=pytest.mark.campaign),
    ],
    ids=["ddp", "fsdp", "ddp at fifty steps", "fsdp at fifty steps"],
)
def test_two_processes_are_replayed_by_two(strategy: str, fixed: list[int], tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/support/replayed_parts.py", tmp_path)
    first, last = fixed[0], fixed[-1]
    overrides = (
        *NORMED, *EMA, "data={_target_: replayed_parts.Mapped, batch_size: 4}", *BASE, f"loop.max_duration={last + 4}",
        f"checkpoint.fixed_steps={fixed}", f"parallel={strategy}", "parallel.processes_per_node=2",
    )  # fmt: skip
    done = train("fit", *overrides, cwd=tmp_path)
    assert done.code == 0, done.err
    done = train("replay", "run", f"{first + 1}..{last}", "--keep", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    outcome = json.loads(done.out)
    assert (outcome["start_step"], outcome["states"], outcome["equal"]) == (
        first,
        {str(step): None for step in fixed[1:]},
        True,
    )
    # Each rank has a batch of its own.
    assert [batch["rank"] for batch in outcome["steps"][0]["batches"]] == [0, 1]
    kept, computed = (tmp_path / "run" / folder / f"step{last}" for folder in ("checkpoints", "replayed"))
    for rank in (0, 1):
        assert tensors(computed / f"rank{rank}.safetensors") == tensors(kept / f"rank{rank}.safetensors")


LINE = """
import torch


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, batch):
        return (self.linear(batch[0]) ** 2).mean()


class Data:
    def __init__(self, path):
        numbers = [float(line) for line in open(path)]
        self.train = torch.utils.data.TensorDataset(torch.tensor(numbers).reshape(-1, 1))
"""
OF_LINE = (
    "model=null", "model={_target_: line.Line}", "data=null",
    "data={_target_: line.Data, path: numbers.txt, batch_size: 2}", "scheduler=null", "loop.max_duration=8",
    "loop.log_interval=2", "loop.eval_interval=null", "checkpoint.save_interval=4", "run_dir=run",
    "loggers.tensorboard=null",
)  # fmt: skip


def test_what_has_changed_since_the_run_is_one_message(tmp_path: Path) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    for folder, code in ((project, LINE), (other, LINE.replace("** 2", "** 4"))):
        folder.mkdir()
        (folder / "line.py").write_text(code)
        (folder / "numbers.txt").write_text("".join(f"{number}\n" for number in range(8)))
    assert train("fit", *OF_LINE, cwd=project).code == 0
    # As by an older version, which kept none.
    shutil.rmtree(project / "run/source")
    # Another file that computes the same is named, and is no fault.
    (project / "line.py").write_text(f"{LINE}\n# the same")
    done = train("replay", "run", "8", "--quiet", cwd=project)
    assert (done.code, done.out) == (0, "verified: equal at 2 of 2 records, and 1 kept checkpoint\n")
    assert "the source is not what run/checkpoints/step4 was trained with: line.py (changed)" in done.err
    (project / "line.py").write_text(LINE.replace("** 2", "** 4"))
    done = train("replay", "run", "8", "--quiet", cwd=project)
    assert done.code == 1
    assert done.out.startswith("not equal: step 6: train/loss is ")
    done = train("replay", "../project/run", "8", cwd=other)
    assert done.code == 2
    assert "line.Line of" in done.err
    assert "is not the class that ../project/run/checkpoints/step4 was trained with" in done.err
    (project / "line.py").write_text(LINE)
    # From a folder that has neither the code nor the data.
    for words in ("replay {run} 8", "data {run} 8 --show", "validate ckpt={run}@latest", "check run {run}"):
        done = train(*words.format(run="project/run").split(), cwd=tmp_path)
        assert f"Run the command in {project}, the project of the run." in done.err + done.out
    (project / "numbers.txt").unlink()
    done = train("replay", "run", "8", cwd=project)
    assert done.code == 2
    assert "numbers.txt" in done.err
    assert "Traceback" not in done.err
