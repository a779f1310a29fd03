"""The example files for clusters: they parse, their commands compose, and they know the exit codes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer_cli.commands.choices import experiment_by_name
from trainer_cli.config.composing import compose
from trainer_cli.errors import ExitCode

SCRIPTS = Path(__file__).parents[2] / "scripts"


def _read(name: str) -> Any:
    return yaml.safe_load((SCRIPTS / name).read_text(encoding="utf-8"))


def _kubernetes() -> list[str]:
    (container,) = _read("kubernetes.yaml")["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def _skypilot() -> list[str]:
    return shlex.split(_read("skypilot.yaml")["run"].replace("\\\n", " "))


@pytest.mark.parametrize("command", [_kubernetes, _skypilot])
def test_the_command_of_a_cluster_file_composes_with_checkpoints_in_a_store(command: Any) -> None:
    program, verb, *overrides = command()
    assert (program, verb) == ("train", "fit")
    checkpoint = compose(experiment_by_name(overrides, None)).config.checkpoint
    assert str(checkpoint.folder).startswith("s3://")
    # The time that a lost machine costs.
    assert checkpoint.ephemeral_save_interval == "5min"


def test_a_stopped_job_is_started_again_and_a_mistake_is_not() -> None:
    job = _read("kubernetes.yaml")["spec"]
    rules = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {
        "FailJob": [ExitCode.USER, ExitCode.NO_CHECKPOINT, ExitCode.RUN_DIRECTORY],
        "Ignore": [ExitCode.STOPPED_EARLY],
    }
    # What podFailurePolicy requires.
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert _read("skypilot.yaml")["resources"]["job_recovery"]["recover_on_exit_codes"] == [ExitCode.STOPPED_EARLY]
