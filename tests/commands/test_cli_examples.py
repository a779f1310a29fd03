"""Every example that `--help` shows is run, or, where it would train, composed; and so is every option that ships."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from long_run import save_a_long_run

from trainer_cli.addons.exact.bisect import Condition
from trainer_cli.addons.exact.replay_command import parse_steps
from trainer_cli.addons.jobs.sweep_jobs import read_swept
from trainer_cli.commands import command_line as main_module
from trainer_cli.commands.command_line import listed_verbs, main, parser_of
from trainer_cli.config.composing import compose
from trainer_cli.config.search_path import SearchPath, addon_folders, shipped_folder
from trainer_cli.runs.run_dir import RunDir

VERBS = listed_verbs()
NEEDS = {
    "experiment=char_gpt": ["data.path=text.txt"],
    "data=characters": ["data.path=text.txt"],
    "data=tokens": ["data.path=tokens.bin", "data.vocab_size=50257"],
}
"""What must be said with an option, since its file leaves it open."""


def examples() -> Iterator[tuple[str, str]]:
    texts = {name: parser_of(name, verb).epilog or "" for name, verb in VERBS.items()} | {"help": main_module.EXAMPLES}
    for verb, text in texts.items():
        for line in text.splitlines():
            if match := re.match(r" +(train .*?)(?:  .*)?$", line):
                yield verb, match[1]


EXAMPLES = list(examples())


def test_every_verb_has_examples_of_its_own() -> None:
    for verb in VERBS:
        assert any(of == verb and text.startswith(f"train {verb}") for of, text in EXAMPLES), verb


@pytest.mark.parametrize("text", [text for _, text in EXAMPLES])
def test_an_example_can_be_run(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    _, verb, *arguments = shlex.split(text)
    parsed = main_module._parse(parser_of(verb, VERBS[verb]), verb, arguments)
    if verb in ("fit", "validate", "predict") or arguments[:1] == ["resume"]:
        many = getattr(parsed, "multirun", False)
        for overrides in (
            [list(job.overrides) for job in read_swept(parsed.overrides, lambda group: None).list_grid()]
            if many
            else [parsed.overrides]
        ):
            compose(overrides)
    elif arguments[:1] == ["run"]:
        assert parsed.run_dir == Path("runs/digits")
    elif verb == "replay":
        assert parse_steps(parsed.steps, keeps=parsed.keep)
    elif verb == "bisect":
        assert parsed.command or Condition.parse(parsed.condition)
    elif verb in ("rerun", "pack"):
        assert parsed.run_dir in (Path("runs/digits"), Path("digits.tar.gz"))
    elif verb == "diverge":
        assert [str(parsed.first), str(parsed.second)] == arguments[:2]
    elif verb == "compare":
        from trainer_cli.addons.compare.sides import read_sides

        if not parsed.first.startswith("runs/"):
            read_sides(parsed.first, parsed.second, parsed.overrides, budget=parsed.budget, config_dir=None)
    elif verb == "config" and parsed.diff:
        assert not parsed.diff.startswith("-")
    elif verb == "serve":
        # It goes on until Ctrl-C.
        assert parsed.dir.parts[0] == "runs"
        assert (parsed.port, parsed.host) in [(0, "127.0.0.1"), (8080, "127.0.0.1"), (0, "0.0.0.0")]
    else:
        (made / "new").mkdir()
        if verb == "new":
            monkeypatch.chdir(made / "new")
        if verb in ("ckpt", "top", "tail", "report") or (verb != "data" and " runs/" in text):
            save_some(made)
        if verb == "data":
            save_a_long_run(made)
        assert main([verb, *arguments]) == 0
        assert capsys.readouterr().err == ""


def save_some(project: Path) -> None:
    """The run `digits`, with checkpoints and results as an example names them, and three others."""
    from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer

    for name in ("runs/digits", "runs/other", "runs/digits/sweep/lr=1", "runs/compare/lr/a-seed1"):
        RunDir(project / name).create(f"run_dir: {name}\n", [], {"run_id": "digits"}).release()
    validated = {"checkpoint": "runs/digits/checkpoints/step180", "step": 180, "loader": "val", "val/loss": 1}
    (project / "runs/digits/validation").mkdir()
    (project / "runs/digits/validation/validation.jsonl").write_text(f"{json.dumps(validated)}\n")
    for step in (180, 360, 900):
        make_sync_checkpointer().save(
            {"model": {"weight": torch.full((2,), float(step))}, "progress": {"step": step}},
            project / f"runs/digits/checkpoints/step{step}",
            metadata=CheckpointMetadata(run_id="digits", step=step, metrics={"val/loss": 1 / step}),
        )


def shipped() -> list[str]:
    folder = shipped_folder("configs")
    assert folder is not None
    search = SearchPath([folder, *addon_folders()], folder, folder, "config")
    return [f"{group}={option}" for group in search.groups() for option in search.options(group)]


@pytest.mark.parametrize("override", shipped())
def test_every_option_that_ships_can_be_composed(made: Path, override: str) -> None:
    composed = compose([override, *NEEDS.get(override, [])])
    group, _, option = override.partition("=")
    assert composed.config.name == (option if group == "experiment" else "default")


@pytest.mark.parametrize("override", ["experiment=mine", "model=large", "model=small", "data=spiral"])
def test_a_projects_own_options_can_be_composed(made: Path, override: str) -> None:
    group, _, option = override.partition("=")
    composed = compose([override])
    assert composed.config_dirs[0] == made / "configs"
    if group != "experiment":
        assert composed.where(f"{group}._target_").startswith(f"configs/{group}/{option}.yaml")
