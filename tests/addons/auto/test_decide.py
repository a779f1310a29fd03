"""A run finds what is `auto` in its config once, before its first step, and then is the run of the number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compare import final_state, metrics
from exact_project import POINTS

from trainer_cli.addons.auto import decisions
from trainer_cli.addons.jobs.sweep import plan_jobs
from trainer_cli.commands.command_line import main
from trainer_cli.errors import ConfigError, ExitCode
from trainer_cli.processes import text_of

PARTS = f"""{POINTS}

class Line(nn.Module):
    def __init__(self, most: int = 1000) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.most = most

    def forward(self, batch):
        x, y = batch
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {{"loss": ((self.layers(x).squeeze(1) - y) ** 2).mean()}}
"""
EXPERIMENT = """# @package _global_
model: {_target_: parts.Line, most: 1000}
data: {_target_: parts.Data, batch_size: auto}
optimizer: {_target_: torch.optim.Adam, lr: 0.01}
loop: {max_duration: 8, eval_interval: 4, log_interval: 1}
checkpoint: {save_interval: 4}
"""
QUIET = ["experiment=mine", "device=cpu", "logging.console=off", "report=false"]


@pytest.fixture
def run(empty_folder: Path) -> Callable[..., int]:
    """Calls `train VERB` in a project whose experiment has `data.batch_size: auto`."""
    Path("configs/experiment").mkdir(parents=True)
    Path("configs/experiment/mine.yaml").write_text(EXPERIMENT)
    Path("parts.py").write_text(PARTS)
    return lambda verb, *overrides: main([verb, *QUIET, *overrides])


def decided(name: str = "mine") -> Any:
    return json.loads(Path(f"runs/{name}/decisions.json").read_text())["data.batch_size"]


def batch_size(name: str = "mine") -> int:
    line = next(line for line in Path(f"runs/{name}/config.yaml").read_text().splitlines() if "  batch_size" in line)
    return int(line.partition(":")[2])


def test_a_run_that_is_stopped_and_resumed_is_that_of_the_number_bit_for_bit(run: Callable[..., int]) -> None:
    assert run("fit", "loop.max_duration=4") == 0
    assert (batch_size(), decided()["value"]) == (32, 32), "the largest of 40 samples"
    assert decided()["measured"]["sizes"] == [2, 4, 8, 16, 32]
    assert run("fit", "data.batch_size=auto:32") == 0
    assert batch_size() == 32
    assert run("fit", "name=number", "data.batch_size=32") == 0
    assert final_state(Path("runs/mine")) == final_state(Path("runs/number"))
    assert metrics(Path("runs/mine")) == metrics(Path("runs/number"))
    places = json.loads(Path("runs/mine/provenance.json").read_text())
    assert places["data.batch_size"] == "auto: the largest that was to be tried"
    log = Path("runs/mine/train.log").read_text()
    assert log.count("data.batch_size=32: the largest that was to be tried") == 1


def test_the_size_before_the_first_that_does_not_fit_is_taken(run: Callable[..., int]) -> None:
    assert run("fit", "model.most=9", "loop.max_duration=1") == 0
    assert (batch_size(), decided()["measured"]["fits"]) == (8, [True, True, True, False])
    assert decided()["reason"].startswith("16 would not fit into ")


def test_a_global_batch_is_kept_and_accumulated(run: Callable[..., int]) -> None:
    assert run("fit", "model.most=9", "data.global_batch_size=20", "loop.max_duration=2") == 0
    assert (batch_size(), decided()["measured"]["sizes"]) == (4, [2, 4, 10])


def test_a_run_without_a_checkpoint_searches_again(run: Callable[..., int]) -> None:
    assert run("fit", "loop.max_duration=1") == 0
    # As after a kill between the decision and the first checkpoint.
    shutil.rmtree("runs/mine/checkpoints")
    Path("runs/mine/summary.json").unlink()
    assert run("fit", "data.batch_size=auto:4", "loop.max_duration=1") == 0
    assert (batch_size(), decided()["value"]) == (4, 4)


def test_a_changed_number_or_a_limit_below_it_is_refused(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fit", "loop.max_duration=1") == 0
    for value in ("8", "auto:16"):
        assert run("fit", f"data.batch_size={value}") == ExitCode.USER
        refused = f"data.batch_size    32 -> {value}  command line: data.batch_size={value}"
        assert refused in capsys.readouterr().err, "as it was typed"


def test_nothing_is_left_where_no_size_fits(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit", "model.most=1") == ExitCode.USER
    assert "no batch of 2 samples fits into" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_each_verb_says_what_it_knows(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config") == 0
    assert "batch_size: auto" in capsys.readouterr().out
    assert run("plan", "loop.max_duration=2ep") == 0
    planned = capsys.readouterr().out
    assert "data.batch_size (auto): its value is found before the first step" in planned
    assert "loop.max_duration (2 epochs): when it is reached is unknown, so it is left out; it depends on" in planned
    assert run("plan", "data.global_batch_size=20", "loop.max_duration=2ep") == 0
    assert "0 to 4, epochs of 2" in capsys.readouterr().out
    assert run("validate", "ckpt=none") == ExitCode.USER
    assert "data.batch_size is auto: its value is found before the first step of a run" in capsys.readouterr().err
    assert run("fit", "loop.max_duration=1") == 0
    assert run("plan", "loop.max_duration=2ep") == 0
    assert "1 to 4, epochs of 2" in capsys.readouterr().out
    assert main(["validate", "ckpt=runs/mine@latest", "trust=[parts]"]) == 0


RATE = ["optimizer.lr=auto", "data.batch_size=4"]


def rate(name: str = "mine") -> float:
    line = next(line for line in Path(f"runs/{name}/config.yaml").read_text().splitlines() if line.startswith("  lr:"))
    return float(line.partition(":")[2])


def test_a_rate_that_is_found_gives_the_run_of_the_number_also_after_a_resume(run: Callable[..., int]) -> None:
    grouped = [*RATE, "+param_groups={*.bias: {lr_scale: 2.0}}", "loop.grad_accum_steps=2"]
    assert run("fit", *grouped, "loop.max_duration=4") == 0
    decision = json.loads(Path("runs/mine/decisions.json").read_text())["optimizer.lr"]
    assert rate() == decision["value"]
    assert min(decision["measured"]["rates"]) < rate() < max(decision["measured"]["rates"])
    assert len(decision["measured"]["losses"]) == len(decision["measured"]["rates"])
    assert max(decision["measured"]["rates"]) <= 0.5, "the largest rate is that of the group with the scale of 2"
    assert run("fit", *grouped) == 0
    assert run("fit", *grouped, "name=number", f"optimizer.lr={rate()}") == 0
    assert final_state(Path("runs/mine")) == final_state(Path("runs/number"))
    assert metrics(Path("runs/mine")) == metrics(Path("runs/number"))
    assert Path("runs/mine/train.log").read_text().count("optimizer.lr is auto") == 0, "the second start finds nothing"


def test_both_are_found_the_batch_size_first(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "optimizer.lr=auto", "loop.max_duration=2ep", "data.batch_size=8") == 0
    planned = capsys.readouterr().out
    assert "optimizer.lr (auto): its value is found before the first step" in planned
    assert "0 to 10, epochs of 5" in planned
    assert run("fit", "optimizer.lr=auto", "data.batch_size=auto:8", "loop.max_duration=1") == 0
    decisions = json.loads(Path("runs/mine/decisions.json").read_text())
    assert list(decisions) == ["data.batch_size", "optimizer.lr"]
    assert main(["report", "runs/mine"]) == 0
    page = Path("report.html").read_text()
    assert "Range test of the learning rate" in page
    assert f"taken: {decisions['optimizer.lr']['value']:g}" in page


def test_a_rate_is_searched_with_the_weights_that_the_run_begins_with(run: Callable[..., int]) -> None:
    assert run("fit", "data.batch_size=4", "loop.max_duration=40", "optimizer.lr=0.05") == 0
    start = "ckpt=runs/mine@latest"
    assert run("fit", *RATE, "name=tuned", start, "loop.max_duration=1") == 0
    assert run("fit", *RATE, "name=fresh", "loop.max_duration=1") == 0
    losses = {
        name: json.loads(Path(f"runs/{name}/decisions.json").read_text())["optimizer.lr"]["measured"]["losses"][0]
        for name in ("tuned", "fresh")
    }
    assert losses["tuned"] < losses["fresh"] / 2


def test_a_sweep_decides_for_each_job_and_goes_on_with_what_was_found(run: Callable[..., int]) -> None:
    swept = [*QUIET, "data.batch_size=auto:4,8", "optimizer.lr=auto", "loop.max_duration=1"]
    jobs = plan_jobs(swept)
    assert [job.job.overrides[-3] for job in jobs] == ["data.batch_size=auto:4", "data.batch_size=8"]
    assert main(["fit", *jobs[0].job.overrides, f"run_dir={text_of(str(jobs[0].run.path))}"]) == 0
    # A job that exists is compared with its run.
    assert len(plan_jobs(swept)) == 2
    with pytest.raises(ConfigError, match=r"refused +seed +0 -> 1") as refused:
        plan_jobs([*swept, "seed=1"])
    assert "auto" not in str(refused.value).splitlines()[1]


WORKERS = ["data.batch_size=4", "data.num_workers=auto"]


def test_a_number_of_workers_is_found_once_and_changes_no_value(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {0: 10.0, 1: 9.0, 2: 18.0, 4: 18.5, 8: 0.0}
    tried = []

    def measure(loader: Any, workers: int) -> float:
        assert loader.num_workers == workers
        tried.append(workers)
        return rates[workers]

    monkeypatch.setattr(decisions, "_measure_rate", measure)
    monkeypatch.setattr(decisions, "usable_cores", lambda: 16)
    assert run("fit", *WORKERS, "loop.max_duration=4") == 0
    decision = json.loads(Path("runs/mine/decisions.json").read_text())["data.num_workers"]
    assert (decision["value"], tried) == (2, [0, 1, 2, 4])
    assert decision["reason"] == "batches a second by workers: 0: 10, 1: 9, 2: 18, 4: 18.5"
    assert "num_workers: 2" in Path("runs/mine/config.yaml").read_text()
    assert run("fit", *WORKERS) == 0
    assert len(tried) == 4, "a resume keeps the number"
    assert run("fit", *WORKERS, "name=none", "data.num_workers=0") == 0
    assert final_state(Path("runs/mine")) == final_state(Path("runs/none"))
    assert metrics(Path("runs/mine")) == metrics(Path("runs/none"))


def test_rates_are_measured_with_and_without_workers(run: Callable[..., int]) -> None:
    assert run("fit", *WORKERS) == 0
    measured = json.loads(Path("runs/mine/decisions.json").read_text())["data.num_workers"]["measured"]
    assert measured["workers"][:2] == [0, 1]
    assert all(rate > 0 for rate in measured["batches_per_s"])


def test_other_commands_need_no_number_of_workers(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", *WORKERS) == 0
    assert "data.num_workers (auto): its value is found before the first step" in capsys.readouterr().out
    assert run("validate", "ckpt=none", "data.batch_size=4", "data.num_workers=auto") == 0
    assert run("fit", "data.batch_size=4", "data.num_workers=many") == ExitCode.USER
    assert "a whole number of at least 0, or auto" in capsys.readouterr().err
