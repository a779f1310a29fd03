"""`train env`: enough for a bug report, and no secret in it."""

from __future__ import annotations

import json
import pwd
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from trainer_cli import environment
from trainer_cli.commands import env
from trainer_cli.commands.command_line import main
from trainer_cli.errors import UserError
from trainer_cli.user_cache import cache_of

SECRETS = {
    "HF_TOKEN": "hf_abcdefgh",
    "WANDB_API_KEY": "0123456789abcdef",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    "HTTPS_PROXY": "http://user:hunter2@proxy:3128",
    "TRAIN_TOKEN": "train-secret",
    "PIP_INDEX_URL": "https://me:pass1234@host/simple",
}


def facts(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, dict[str, Any]]:
    assert main(["env", "--json", *flags]) == 0
    message: dict[str, dict[str, Any]] = json.loads(capsys.readouterr().out)
    return message


def test_it_reports_versions_devices_paths_and_listed_variables(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    message = facts(capsys)
    # Some builds print a device after a version that is installed without it.
    assert message["versions"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    assert message["torch"]["threads"] == torch.get_num_threads()
    assert message["torch"]["devices"][0] == "cpu"
    assert message["paths"]["configs"][0] == str(made / "configs")
    assert message["paths"]["project_root"] == str(made)
    assert message["variables"]["CUDA_VISIBLE_DEVICES"] == "3,5"


@pytest.mark.parametrize("package", ["torch", "a-package-that-is-not-installed"])
def test_the_version_of_a_package_is_read_once(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    version = metadata.version

    def count(name: str) -> str:
        asked.append(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", count)
    environment._installed_version.cache_clear()
    assert environment.versions([package]) == environment.versions([package])
    assert asked == [package]


def test_people_read_the_same_facts(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = facts(capsys)
    assert main(["env"]) == 0
    rows = {tuple(line.split(None, 1)) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert ("torch", str(message["versions"]["torch"])) in rows
    assert ("current", str(made)) in rows


def test_no_secret_is_reported(made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    remote = "https://me:ghp_secret@github.com/me/repo"
    for command in (["init", "-q"], ["remote", "add", "origin", remote]):
        subprocess.run(["git", *command], cwd=made, check=True)
    for flags in ([], ["--json"]):
        assert main(["env", *flags]) == 0
        out = capsys.readouterr().out
        assert not [value for value in [*SECRETS.values(), "hunter2", "pass1234", "ghp_secret"] if value in out]
        assert "TRAIN_TOKEN" in out
        assert "HF_TOKEN" not in out


def test_a_home_directory_is_not_reported(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(made.parent))
    monkeypatch.setenv("PYTHONPATH", f"{made}:/elsewhere")
    message = facts(capsys)
    assert message["paths"]["current"] == "~/shapes"
    assert message["variables"]["PYTHONPATH"] == "~/shapes:/elsewhere"


def test_a_torch_that_does_not_import_is_reported_and_no_error(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "ImportError" in str(facts(capsys)["torch"]["error"]) or "ModuleNotFoundError" in str(
        facts(capsys)["torch"]["error"]
    )


def test_configs_that_cannot_be_found_are_reported_and_no_error(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere is not a folder" in str(facts(capsys, "--config-dir", "nowhere")["paths"]["configs"])


def test_the_git_commit_of_the_project_is_reported(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=made, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=made, check=True, capture_output=True, text=True).stdout
    assert facts(capsys)["git"]["project"] == {"commit": head.strip(), "dirty": False}


def test_no_listed_variable_sounds_like_a_secret() -> None:
    assert not [name for name in env.SHOWN if any(word in name for word in ("TOKEN", "KEY", "SECRET", "PASS", "URL"))]


def test_a_user_without_a_home_folder_gets_a_report_and_is_told_where_downloads_would_go(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_entry(*_: object) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    assert main(["env"]) == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match=r"HOME is not set.*Set XDG_CACHE_HOME"):
        cache_of("http://example.org/step3")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_of("http://example.org/step3").parent == Path("/cache/trainer-cli")
