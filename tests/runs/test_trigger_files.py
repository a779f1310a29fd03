"""Files that ask: each is granted once, and old ones never."""

from __future__ import annotations

import threading
from pathlib import Path

from trainer_cli.runs.trigger_files import TriggerFiles


def test_a_request_counts_once_and_its_file_is_deleted(tmp_path: Path) -> None:
    granted: list[str] = []
    seen = threading.Event()

    def grant(name: str) -> None:
        granted.append(name)
        seen.set()

    with TriggerFiles(tmp_path, {name: lambda name=name: grant(name) for name in ("save", "stop")}, interval_s=0.01):
        (tmp_path / "save").touch()
        assert seen.wait(30)
        seen.clear()
        (tmp_path / "stop").touch()
        assert seen.wait(30)
    assert granted == ["save", "stop"]
    assert list(tmp_path.iterdir()) == []


def test_files_from_before_the_start_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    (tmp_path / "save").mkdir()
    granted: list[str] = []
    with TriggerFiles(
        tmp_path, {"stop": lambda: granted.append("stop"), "save": lambda: granted.append("save")}, interval_s=60
    ):
        assert not (tmp_path / "stop").exists()
    assert granted == []
    assert (tmp_path / "save").is_dir()


def test_the_files_are_not_read_after_the_end(tmp_path: Path) -> None:
    with TriggerFiles(tmp_path, {"stop": lambda: None}, interval_s=0.01):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "trigger_files"]
