"""A service that cannot remove records has each step once after an exact resume, and a changed one is sent again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.commands.command_line import main
from trainer_cli.running.repeated_steps import repeats_steps

SERVICE = '''
import json
import os
from pathlib import Path

from trainer_cli import Callback, Logger


class Service(Logger):
    """Appends to a file, from which nothing is ever removed."""

    is_remote = True

    def start(self, facts):
        self.file = Path("sent.jsonl")

    def last_step(self):
        sent = [json.loads(line)["step"] for line in self.file.read_text().splitlines()] if self.file.exists() else []
        return max(sent, default=None)

    def log(self, record):
        metrics = {name: value for name, value in record.metrics.items() if "samples_per_s" not in name}
        with self.file.open("a") as file:
            file.write(json.dumps({"step": record.step, **metrics}) + "\\n")


class Fail(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.progress.step == int(os.environ.get("FAIL_AT", 0)):
            raise RuntimeError("a failure")
'''
COMMAND = [
    "fit", "+experiment=digits_mlp", "run_dir=run", "logging.console=off", "report=false", "loop.log_interval=1",
    "checkpoint.save_async=false", "loggers.tensorboard=null", "loop.eval_interval=4", "checkpoint.save_interval=5",
    "checkpoint.ephemeral_save_interval=null", "+loggers.service._target_=service.Service",
    "+callbacks.fail._target_=service.Fail",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("service.py").write_text(SERVICE)


def fit(monkeypatch: pytest.MonkeyPatch, *overrides: str, fail_at: int = 0) -> int:
    monkeypatch.setenv("FAIL_AT", str(fail_at))
    return main([*COMMAND, *overrides])


def read(file: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return [{k: v for k, v in one.items() if k not in ("epoch", "time", "train/samples_per_s")} for one in records]


def test_after_an_exact_resume_a_service_has_each_record_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fit(monkeypatch, "loop.max_duration=12", fail_at=9) == 1
    # All but the record of the step that failed.
    assert [record["step"] for record in read("sent.jsonl")] == list(range(1, 9))
    assert fit(monkeypatch, "loop.max_duration=12") == 0
    assert "service has the records up to step 8, which are not sent again" in capfd.readouterr().err
    assert read("sent.jsonl") == read("run/metrics.jsonl")


def test_after_a_change_records_are_sent_again_until_the_run_is_past_the_old_ones(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fit(monkeypatch, "loop.max_duration=20", fail_at=9) == 1
    # Another length is another schedule.
    assert fit(monkeypatch, "loop.max_duration=24", fail_at=7) == 1
    assert "service has records up to step 8 of an earlier attempt. From step 6 on" in capfd.readouterr().err
    assert [record["step"] for record in read("sent.jsonl")] == [*range(1, 9), 6]
    # The same config as before, but what the service has of steps 7 and 8 is of the first one.
    assert fit(monkeypatch, "loop.max_duration=24", fail_at=14) == 1
    assert [record["step"] for record in read("sent.jsonl")][9:] == list(range(6, 14))
    assert "are sent again" in capfd.readouterr().err
    # From step 10 on all is of one config.
    assert fit(monkeypatch, "loop.max_duration=24") == 0
    assert "up to step 13, which are not sent again" in capfd.readouterr().err
    assert [record["step"] for record in read("sent.jsonl")][17:] == list(range(14, 25))
    sent = {record["step"]: record for record in read("sent.jsonl")}
    assert list(sent.values()) == read("run/metrics.jsonl")


@pytest.mark.parametrize(
    ("ends", "start_step", "repeats"),
    [([], 0, True), ([None, None], 3, True), ([None, 8], 5, False), ([8, None], 5, False), ([8, None], 8, True)],
)
def test_steps_repeat_where_no_earlier_attempt_differs(ends: list[Any], start_step: int, repeats: bool) -> None:
    attempts = [
        {"attempt": number, **({} if end is None else {"differs_until": end})} for number, end in enumerate(ends)
    ]
    assert repeats_steps(attempts, start_step) is repeats
