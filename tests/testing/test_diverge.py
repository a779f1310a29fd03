"""Where two runs part: the step, what differs first in it, and what explains it, for differences planted by a test."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parting_parts import Net
from safetensors.torch import save_file

from trainer_cli.addons.exact.diverge import find_divergence, project_of
from trainer_cli.addons.exact.divergence import Stage, StepRow, find_first_divergence
from trainer_cli.addons.exact.divergence_report import DivergenceReport, Fact
from trainer_cli.addons.exact.step_samples import read_step_samples
from trainer_cli.addons.exact.step_trace import merge_ranks
from trainer_cli.commands.command_line import main
from trainer_cli.errors import UserError

STEPS = 6
ROOT = Path(__file__).parents[2]
THREADS = torch.get_num_threads()
BASE = (
    "model=null",
    "model={_target_: parting_parts.Net, dropout: 0.0, momentum: 0.1, gain: 1.0, draws: false, late: 0}", "data=null",
    "data={_target_: parting_parts.Data, batch_size: 8, sample: null, label: null, unseeded: false, order: null, "
    "shifted_val: false}",
    "scheduler=null", f"loop.max_duration={STEPS}",
    "loop.log_interval=1", "loop.eval_interval=null", "checkpoint.save_interval=null", "loggers.tensorboard=null",
    "logging.console=off", "optimizer.lr=0.01", "callbacks=ema",
)  # fmt: skip


def fit(run: Path, *overrides: str) -> Path:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        assert main(["fit", *BASE, f"run_dir={run}", *overrides]) == 0, errors.getvalue()
    return run


_REPLAYED: dict[tuple[Path, int, int], dict[str, Any]] = {}


def replay(run: Path, first: int, last: int) -> Mapping[str, Any]:
    """As `train replay` in a process of its own; the same steps of one run are made once for all tests."""
    key = run, first, last
    if key not in _REPLAYED:
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            words = ["--quiet", "--json", "--digests", "trust=[parting_parts]"]
            code = main(["replay", str(run), f"{first}..{last}", *words])
        assert code in (0, 1), errors.getvalue()
        _REPLAYED[key] = json.loads(printed.getvalue())
    return _REPLAYED[key]


def compare(first: Path, second: Path, **options: Any) -> DivergenceReport:
    return find_divergence(first, second, replay=replay, overrides=["trust=[parting_parts]"], **options)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("base") / "run")


@dataclass(frozen=True)
class Planted:
    """A difference of the second run, and what must be named."""

    overrides: str
    stage: Stage
    moment: str
    name: str
    cause: str


PLANTED = {
    "the seed": Planted("seed=1", Stage.samples, "in step 1", "batch[0]", "config seed: 0 -> 1"),
    "one sample": Planted("data.sample=7", Stage.samples, "in step 3", "batch[0]", "config data.sample"),
    "one label": Planted("data.label=7", Stage.samples, "in step 3", "batch[1] (1 -> 0)", "config data.label"),
    "the input": Planted(
        "+callbacks.shift={_target_: parting_parts.Shift, by: 0.5}",
        Stage.inputs, "in step 1", "input[0][0]", "config callbacks.shift",
    ),
    "lr": Planted("optimizer.lr=0.02", Stage.settings, "before step 1", "lr (0.01 -> 0.02)", "optimizer.lr"),
    "epsilon": Planted("optimizer.eps=1e-6", Stage.settings, "before step 1", "eps (1e-08 -> 1e-06)", "optimizer.eps"),
    "weight decay": Planted(
        "optimizer.weight_decay=0.5", Stage.settings, "before step 1", "weight_decay", "optimizer.weight_decay"
    ),
    "betas": Planted("optimizer.betas=[0.8,0.99]", Stage.settings, "before step 1", "betas", "optimizer.betas"),
    "a schedule": Planted(
        "scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 3, gamma: 0.5}",
        Stage.settings, "before step 1", "initial_lr", "config scheduler",
    ),
    "initial weights": Planted("model.gain=1.01", Stage.weights, "before step 1", "last.weight", "config model.gain"),
    "EMA decay": Planted("callbacks.ema.decay=0.9", Stage.callbacks, "after step 1", "ema", "config callbacks.ema"),
    "momentum of a norm": Planted(
        "model.momentum=0.2", Stage.buffers, "after step 1", "norm.running_mean", "config model.momentum"
    ),
    "dropout": Planted("model.dropout=0.5", Stage.outputs, "in step 1", "drop", "config model.dropout"),
    "precision": Planted("precision=bf16", Stage.outputs, "in step 1", "first", "config precision.dtype"),
    "a hidden draw": Planted("model.draws=true", Stage.drawn, "in step 1", "random.torch", "config model.draws"),
    "a late branch": Planted("model.late=4", Stage.outputs, "in step 4", "Net", "config model.late"),
    "clipping": Planted("precision.clip_norm=0.01", Stage.clipped, "in step 1", "last.bias", "precision.clip_norm"),
}  # fmt: skip


IN_CAMPAIGNS = ("one label", "epsilon", "weight decay", "betas", "precision", "dropout")
"""Another row has a difference of the same stage."""


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.campaign if what in IN_CAMPAIGNS else ()) for what in PLANTED]
)
def test_a_planted_difference_is_named_with_its_cause(what: str, base: Path, tmp_path: Path) -> None:
    planted = PLANTED[what]
    report = compare(base, fit(tmp_path / "run", planted.overrides))
    first = report.divergence
    assert first is not None
    assert (first.stage, first.moment) == (planted.stage, planted.moment), str(report)
    assert planted.name in first.shown
    assert any(planted.cause in str(cause) for cause in report.causes), str(report)
    assert not report.equal


def test_a_changed_sample_is_named_by_its_index(base: Path, tmp_path: Path) -> None:
    report = compare(base, fit(tmp_path / "run", "data.sample=7"))
    assert report.samples == ["the content of sample 7 differs"]
    assert Fact("data", "sample 7 of train") not in report.facts


def test_another_order_of_the_samples_is_named(tmp_path: Path) -> None:
    # The loader has its own batch size.
    runs = [fit(tmp_path / f"run{order}", f"data.order={order}", "~data.batch_size") for order in (1, 2)]
    report = compare(*runs)
    assert report.divergence is not None
    assert report.divergence.stage is Stage.samples
    assert report.samples[0].startswith("another order: ")
    assert [str(cause) for cause in report.causes] == ["config data.order: 1 -> 2"]


def test_one_weight_that_differs_by_one_ulp_is_named(tmp_path: Path) -> None:
    weights = Net().state_dict()
    runs = []
    for number in (0, 1):
        if number:
            weights["last.weight"][1, 2] = torch.nextafter(weights["last.weight"][1, 2], torch.tensor(9.0))
        save_file(weights, tmp_path / f"weights{number}.safetensors")
        runs.append(fit(tmp_path / f"run{number}", f"ckpt={tmp_path}/weights{number}.safetensors"))
    report = compare(*runs)
    first = report.divergence
    assert first is not None
    assert (first.stage, first.moment) == (Stage.weights, "before step 1")
    assert [value.name for value in first.values] == ["last.weight"]
    assert str(report.causes[0]).startswith("config ckpt: ")


def test_steps_of_another_size_are_aligned_by_samples(base: Path, tmp_path: Path) -> None:
    report = compare(base, fit(tmp_path / "run", "data.batch_size=4", f"loop.max_duration={2 * STEPS}"))
    assert "a step has 8 samples" in report.notes[0]
    first = report.divergence
    assert first is not None
    # Two steps of 4 samples are one of 8: what they have made of them differs.
    assert (first.steps, first.by_design, first.stage) == ((2, 3), True, Stage.optimizer)
    assert [str(cause) for cause in report.causes] == ["config data.batch_size: 8 -> 4"]


def test_accumulated_steps_differ_in_their_gradients_alone(base: Path, tmp_path: Path) -> None:
    # The norm of a smaller batch has other means: its buffers do not matter to the gradients' names.
    report = compare(base, fit(tmp_path / "run", "data.batch_size=4", "loop.grad_accum_steps=2"))
    first = report.divergence
    assert first is not None
    assert (first.stage, first.moment, first.by_design) == (Stage.gradients, "in step 1", False)
    assert {str(cause).partition(":")[0] for cause in report.causes} == {
        "config data.batch_size", "config loop.grad_accum_steps",
    }  # fmt: skip


def test_another_number_of_threads_is_named_though_nothing_differs(base: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(base, tmp_path / "run"))
    environment = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(environment | {"threads": 64}))
    report = compare(base, run)
    assert report.equal
    assert [fact for fact in report.facts if fact.kind == "threads"] == [Fact("threads", f"{THREADS} -> 64")]
    assert str(report).endswith(f"equal up to step {STEPS}")


def test_a_run_that_is_not_reproducible_is_named_first(base: Path, tmp_path: Path) -> None:
    report = compare(base, fit(tmp_path / "run", "data.unseeded=true"))
    assert "run is not reproducible here (not equal: " in report.notes[0]
    assert report.divergence is not None
    assert report.divergence.stage is Stage.samples


def test_equal_runs_are_equal_without_a_replay(base: Path, tmp_path: Path) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("nothing has to be replayed")

    other = fit(tmp_path / "run")
    report = find_divergence(base, other, replay=refuse)
    assert (report.equal, report.last, report.divergence) == (True, STEPS, None)
    same = find_divergence(base, base / "checkpoints" / f"step{STEPS}", replay=refuse)
    assert (same.equal, list(same.notes)) == (True, ["both are the same run"])


def test_values_that_only_one_run_has_logged_are_named(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(base, other)
    file = other / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["task/score"] = line.pop("val/loss", 1.0)
        line["train/samples_per_s"] = 0.0
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report = compare(base, other)
    assert report.records is not None
    assert report.records.only == {"first": ("val/loss",), "second": ("task/score",)}
    assert "; only in the first: val/loss; only in the second: task/score" in str(report)
    assert report.as_dict()["records"]["only"] == report.records.only


@pytest.mark.parametrize(
    ("interval", "parts", "windows", "equal"),
    [
        (1, [("loop.log_interval=3",)], (3, 6), 0),
        (1, [("loop.log_interval=4",)], (4, 6), 0),
        # The end of the first part was logged too.
        (2, [("loop.log_interval=2", "loop.max_duration=3"), ("loop.log_interval=2",)], (4,), 2),
    ],
)
def test_means_over_other_steps_are_not_compared(
    interval: int, parts: list[tuple[str, ...]], windows: tuple[int, ...], equal: int, tmp_path: Path
) -> None:
    first = fit(tmp_path / "run", f"loop.log_interval={interval}")
    for overrides in parts:
        second = fit(tmp_path / "other", *overrides)
    report = compare(first, second)
    assert report.equal
    assert report.records is not None
    assert (report.records.windows, report.records.equal) == (windows, equal)
    text = f"; means over other steps, not compared: steps {', '.join(map(str, windows))}"
    assert text in str(report)


def test_a_difference_is_found_where_no_mean_can_be_compared(base: Path, tmp_path: Path) -> None:
    report = compare(base, fit(tmp_path / "run", "loop.log_interval=3", "model.late=5"))
    assert report.divergence is not None
    assert (report.divergence.moment, report.divergence.stage, report.equal) == ("in step 5", Stage.outputs, False)


def test_nothing_after_the_last_step_is_compared(base: Path, tmp_path: Path) -> None:
    report = compare(base, fit(tmp_path / "run", "model.late=4"), until=3)
    assert (report.equal, report.last) == (True, 3)


def test_both_are_replayed_from_the_last_checkpoint_that_is_equal(tmp_path: Path) -> None:
    """The records alone tell no more than step 6, and the weights differ there already."""
    lines: list[str] = []
    sparse = ("loop.log_interval=3", "checkpoint.fixed_steps=[2,4]")
    runs = [fit(tmp_path / f"run{late}", *sparse, f"model.late={late}") for late in (0, 5)]
    report = compare(*runs, show=lines.append)
    assert report.divergence is not None
    assert (report.divergence.moment, report.divergence.stage) == ("in step 5", Stage.outputs)
    assert str(report.states) == "equal up to step 4, step 6 differs: model.first.weight"
    assert [line.partition(" of ")[0] for line in lines] == ["replays steps 5 to 6"] * 2


def test_a_resumed_run_with_another_rate_differs_from_there(base: Path, tmp_path: Path) -> None:
    run = fit(tmp_path / "run", "loop.max_duration=3", "checkpoint.fixed_steps=[3]")
    fit(run, "optimizer.lr=0.02", "resume_allow=[optimizer.lr]", "checkpoint.fixed_steps=[3]")
    report = compare(base, run)
    assert report.divergence is not None
    assert (report.divergence.moment, report.divergence.stage) == ("after step 3", Stage.settings)
    assert Fact("attempts", "1 -> 2") in report.facts


def test_a_schedule_over_another_length_is_named(tmp_path: Path) -> None:
    schedule = "scheduler={_target_: trainer_cli.WarmupCosine, warmup: 0}"
    short, long = (fit(tmp_path / str(end), schedule, f"loop.max_duration={end}") for end in (3, 6))
    for lengths in ("3 -> 6", "3, then 6 -> 6"):
        report = compare(short, long)
        assert report.divergence is not None
        assert report.divergence.stage in (Stage.settings, Stage.other)
        assert [str(cause) for cause in report.causes] == [f"config loop.max_duration: {lengths}"], str(report)
        fit(short, schedule, "loop.max_duration=6")


@pytest.fixture
def gone_back(tmp_path: Path) -> Path:
    """A run whose second attempt went back to step 2 with another rate, and made steps 3 to 6 again."""
    run = fit(tmp_path / "run", "checkpoint.fixed_steps=[2,4]")
    fit(
        run, "checkpoint.fixed_steps=[2,4]", f"resume={run}/checkpoints/step2", "checkpoint.newer=trash",
        "optimizer.lr=0.02", "resume_allow=[optimizer.lr]",
    )  # fmt: skip
    return run


def test_two_attempts_of_a_run_are_compared_as_each_left_it(gone_back: Path, base: Path) -> None:
    first, second = (Path(f"{gone_back}@attempt{number}") for number in (1, 2))
    report = compare(first, second)
    assert (report.runs, report.last) == ((first, gone_back), STEPS)
    assert report.divergence is not None
    assert (report.divergence.moment, report.divergence.stage) == ("before step 3", Stage.settings), str(report)
    assert list(report.causes) == [Fact("config", "optimizer.lr: 0.01 -> 0.02")]
    # What the first attempt had made before is the same as in a run that never went back.
    assert compare(base, first).equal
    assert compare(base, gone_back).divergence is not None
    trust = ["trust=[parting_parts]"]
    steps = [next(read_step_samples(run, 4, overrides=trust)) for run in (first, second)]
    assert [step.attempt for step in steps] == [1, 2]
    assert steps[0].batches == steps[1].batches
    with pytest.raises(UserError, match="run has no attempt 3"):
        compare(first, Path(f"{gone_back}@attempt3"))


def test_an_attempt_that_goes_on_where_the_other_ended_shares_no_step_with_it(tmp_path: Path) -> None:
    run = fit(tmp_path / "run", "loop.max_duration=3")
    fit(run)
    report = compare(Path(f"{run}@attempt1"), run)
    assert (report.equal, report.last) == (True, 3)
    assert list(report.notes) == ["no step was made by both: the later attempt began at step 3, where the other ended"]


def test_runs_are_compared_up_to_the_steps_that_name_them(base: Path, tmp_path: Path) -> None:
    other = fit(tmp_path / "run", "model.late=4")
    report = compare(Path(f"{base}@step3"), Path(f"{other}@step{STEPS}"))
    assert (report.equal, report.last) == (True, 3)
    assert compare(base, Path(f"{other}@step4")).last == 4
    assert compare(base, Path(f"{other}@latest"), until=2).last == 2
    with pytest.raises(UserError, match=r"step3 and .*step4 are two steps of one run") as raised:
        compare(Path(f"{base}@step3"), Path(f"{base}@step4"))
    assert f"`train ckpt diff {base}@step3 {base}@step4`" in str(raised.value)
    with pytest.raises(UserError, match=f"has made {STEPS} steps, so there is no step 99"):
        compare(base, Path(f"{other}@step99"))


def test_an_evaluation_alone_may_differ(base: Path, tmp_path: Path) -> None:
    """The checkpoint of the step is equal, so that no step differs."""
    report = compare(base, fit(tmp_path / "run", "data.shifted_val=true"))
    assert (str(report.states), report.divergence, report.equal) == (f"equal up to step {STEPS}", None, False)
    assert report.records is not None
    assert (report.records.step, report.records.key) == (STEPS, "val/loss")
    assert report.notes == ["the steps are equal, so that the difference is in the evaluation or in what callbacks log"]


def test_a_changed_source_file_is_named_and_each_run_is_made_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support"), prepend=os.pathsep)
    runs = []
    for number, factor in enumerate(("1.0", "1.25")):
        text = "from parting_parts import Net\n\n\nclass Mine(Net):\n    def forward(self, batch):\n        "
        Path("parted.py").write_text(f"{text}return super().forward(batch) * {factor}\n")
        sys.modules.pop("parted", None)
        importlib.invalidate_caches()
        runs.append(fit(Path(f"run{number}"), "model._target_=parted.Mine"))
    # A process imports from one source, so that each run is replayed in a process of its own.
    report = find_divergence(*runs, overrides=["trust=[parting_parts,parted]"])
    assert Fact("source", "parted.py: changed") in report.facts
    assert report.notes == []
    assert report.divergence is not None
    assert (report.divergence.stage, report.divergence.moment) == (Stage.outputs, "in step 1")
    assert list(report.causes) == [Fact("source", "parted.py: changed")]


def test_mistakes_are_one_message(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a run's directory"):
        find_divergence(base, Path("nowhere"))
    other = Path(shutil.copytree(base, tmp_path / "run"))
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("parting_parts.Net", "torch.nn.Identity"))
    with pytest.raises(UserError, match=r"train different models: parting_parts\.Net -> torch\.nn\.Identity"):
        find_divergence(base, other)


def row(step: int, seen: int, samples: str, *, batches: int = 1, **values: str) -> StepRow:
    stages: dict[str, dict[str, str]] = {Stage[name]: {name: text} for name, text in values.items()}
    return StepRow(step, seen, batches=[{}] * batches, rows={"batch": list(samples)}, values=stages)


def final(step: int, seen: int, **values: str) -> StepRow:
    return row(step, seen, "", batches=0, **values)


ROWS = {
    "equal": ([row(1, 0, "ab"), final(2, 2)], [row(1, 0, "ab"), final(2, 2)], None),
    "the state after the last step": (
        [row(1, 0, "ab"), final(2, 2, weights="1")], [row(1, 0, "ab"), final(2, 2, weights="2")],
        ("after step 1", Stage.weights, False),
    ),
    "samples before state": (
        [row(1, 0, "ab", weights="1")], [row(1, 0, "ac", weights="2")], ("in step 1", Stage.samples, False),
    ),
    "the order of samples in a step": (
        [row(1, 0, "ab")], [row(1, 0, "ba")], ("in step 1", Stage.samples, False),
    ),
    "the same samples in another division": (
        [row(1, 0, "ab", loss="1")], [row(1, 0, "ba", batches=2, loss="2")], None,
    ),
    "other samples in another division": (
        [row(1, 0, "ab")], [row(1, 0, "ac", batches=2)], ("in step 1", Stage.samples, False),
    ),
    "another number of ranks": (
        [row(1, 0, "ab", random="1", loss="1")],
        [replace(row(1, 0, "ab", batches=2), ranks=2, values={
            Stage.random: {"random": "1", "random (rank 1)": "2"}, Stage.loss: {"loss": "2"}})], None,
    ),
    "a value of another rank": (
        [replace(row(1, 0, "ab", loss="1"), ranks=2)],
        [replace(row(1, 0, "ab"), ranks=2, values={Stage.loss: {"loss": "1", "loss (rank 1)": "2"}})],
        ("in step 1", Stage.loss, False),
    ),
    "steps of half the size": (
        [row(1, 0, "abcd"), final(2, 4, weights="1")],
        [row(1, 0, "ab"), row(2, 2, "dc"), final(3, 4, weights="2")], ("after step 1", Stage.weights, True),
    ),
    "runs that begin at different steps": (
        [row(1, 0, "ab"), row(2, 2, "cd", loss="1")], [row(2, 2, "cd", loss="2")],
        ("in step 2", Stage.loss, False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ROWS)
def test_the_first_difference_of_two_lists_is_found(what: str) -> None:
    first, second, expected = ROWS[what]
    divergence = find_first_divergence(first, second)
    named = None if divergence is None else (divergence.moment, divergence.stage, divergence.by_design)
    assert named == expected


def test_what_a_rank_computes_for_itself_has_its_name() -> None:
    ranks = [row(1, 0, sample, loss=loss, weights="1") for sample, loss in (("a", "1"), ("b", "2"))]
    merged = merge_ranks(ranks)
    assert (len(merged.batches), merged.ranks) == (2, 2)
    assert merged.rows == {"batch": ["a", "b"]}
    assert merged.values == {"loss": {"loss": "1", "loss (rank 1)": "2"}, "weights": {"weights": "1"}}


PROJECTS = {
    "the current project": ("here", "elsewhere/run", None),
    "the project that holds the run": ("other", "other/runs/run", "other"),
    "a folder of the run": ("elsewhere/run/code", "elsewhere/run", UserError),
    "a project beside the run": ("other", "elsewhere/run", UserError),
    "a folder that is gone": ("gone", "elsewhere/run", None),
}


@pytest.mark.parametrize("name", PROJECTS)
def test_the_files_of_a_run_do_not_choose_which_code_is_imported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_in, run, expected = PROJECTS[name]
    for folder in ("here", "other", "elsewhere/run/code", run):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    environment = {"project_root": str(tmp_path / trained_in)}
    (tmp_path / run / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    (tmp_path / run / "config.yaml").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    if expected is UserError:
        with pytest.raises(UserError, match="does not hold the run"):
            project_of(tmp_path / run)
    else:
        assert project_of(tmp_path / run) == (None if expected is None else tmp_path / str(expected))


def test_a_run_that_a_loss_has_ended_is_compared_up_to_the_step_before(base: Path, tmp_path: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(["fit", *BASE, f"run_dir={tmp_path / 'nan'}", "optimizer.lr=1e38"])
    assert code == 1
    assert "the run ends at step" in errors.getvalue()
    report = compare(base, tmp_path / "nan")
    assert report.divergence is not None
    assert report.divergence.steps == (1, 1)
    assert any("optimizer.lr" in str(fact) for fact in report.facts)
