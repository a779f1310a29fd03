"""What a run costs beside its training: looks at checkpoints that it keeps, and at its own config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from faulty_disk import FaultyDisk
from omegaconf import OmegaConf

from trainer_cli import bounds
from trainer_cli.commands.command_line import main
from trainer_cli.storage import local


def test_a_resume_looks_at_old_checkpoints_as_a_whole_only_for_what_it_writes_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit = [
        "fit", "experiment=digits_mlp", "name=kept", "loop.limit_train_batches=1", "loop.eval_interval=null",
        "loggers.tensorboard=null", "logging.console=off", "checkpoint.save_interval=1", "checkpoint.remove=never",
    ]  # fmt: skip
    assert main([*fit, "loop.max_duration=6"]) == 0
    (tmp_path / "runs/kept/checkpoints/step2/pinned").touch()
    disk = FaultyDisk()
    monkeypatch.setattr(local, "Disk", lambda: disk)
    assert main([*fit, "loop.max_duration=7"]) == 0
    # For the summary and for the report.
    assert disk.operations.count("listdir step3") == 2


def test_the_config_of_a_run_is_written_as_yaml_once_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts: list[str] = []
    to_yaml, load = OmegaConf.to_yaml, yaml.load

    def note_written(config: Any) -> str:
        texts.append("written")
        return to_yaml(config)

    def note_read(text: Any, Loader: Any) -> Any:
        texts.extend(["read"] * (Loader is bounds.YAML_LOADER))
        return load(text, Loader=Loader)

    monkeypatch.setattr(OmegaConf, "to_yaml", note_written)
    monkeypatch.setattr(yaml, "load", note_read)
    assert main(["fit", "experiment=digits_mlp", "name=one", "loop.max_duration=1", "logging.console=off"]) == 0
    assert (tmp_path / "runs/one/report.html").exists()
    assert sorted(texts) == ["read", "written"]
