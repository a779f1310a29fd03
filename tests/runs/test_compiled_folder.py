"""What a run has compiled is found by its restarts, by the runs of a sweep and by replays. Nothing is compiled here."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import CODE, make_project, train

pytestmark = [pytest.mark.slow, pytest.mark.addon("jobs"), pytest.mark.addon("exact")]
NOTES = """
        fetched += 1
        if fetched == 1:
            with open("folders", "a") as file:
                file.write(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "none") + "\\n")
        if fetched == 20 and os.path.exists("dies"):
            os.unlink("dies")
            os.kill(os.getpid(), 9)
"""


def test_restarts_runs_of_a_sweep_and_replays_have_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    code = CODE.replace("\n        fetched += 1\n", NOTES, 1)
    assert code != CODE
    project = make_project(tmp_path, **{"mine/parts.py": code})
    short = ("experiment=mine", "compile.enabled=true", "compile.backend=eager", "device=cpu", "loop.max_duration=4")
    (project / "dies").touch()
    for words in (
        ("fit", *short, "name=again", "restarts.max=1", "restarts.backoff=1s"),
        ("fit", "-m", *short, "seed=1,2"),
        ("replay", "runs/again", "4"),
    ):
        done = train(*words, cwd=project, XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert done.code == 0, done.err
    folders = (project / "folders").read_text().splitlines()
    assert len(folders) == 5, "two attempts, two runs of the sweep, and a replay"
    assert len(set(folders)) == 1
    assert Path(folders[0]).parent == tmp_path / "cache/trainer-cli/compiled"
