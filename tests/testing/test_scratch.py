"""The folder of a check: gone with it, or with the next one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trainer_cli.scratch import scratch_folder

HOLD = """
import sys
from trainer_cli.scratch import scratch_folder

with scratch_folder("train-check-") as folder:
    (folder / "run").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_goes_with_the_check_whatever_ends_it(temporary: Path) -> None:
    def check() -> None:
        with scratch_folder("train-check-") as folder:
            assert list(temporary.iterdir()) == [folder]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check()
    assert not list(temporary.iterdir())


def test_what_a_killed_check_left_goes_with_the_next_one_and_nothing_else(temporary: Path) -> None:
    others = [temporary / "train-check-mine", temporary / "train-checks.txt", temporary / "train-check-link"]
    others[0].mkdir()
    others[1].touch()
    other = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdin is not None
    held = Path(other.stdout.readline().strip())
    others[2].symlink_to(held)
    with scratch_folder("train-check-") as folder:
        assert folder != held
        assert (held / "run").exists()
    other.kill()
    other.wait()
    other.stdin.close()
    other.stdout.close()
    assert held.exists()
    with scratch_folder("train-check-"):
        assert not held.exists()
    assert sorted(temporary.iterdir()) == sorted(others)
