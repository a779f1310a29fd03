"""Pruning by hand removes what the run itself would remove at its next save, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import StopAt, loader, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.commands.ckpt_prune import apply_pruning, prunings, steps_per_epoch
from trainer_cli.commands.ckpt_remove import find_items
from trainer_cli.commands.command_line import main
from trainer_cli.errors import UserError
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.storage.hidden_names import Hidden, HiddenName, removed_marker

RUN_ID = "prune"
FIRST = {"save_interval": 2, "ephemeral_save_interval": 1, "remove": "never"}
"""Everything stays: steps 0 to 10, every other one ephemeral, with evaluations at epochs' ends (3, 6, 9)."""


def fit(folder: Path, length: int, stop: int | None = None, **rules: Any) -> Any:
    made = trainer(
        callbacks=[] if stop is None else [StopAt(stop)],
        settings={"max_duration": length, "eval_interval": "1ep"},
        checkpoint=CheckpointerCallback(folder, identity=RunIdentity(run_id=RUN_ID), **rules),
    )
    made.fit(loader(10, 4), loader(3))
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = RunDir(tmp_path_factory.mktemp("runs") / "x")
    run.create("name: x\n", [], {"run_id": RUN_ID}).release()
    fit(run.checkpoints_folder, 20, stop=10, **FIRST)
    return run.path


def with_rules(run: Path, rules: dict[str, Any]) -> Path:
    # JSON is YAML.
    (run / "config.yaml").write_text(json.dumps({"name": "x", "checkpoint": rules}))
    return run


def pruned(run: Path) -> list[str]:
    items = find_items([str(run)])
    (plan,) = prunings(items)
    gone, left = apply_pruning(plan, items)
    assert left == {}
    assert set(gone) == set(plan.remove)
    assert {path.name for path in plan.keep} == set(Catalog.of(run / "checkpoints").names())
    return Catalog.of(run / "checkpoints").names()


RULES: dict[str, dict[str, Any]] = {
    "only ephemerals go": {"save_interval": 2},
    "a few of the newest": {"save_interval": 2, "max_checkpoints": 2},
    "some for good": {"save_interval": 2, "max_checkpoints": 1, "keep_every": 4},
    "some for good, by epochs": {"save_interval": 2, "max_checkpoints": 1, "keep_every": "2ep"},
    "by part epochs": {"save_interval": "0.5ep", "max_checkpoints": 1, "remove": "all_without_rule"},
    "fixed steps": {"save_interval": 2, "max_checkpoints": 1, "fixed_steps": [3, 4]},
    "the best": {"save_interval": 2, "max_checkpoints": 1, "keep_best": {"metric": "val/loss", "count": 2}},
    "the largest": {"save_interval": 5, "max_checkpoints": 1, "keep_best": {"metric": "val/loss", "mode": "max"}},
    "all that no rule names": {"save_interval": 4, "remove": "all_without_rule"},
    "samples": {"save_interval": 2, "max_checkpoints": 1, "keep_every": "12sp"},
    "nothing": {"save_interval": 2, "remove": "never", "max_checkpoints": 1},
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_it_leaves_what_the_run_itself_would_leave_for_the_same_reasons(
    trained: Path, tmp_path: Path, rules: dict[str, Any]
) -> None:
    by_hand, by_itself = (shutil.copytree(trained, tmp_path / name) for name in ("hand", "self"))
    (plan,) = prunings(find_items([str(with_rules(by_hand, rules))]))
    left = pruned(by_hand)
    callback = fit(by_itself / "checkpoints", 20, stop=11, **rules).checkpoint
    # The stop at step 11 is saved too, so that step 10 is the newest no longer, and may go.
    assert set(left) - {"step10"} == set(Catalog.of(by_itself / "checkpoints").names()) - {"step10", "step11"}
    reasons = callback.kept()
    assert all(reasons[path.name] == why for path, why in plan.keep.items() if path.name != "step10")


def test_checkpoints_of_another_run_in_the_same_folder_stay(trained: Path, tmp_path: Path) -> None:
    run = with_rules(shutil.copytree(trained, tmp_path / "run"), {"save_interval": 2, "max_checkpoints": 1})
    (run / "environment.json").write_text('{"run_id": "another"}')
    (plan,) = prunings(find_items([str(run)]))
    assert (plan.keep, plan.remove) == ({}, {})


def test_only_what_was_named_goes_and_what_was_pinned_since_the_question_stays(trained: Path, tmp_path: Path) -> None:
    run = with_rules(shutil.copytree(trained, tmp_path / "run"), {"save_interval": 2})
    items = find_items([f"{run}@step1", f"{run}@step2", f"{run}@step3"])
    (plan,) = prunings(items)
    assert [path.name for path in plan.remove] == ["step1", "step3"]
    (run / "checkpoints/step1/pinned").touch()
    gone, _ = apply_pruning(plan, items)
    assert [path.name for path in gone] == ["step3"]


def test_what_killed_saves_and_failed_removals_left_goes_but_not_that_of_another_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = with_rules(shutil.copytree(trained, tmp_path / "run"), {"save_interval": 2, "remove": "never"})
    folder = run / "checkpoints"
    before = sorted(path.name for path in folder.iterdir())
    (folder / "step1/manifest.json").rename(folder / "step1" / removed_marker(RUN_ID))
    left = [str(HiddenName(kind, "step4", RUN_ID, 1)) for kind in (Hidden.trash, Hidden.tmp)]
    other = str(HiddenName(Hidden.tmp, "step5", "another", 1))
    for name in (*left, other):
        (folder / name).mkdir()
        (folder / name / "half").touch()
    with RunDir(run).lock():
        assert main(["ckpt", "prune", str(run), "--yes"]) == 0
    assert "nothing to do" in capsys.readouterr().out, "a run that is training has such folders too"
    assert main(["ckpt", "prune", str(run), "--yes"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{folder / name}  goes" in re.sub(" +", "  ", printed) for name in (*left, "step1"))
    assert sorted(path.name for path in folder.iterdir()) == sorted({*before, other} - {"step1"})


def test_part_epochs_of_an_unknown_length_are_refused(trained: Path, tmp_path: Path) -> None:
    run = with_rules(shutil.copytree(trained, tmp_path / "run"), {"save_interval": "0.5ep"})
    assert steps_per_epoch(Catalog.of(run / "checkpoints").entries()) == 3, "from the end of one"
    for step in (3, 6, 9):
        shutil.rmtree(run / "checkpoints" / f"step{step}")
    shutil.rmtree(run / "checkpoints" / "step0")
    with pytest.raises(UserError, match=r"checkpoint\.save_interval=0\.5ep needs the number of steps"):
        list(prunings(find_items([str(run)])))
