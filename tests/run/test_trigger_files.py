"""Files that ask: each is granted once, and old ones never."""

from __future__ import annotations

import threading
from pathlib import Path

from trainer_cli.run.trigger_files import Wishes


def test_a_wish_is_granted_once_and_its_file_removed(tmp_path: Path) -> None:
    granted: list[str] = []
    seen = threading.Event()

    def grant(name: str) -> None:
        granted.append(name)
        seen.set()

    with Wishes(tmp_path, {name: lambda name=name: grant(name) for name in ("save", "stop")}, every_s=0.01):
        (tmp_path / "save").touch()
        assert seen.wait(30)
        seen.clear()
        (tmp_path / "stop").touch()
        assert seen.wait(30)
    assert granted == ["save", "stop"]
    assert list(tmp_path.iterdir()) == []


def test_what_lies_there_from_before_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    (tmp_path / "save").mkdir()
    granted: list[str] = []
    with Wishes(tmp_path, {"stop": lambda: granted.append("stop"), "save": lambda: granted.append("save")}, every_s=60):
        assert not (tmp_path / "stop").exists()
    assert granted == []
    assert (tmp_path / "save").is_dir()


def test_nobody_looks_once_it_is_over(tmp_path: Path) -> None:
    with Wishes(tmp_path, {"stop": lambda: None}, every_s=0.01):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "trigger_files"]
