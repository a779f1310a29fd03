"""The library: global callbacks, scopes, what a step knows, several validation loaders, metrics from anywhere."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, ListLogger, assert_resumes_exactly, loader, make_sgd, on, trainer

import trainer_cli
from trainer_cli import (
    CheckpointerCallback,
    EarlyStopping,
    Logging,
    Trainer,
    ValidationLoop,
    add_global_callback,
    messages,
)
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.steps.progress import Progress
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.metric_logger import MetricLogger


def test_every_public_name_is_there() -> None:
    assert [name for name in trainer_cli.__all__ if getattr(trainer_cli, name, None) is None] == []
    assert {"EMA", "EarlyStopping", "FitResult", "JsonlLogger", "UserError"} <= set(trainer_cli.__all__)


class Steps(Callback):
    """Counts steps, and notes its calls."""

    def __init__(self) -> None:
        self.book, self.steps = list[str](), 0

    def setup(self, trainer: Trainer) -> None:
        self.book.append("setup")

    def on_fit_start(self, *args: Any) -> None:
        self.book.append("fit")

    def on_after_optimizer_step(self, *args: Any) -> None:
        self.steps += 1


def test_a_callback_is_global_inside_its_block_for_trainers_old_and_new() -> None:
    old = trainer(settings={"max_duration": 2})
    own = Steps()
    with Steps() as outer, Steps() as inner:
        new = trainer(callbacks=[own], settings={"max_duration": 2})
        assert list(new.callbacks) == ["Steps", "Steps_2", "Steps_3"]
        old.fit(loader())
        new.fit(loader())
    assert (outer.steps, inner.steps, own.steps) == (4, 4, 2)
    assert outer.book == ["setup", "setup", "fit", "fit"]
    new.fit(loader(), ckpt_path=None)
    assert outer.steps == 4
    assert list(new.callbacks) == ["Steps"]


def test_a_handle_removes_a_global_callback_once(tmp_path: Path) -> None:
    steps = Steps()
    handle = add_global_callback(steps)
    try:
        made = trainer(checkpoint=CheckpointerCallback(tmp_path), settings={"max_duration": 1})
        assert list(made.callbacks) == ["Steps", "checkpoint"]
        made.fit(loader())
    finally:
        handle.remove()
        handle.remove()
    assert (steps.steps, list(trainer().callbacks)) == (1, [])
    with pytest.raises(UserError, match="expected Callback, got int"):
        add_global_callback(3)  # type: ignore[arg-type]


def test_callbacks_are_found_by_their_class() -> None:
    one, other = Steps(), Steps()
    made = trainer(callbacks={"a": one, "b": other, "c": Callback()})
    assert made.get_callbacks(Steps) == {"a": one, "b": other}
    assert made.get_callback(Steps) is one
    assert made.get_callback(EarlyStopping) is None


def test_a_step_knows_whether_it_is_logged_and_whether_it_is_first_or_last() -> None:
    seen: list[tuple[int, bool, bool, bool]] = []

    def note(trainer: Trainer, *_: Any) -> None:
        flags = trainer.is_log_step, trainer.is_first_iteration, trainer.is_final_iteration
        seen.append((trainer.step.step_idx, *flags))

    during_and_after = on(on_before_forward=note, on_train_batch_end=note)
    made = trainer(callbacks=[during_and_after], settings={"max_duration": 5, "log_interval": 2})
    assert (made.is_log_step, made.is_first_iteration, made.is_final_iteration) == (False, False, False)
    made.fit(loader())
    steps = [
        (0, False, True, False), (1, True, False, False), (2, False, False, False), (3, True, False, False),
        (4, True, False, True),
    ]  # fmt: skip
    assert seen == [step for step in steps for _ in ("during", "after")]


def test_names_begin_with_the_scope_they_are_logged_in() -> None:
    logger, paths = ListLogger(), []

    def log(trainer: Trainer, *_: Any) -> None:
        trainer.log_metrics({"extra": 1.0, "near/named": 2.0})
        with trainer.name_scope("deep") as name:
            paths.append((name, trainer.name_scope_path))
            trainer.log_metrics(depth=3.0)

    def run_validation(trainer: Trainer, is_last: bool) -> None:
        paths.append(("", trainer.name_scope_path))
        trainer.log_text("said", "plain")

    callbacks = [on(on_validate_end=log, run_validation=run_validation)]
    trainer(callbacks=callbacks, loggers=[logger], settings={"max_duration": 1}).fit(loader(), {"near": loader(4)})
    (record,) = (one for one in logger.records if "near/loss" in one.metrics)
    assert {"near/extra", "near/named", "near/deep/depth"} <= set(record.metrics)
    assert set(record.texts) == {"said"}
    assert paths == [("deep", "near/deep/"), ("", "")]


class Away(torch.Tensor):
    """A metric on a device: reading it is counted."""

    read: list[int]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def detach(self) -> Any:
        return self

    def __float__(self) -> float:
        Away.read.append(1)
        return float(self.as_subclass(torch.Tensor))


def test_metrics_of_every_step_are_kept_and_no_step_waits_for_the_device_before_a_log_step() -> None:
    Away.read, reads = [], []

    def log(trainer: Trainer, *_: Any) -> None:
        trainer.log_metrics({"mine/step": torch.tensor(float(trainer.progress.step)).as_subclass(Away)})

    logs = on(on_after_optimizer_step=log, on_train_batch_start=lambda *_: reads.append(len(Away.read)))
    logger = ListLogger()
    trainer(callbacks=[logs], loggers=[logger], settings={"max_duration": 7, "log_interval": 3}).fit(loader())
    assert [(one.step, one.metrics["mine/step"]) for one in logger.records] == [(n + 1, float(n)) for n in range(7)]
    assert reads == [0, 0, 0, 3, 3, 3, 6]


def test_kept_records_come_before_a_save_and_after_an_error() -> None:
    Away.read, logger = [], ListLogger()
    metrics = MetricLogger({"list": logger})
    for step in (1, 2):
        metrics.add({"a": torch.tensor(1.0).as_subclass(Away), "b": 2.0})
        metrics.flush(Progress(step=step), 0.0, wait=False)
        assert metrics.last == {"b": 2.0}
    assert (logger.records, Away.read) == ([], [])
    metrics.write_out()
    assert [one.step for one in logger.records] == [1, 2]
    assert metrics.last == {"a": 1.0, "b": 2.0}
    metrics.add({"a": torch.tensor(1.0).as_subclass(Away)})
    metrics.flush(Progress(step=3), 0.0, wait=False)
    metrics.close()
    assert [one.step for one in logger.records] == [1, 2, 3]


@pytest.mark.gpu
def test_no_step_waits_for_a_gpu_before_a_log_step() -> None:
    mode = torch.cuda.set_sync_debug_mode
    logs = on(
        on_after_optimizer_step=lambda made, model, *_: made.log_metrics({"mine/norm": model.linear.weight.norm()}),
        on_train_batch_start=lambda made, *_: mode("default" if made.is_log_step else "error"),
        on_train_end=lambda *_: mode("default"),
    )
    logger = ListLogger()
    loop = trainer_cli.TrainingLoop(max_duration=9, log_interval=4, eval_interval=None)
    made = Trainer(model=Line, optimizer=make_sgd, callbacks=[logs], loggers=[logger], loop=loop, device="cuda")
    made.fit(loader(40))
    assert logger.steps("mine/norm") == list(range(1, 10))


def test_metrics_without_a_logger_are_a_warning_once_and_none_in_an_evaluation_that_returns_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    in_evaluation = on(on_validate_end=lambda trainer, *_: trainer.log_metrics(mine=1.0))
    assert trainer(callbacks=[in_evaluation]).validate(loader(4))["val"]["mine"] == 1.0
    assert not caplog.messages
    trainer(callbacks=[on(on_train_batch_end=lambda trainer, *_: trainer.log_metrics(mine=1.0))]).fit(loader())
    assert [record.message for record in caplog.records if "no logger" in record.message] == [
        "metrics are logged, but there is no logger that writes them: give the trainer `loggers`"
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("high", "'high'"),
        (None, "None"),
        ([1.0], r"\[1.0\]"),
        (10**400, "10*"),
        (-(10**400), "-10*"),
        (torch.ones(3), r"a tensor of shape \(3,\)"),
    ],
    ids=["text", "none", "list", "large", "small", "tensor"],
)
def test_a_metric_that_is_no_number_is_refused_by_its_name(value: Any, message: str) -> None:
    logs = on(on_train_batch_end=lambda trainer, *_: trainer.log_metrics({"mine": value}))
    with pytest.raises(UserError, match=f"the metric 'mine' is {message}, and no number"):
        trainer(callbacks=[logs], loggers=[ListLogger()]).fit(loader())


@pytest.mark.parametrize("bad", [{"eval_steps": 0}, {"eval_steps": 0.5}, {"hook": "no name"}, {"hook": 3}])
def test_wrong_settings_of_a_validation_loop_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))} is "):
        ValidationLoop(**bad)


def test_messages_go_where_logging_says_while_a_trainer_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("trainer_cli.mine")
    # As in a process that has not set it.
    monkeypatch.setattr(logging.getLogger("trainer_cli"), "propagate", True)
    shown = Logging(level="info", file=tmp_path / "own.log", console="off")
    speaks = on(on_fit_start=lambda *_: log.info("begun"))
    trainer(callbacks=[speaks], logging=shown, settings={"max_duration": 1}).fit(loader())
    log.info("after")
    assert capsys.readouterr().err.count("begun\n") == 1
    assert "INFO    begun" in (tmp_path / "own.log").read_text()
    assert logging.getLogger("trainer_cli").propagate
    with pytest.raises(UserError, match=r"logging\.console is 'loud'"):
        Logging(console="loud")


class Scores(Line):
    """Returns a value for each sample."""

    def forward(self, batch: Any) -> Any:
        return {**super().forward(batch), "score": batch[1]}


@pytest.mark.parametrize("kind", ["validate", "predict"])
def test_what_a_callback_evaluates_in_a_fit_leaves_the_messages_of_the_fit(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("trainer_cli.mine")

    def evaluate(trainer: Trainer, *_: Any) -> None:
        getattr(trainer, kind)(loader(4, shuffle=False), None)
        log.info("after %d", trainer.progress.step)

    speaks = on(on_train_batch_end=evaluate, on_enter_validate_all=lambda *_: log.info("within"))
    shown = Logging(level="info", file=tmp_path / "own.log", console="off")
    trainer(Scores, callbacks=[speaks], logging=shown, settings={"max_duration": 2}).fit(loader())
    for text in (capsys.readouterr().err, (tmp_path / "own.log").read_text()):
        assert [text.count(words) for words in ("within\n", "after 1\n", "after 2\n")] == [2, 1, 1]


@pytest.mark.parametrize(("level", "propagate"), [(logging.WARNING, True), (logging.ERROR, False)])
def test_logging_is_set_up_as_before_once_a_trainer_has_worked(level: int, propagate: bool) -> None:
    logger = logging.getLogger("trainer_cli")
    before = logger.level, logger.propagate, list(logger.handlers)
    messages.to_console("error")
    logger.propagate = propagate
    logger.setLevel(level)
    handlers = list(logger.handlers)
    try:
        trainer(logging=Logging(level="info", console="off"), settings={"max_duration": 1}).fit(loader())
        assert (logger.level, logger.propagate, logger.handlers) == (level, propagate, handlers)
    finally:
        logger.setLevel(before[0])
        logger.propagate, logger.handlers[:] = before[1:]


def test_a_list_of_loaders_is_named_by_number_and_a_loop_may_be_given() -> None:
    book: list[str] = []
    probe = on(
        on_probe_batch_end=lambda trainer, *_: book.append(trainer.name_scope_path),
        on_validate_start=lambda *_: book.append("not mine"),
    )
    type(probe).validation_hooks = ("probe",)
    made = trainer(callbacks=[probe])
    metrics = made.validate([loader(8), loader(4)], loop=ValidationLoop(1, hook="probe"))
    assert list(metrics) == ["validate_0", "validate_1"]
    assert book == ["validate_0/", "validate_1/"]
    assert set(made.validate([loader(4)], loop=ValidationLoop(hook="quiet"))) == {"validate_0"}
    with pytest.raises(UserError, match="loop: expected ValidationLoop, got int"):
        made.validate(loader(), loop=3)  # type: ignore[arg-type]


def test_checkpoints_are_evaluated_by_a_glob_in_the_order_of_steps(tmp_path: Path) -> None:
    saver = CheckpointerCallback(tmp_path, save_interval=3)
    trainer(checkpoint=saver, settings={"max_duration": 12}).fit(loader())
    only = trainer(optimizer=None)
    assert [row.step for row in only.validate_all(loader(4), f"{tmp_path}/step*")] == [0, 3, 6, 9, 12]
    several: list[str | Path | None] = [f"{tmp_path}/step{{12,3}}", tmp_path / "step6", None]
    assert [row.path and row.path.name for row in only.validate_all(loader(4), several)] == [
        "step3", "step12", "step6", None,
    ]  # fmt: skip
    with pytest.raises(FileNotFoundError, match=r"step9\* matches no valid checkpoint"):
        only.validate_all(loader(4), f"{tmp_path}/none/step9*")


EACH = {"eval_interval": 4, "eval_loaders": {"often": {"interval": 2, "steps": 1}, "end": {"interval": None}}}


def _steps(logger: ListLogger) -> dict[str, list[int]]:
    return {name: logger.steps(f"{name}/loss") for name in ("base", "often", "end")}


def _several() -> dict[str, Any]:
    return {"base": loader(4, shuffle=False), "often": loader(9, shuffle=False), "end": loader(5, shuffle=False)}


def test_each_loader_has_its_interval_and_its_loop(tmp_path: Path) -> None:
    loggers: dict[str, ListLogger] = {}

    def fit(folder: Path, *callbacks: Callback) -> Trainer:
        made = trainer(
            callbacks=callbacks, loggers=[loggers.setdefault(folder.name, ListLogger())], run_dir=folder,
            checkpoint=CheckpointerCallback(folder, save_interval=5), settings={"max_duration": 9, **EACH},
        )  # fmt: skip
        made.fit(loader(), _several())
        return made

    assert_resumes_exactly(fit, tmp_path, 5)
    steps = {"base": [4, 8, 9], "often": [2, 4, 6, 8, 9], "end": [9]}
    assert _steps(loggers["straight"]) == _steps(loggers["parts"]) == steps


def test_an_end_by_a_callback_evaluates_what_was_not_due() -> None:
    logger, book = ListLogger(), []
    last = on(run_validation=lambda trainer, is_last: book.append((trainer.progress.step, is_last)))
    stopping = EarlyStopping("often/loss", patience=1, min_delta=1e9)
    settings = {"max_duration": 99, **EACH}
    result = trainer(loggers=[logger], callbacks=[stopping, last], settings=settings).fit(loader(), _several())
    assert result.finished
    assert _steps(logger) == {"base": [4], "often": [2, 4], "end": [4]}
    assert book == [(4, False), (4, True)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"oftn": {}}, "there is no validation loader 'oftn'.*Did you mean 'often'"),
        ({"often": {"interval": "x"}}, "loop.eval_loaders.often.interval"),
        ({"often": {"every": 3}}, "loop.eval_loaders.often is .*it may have interval"),
        ({"often": {"steps": 0}}, "steps is 0, but it must be a number of batches"),
        ({"often": {"hook": "1x"}}, "hook is '1x', but it must be a name"),
    ],
)
def test_wrong_settings_of_a_loader_are_refused(given: Any, message: str) -> None:
    with pytest.raises((UserError, ConfigError), match=message):
        trainer(settings={"eval_loaders": given}).fit(loader(), _several())


@pytest.mark.parametrize("name", ["step", "epoch", "time"])
def test_a_records_own_fields_cannot_be_logged_over(name: str) -> None:
    made = trainer()
    metrics: dict[str, Any] = {name: 1.0}
    for log in (partial(made.log_metrics, {name: 1.0, "other": 2.0}), partial(made.log_metrics, **metrics)):
        with pytest.raises(UserError, match=f"'{name}' cannot be logged"):
            log()
    with made.name_scope("mine"):
        made.log_metrics({name: 1.0})
    assert made.metric_logger.record == {f"mine/{name}": 1.0}


@pytest.mark.parametrize("order", [("easy", "easy/long"), ("easy/long", "easy")])
def test_a_loader_whose_name_begins_with_anothers_keeps_its_own_metrics(order: tuple[str, str]) -> None:
    noise = {"easy": 0.1, "easy/long": 3.0}
    rows = trainer().validate_all({name: loader(10, noise=noise[name]) for name in order}, [None])
    losses = {row.loader: row.metrics["loss"] for row in rows}
    assert set(losses) == set(order)
    assert losses["easy"] < losses["easy/long"]
