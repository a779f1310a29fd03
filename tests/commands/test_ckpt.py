"""`train ckpt` as a user types it: what each action answers, refuses and leaves on the disk."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from printed import message, untimed

from trainer_cli.catalog.catalog import Catalog
from trainer_cli.catalog.history import Life
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer
from trainer_cli.commands.command_line import main
from trainer_cli.files.json_lines import read_rows
from trainer_cli.manifest import Manifest
from trainer_cli.policy.rules import CheckpointKind
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.storage.local import LocalStorage

ROOT = Path(__file__).parents[2]
FINE = "runs/fine/checkpoints"
ODD = "runs/odd/checkpoints"
CONFIG = """name: {name}
run_dir: runs/{name}
checkpoint:
  save_interval: 10
  max_checkpoints: {most}
  folder: {folder}
loop:
  max_duration: 30
"""


def config(name: str, most: str = "null", folder: str = "null") -> str:
    return CONFIG.format(name=name, most=most, folder=folder)


def begin(root: Path, name: str, text: str) -> None:
    RunDir(root / "runs" / name).create(text, [], {"run_id": name}).release()


def save(root: Path, path: str, state: dict[str, Any], **facts: Any) -> None:
    make_sync_checkpointer().save(
        {**state, "progress": {"step": facts["step"]}}, root / path, metadata=CheckpointMetadata(**facts)
    )


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs side by side: one as it should be, one with all that can be odd."""
    root = tmp_path_factory.mktemp("world")
    begin(root, "fine", config("fine"))
    begin(root, "odd", config("odd"))
    for step, loss, width in ((10, 0.5, 2), (20, 0.25, 2), (30, 0.375, 3)):
        save(
            root,
            f"{FINE}/step{step}",
            {
                "model": {"layers.0.weight": torch.full((width, 2), step / 10), "layers.0.bias": torch.zeros(2)},
                "optimizer": {"state": {"layers.0.weight": {"step": torch.tensor(float(step))}}},
            },
            run_id="fine",
            attempt=1,
            step=step,
            epoch=step // 10,
            reason="every 10 steps",
            metrics={"val/loss": loss, "train/loss": 1.0},
            finished="done" if step == 30 else None,
            files={"config.yaml": config("fine", str(step)).encode()},
        )
    tied = torch.ones(4)
    rich = {
        "tied": {"first": tied, "second": tied},
        "half": torch.ones(4, dtype=torch.bfloat16),
        "byte": torch.tensor([3.0, 4.0]).to(torch.float8_e4m3fn),
        "complex": torch.tensor([3 + 4j]),
        "scalar": torch.tensor(7.0),
        "nothing": torch.zeros(0, 3),
        "bad": torch.tensor([float("nan")]),
    }
    odd = {"run_id": "odd", "attempt": 1, "kind": CheckpointKind.ephemeral}
    save(root, f"{ODD}/step1", {"model": rich}, step=1, reason="every 1 step, ephemeral", **odd)
    save(root, f"{ODD}/step2", {"model": rich}, step=2, finite=False, metrics={"val/loss": float("nan")}, **odd)
    for step, metric in ((3, 1.0), (4, 1.0), (5, float("inf")), (6, 1.0)):
        save(root, f"{ODD}/step{step}", {"model": {"w": torch.ones(9)}}, step=step, metrics={"val/loss": metric}, **odd)
    save(root, f"{ODD}/late-7", {"model": {"w": torch.ones(9)}}, step=7, **odd)
    odd_folder = root / ODD
    os.truncate(odd_folder / "step3" / "rank0.safetensors", 100)
    (odd_folder / "step4" / "manifest.json").unlink()
    content = bytearray((odd_folder / "step5" / "rank0.safetensors").read_bytes())
    content[-1] ^= 1
    (odd_folder / "step5" / "rank0.safetensors").write_bytes(content)
    altered = (odd_folder / "step6" / "manifest.json").read_bytes().replace(b"ephemeral", b"permanent")
    (odd_folder / "step6" / "manifest.json").write_bytes(altered)
    (odd_folder / "notes").mkdir()
    (odd_folder / "notes" / "mine.txt").write_text("mine")
    (odd_folder / "late-7" / "pinned").touch()
    return root


@dataclass(frozen=True)
class Output:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

    @property
    def words(self) -> list[list[str]]:
        """The words of each line."""
        return [line.split() for line in self.out.splitlines()]


Ckpt = Callable[..., Output]


@pytest.fixture
def root(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the world to do anything with, and the current folder."""
    shutil.copytree(world, tmp_path / "a b", symlinks=True)
    monkeypatch.chdir(tmp_path / "a b")
    return tmp_path / "a b"


@pytest.fixture
def ckpt(root: Path, capsys: pytest.CaptureFixture[str]) -> Ckpt:
    def said(*arguments: str) -> Output:
        capsys.readouterr()
        code = main(["ckpt", *arguments])
        return Output(code, *capsys.readouterr())

    return said


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a terminal in front of the command, at which this is typed."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    return lambda text: monkeypatch.setattr(sys, "stdin", Terminal(text))


def there(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir() if path.name != "notes")


ALL_ODD = ["late-7", "step1", "step2", "step3", "step4", "step5", "step6"]
ALL_FINE = ["step10", "step20", "step30"]


@pytest.mark.parametrize("metric", ["val/loss", "val/z_score"])
def test_ls_shows_the_metric_that_decides_which_is_best_before_others(
    metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = f"checkpoint:\n  keep_best:\n    metric: {metric}\n"
    begin(tmp_path, "many", f"name: many\nrun_dir: runs/many\n{kept}")
    metrics = {**{f"val/{letter}": 1.0 for letter in "abcdefg"}, "val/loss": 0.5, "val/z_score": 0.25}
    state = {"model": {"weight": torch.ones(1)}}
    save(tmp_path, "runs/many/checkpoints/step1", state, run_id="many", step=1, metrics=metrics)
    assert main(["ckpt", "ls", "runs/many"]) == 0
    _, header, row = capsys.readouterr().out.splitlines()
    assert header.split()[4:] == [metric, *(name for name in metrics if name != metric), "state", "marks", "reason"]
    assert "best" in row


def test_ls_shows_each_checkpoint_of_a_run_with_what_matters(ckpt: Ckpt) -> None:
    said = ckpt("ls", "runs/fine")
    folder, header, *rows = said.out.splitlines()
    assert said.code == 0
    assert folder == FINE
    assert header.split() == ["name", "kind", "size", "age", "val/loss", "state", "marks", "reason"]
    assert [row.split()[0] for row in rows] == ALL_FINE
    assert "best" in rows[1]
    assert "best" not in rows[0] + rows[2]
    assert "final" in rows[2]
    assert all("regular" in row and "valid" in row and row.endswith("every 10 steps") for row in rows)
    assert ["0.5" in rows[0].split(), "0.25" in rows[1].split()] == [True, True]


def test_ls_marks_the_last_end_of_a_run_that_was_extended_as_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    begin(tmp_path, "longer", config("longer"))
    for step in (10, 20, 30):
        facts: dict[str, Any] = {"finished": None if step == 10 else "max_duration reached"}
        save(
            tmp_path, f"runs/longer/checkpoints/step{step}", {"model": {}},
            run_id="longer", attempt=1, step=step, **facts,
        )  # fmt: skip
    assert main(["ckpt", "ls", "runs/longer"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert ["final" in row for row in rows] == [False, False, True]


@pytest.mark.parametrize(("columns", "missing"), [(80, []), (60, ["size"]), (42, ["size", "age", "reason"])])
def test_ls_shows_each_checkpoint_on_one_line_of_a_terminal(
    columns: int, missing: list[str], ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, header, *rows = ckpt("ls", "runs/fine").out.splitlines()
    names = ["name", "kind", "size", "age", "val/loss", "state", "marks", "reason"]
    assert header.split() == [name for name in names if name not in missing]
    assert [row.split()[0] for row in rows] == ALL_FINE
    assert max(map(len, [header, *rows])) <= columns


def test_ls_says_what_is_wrong_with_each_odd_one(ckpt: Ckpt) -> None:
    rows = {line.split()[0]: line for line in ckpt("ls", "runs/odd").out.splitlines()[2:]}
    assert list(rows) == ["step1", "step2", "step3", "step4", "step5", "step6", "late-7"]
    for name, state, words in (
        ("step1", "valid", "every 1 step, ephemeral"),
        ("step2", "not finite", "saved by hand"),
        ("step3", "damaged", "rank0.safetensors has 100 bytes instead of"),
        ("step4", "partial", "it has no manifest"),
        ("step5", "valid", ""),
        ("step6", "damaged", "altered"),
        ("late-7", "valid", "pinned"),
    ):
        assert f" {state} " in rows[name], name
        assert words in rows[name], name


def test_ls_takes_all_runs_here_where_nothing_is_named(ckpt: Ckpt, root: Path) -> None:
    shutil.copytree(root / "runs/fine", root / "runs/fine/sweep/lr=1")
    folders = [line for line in ckpt("ls").out.splitlines() if line.startswith("runs")]
    assert folders == [FINE, ODD, "runs/fine/sweep/lr=1/checkpoints"]


def test_ls_as_json_has_the_same_keys_for_every_checkpoint(ckpt: Ckpt) -> None:
    records = ckpt("ls", "runs/*", "--json").json
    kinds = {
        "path": str, "run": str, "step": int, "valid": bool, "state": str, "problem": str | None, "pinned": bool,
        "best": bool, "kind": str | None, "reason": str | None, "finished": str | None, "finite": bool | None,
        "size_bytes": int | None, "saved_at": float | None, "metrics": dict,
    }  # fmt: skip
    assert len(records) == 10
    for record in records:
        assert list(record) == list(kinds)
        assert all(isinstance(record[key], kind) for key, kind in kinds.items()), record
    by_name = {Path(record["path"]).name: record for record in records}
    assert by_name["step2"]["metrics"] == {"val/loss": "nan"}
    assert by_name["step5"]["metrics"] == {"val/loss": "inf"}
    assert (by_name["step30"]["finished"], by_name["step20"]["best"], by_name["late-7"]["step"]) == ("done", True, 7)
    assert by_name["step10"]["run"] == "runs/fine"


NAMES: dict[str, tuple[list[str], list[str]]] = {
    "a run": (["runs/fine"], ALL_FINE),
    "its folder of checkpoints": ([FINE], ALL_FINE),
    "a checkpoint": ([f"{FINE}/step10"], ["step10"]),
    "a glob": ([f"{FINE}/step[12]0"], ["step10", "step20"]),
    "alternatives": ([f"{FINE}/step{{10,30}}"], ["step10", "step30"]),
    "a recursive glob": (["**/step10"], ["step10"]),
    "the latest": (["runs/fine@latest"], ["step30"]),
    "the latest is finite, and its name may be another": (["runs/odd@latest"], ["late-7"]),
    "the best": (["runs/fine@best"], ["step20"]),
    "a step": (["runs/fine@step10"], ["step10"]),
    "a damaged step": (["runs/odd@step3"], ["step3"]),
    "a step under another name": (["runs/odd@step7"], ["late-7"]),
    "one, named three times": ([f"{FINE}/step10", f"runs/../{FINE}/step10", "runs/fine@step10"], ["step10"]),
    "two runs": (["runs/fine@step10", "runs/odd@step1"], ["step10", "step1"]),
}


@pytest.mark.parametrize(("what", "names"), NAMES.values(), ids=NAMES)
def test_checkpoints_are_named_in_many_ways(what: list[str], names: list[str], ckpt: Ckpt) -> None:
    assert [Path(record["path"]).name for record in ckpt("ls", "--json", *what).json] == names


@pytest.mark.parametrize(
    "action",
    ["ls", "show --norms", "verify", "pin", "unpin", "rm --dry-run", "prune --dry-run", f"diff {FINE}/step30"]
    + [f"{verb} --output out" for verb in ("strip", f"average {FINE}/step10", "export --format huggingface")],
)
def test_every_action_takes_a_selector_as_the_path_of_the_checkpoint(action: str, ckpt: Ckpt, root: Path) -> None:
    outputs = []
    for name in ("runs/fine@best", f"{FINE}/step20"):
        output = ckpt(*action.split(), name)
        assert output.code == 0
        # The age of a checkpoint may grow by a second between the two.
        outputs.append((re.sub(r" +\d+ s\b", "", output.out), untimed(output.err)))
        shutil.rmtree(root / "out", ignore_errors=True)
        ckpt("unpin", f"{FINE}/step20")
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("format", ["safetensors", "archive"])
def test_ranks_that_would_replace_one_export_are_refused(
    format: str, ckpt: Ckpt, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = ("export", "runs/fine@best", "--format", format, "--overwrite", "--output")
    for rank in ("0", "1"):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", rank)
        refused = ckpt(*export, "out.tar")
        assert (refused.code, "each rank of this launch would replace the same output" in refused.err) == (2, True)
        assert ckpt(*export, "out{rank}.tar").code == 0
    assert [path.name for path in sorted(root.glob("out*"))] == ["out0.tar", "out1.tar"]
    monkeypatch.delenv("WORLD_SIZE")
    assert ckpt(*export, "out0.tar").code == 0


def test_a_checkpoint_is_named_from_within_its_folder(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.chdir(root / FINE)
    assert [Path(one["path"]).name for one in ckpt("ls", "--json", "step10", "../../odd@step1").json] == [
        "step10",
        "step1",
    ]
    assert [one["best"] for one in ckpt("ls", "--json", ".").json] == [False, True, False]
    monkeypatch.chdir(root / FINE / "step10")
    assert [Path(one["path"]).name for one in ckpt("ls", "--json", ".").json] == ["step10"]


REFUSED: dict[str, tuple[list[str], int, list[str]]] = {
    "no action": ([], 2, ["needs an action", "Available: ls, show"]),
    "no such action": (["lst"], 2, ["no action 'lst'", "Did you mean 'ls'?"]),
    "nothing like an action": (["frobnicate"], 2, ["Available: ls, show"]),
    "a flag of another action": (["ls", "--norms"], 2, ["train ckpt ls has no flag --norms", "It is one of show"]),
    "a flag of two other actions": (["pin", "runs/fine@best", "-y"], 2, ["pin has no flag -y", "one of rm, prune"]),
    "a flag before the action": (["--json", "ls"], 2, ["Did you mean 'train ckpt ls --json'?"]),
    "an unknown flag": (["ls", "--bogus"], 2, ["--bogus"]),
    "too few": (
        ["diff", "runs/fine@latest"],
        2,
        ["train ckpt diff needs CKPT", "train ckpt diff runs/digits@step180 runs/digits@latest"],
    ),
    "none where one is needed": (
        ["verify"],
        2,
        ["train ckpt verify needs WHAT", "train ckpt verify 'runs/*/checkpoints/step*'"],
    ),
    "too many": (["show", "runs/fine@best", "runs/fine@latest"], 2, ["unrecognized arguments: runs/fine@latest"]),
    "several for one": (["show", "runs/fine"], 2, ["names 3 checkpoints", "runs/fine@latest"]),
    "nothing of that name": (["ls", "runs/fines"], 3, ["runs/fines names no checkpoint", "Did you mean 'fine'?"]),
    "a glob that matches nothing": (["verify", f"{FINE}/step7*"], 3, ["holds step10, step20, step30"]),
    "no such step": (["pin", "runs/fine@step11"], 3, ["runs/fine@step11: there is none", "step10, step20, step30"]),
    "a step that must be computed": (
        ["show", "runs/fine@step11", "--no-replay"],
        3,
        [
            "runs/fine@step11: there is no checkpoint of that step",
            "train replay runs/fine 11 --keep (replays 1 step from step10",
        ],
    ),
    "no such run": (["pin", "runs/fines@latest"], 3, ["Did you mean 'fine'?"]),
    "a folder of runs": (["ls", "runs"], 3, ["It holds runs", "'runs/*'"]),
    "a file": (["show", "runs/fine/config.yaml"], 3, ["config.yaml names no checkpoint"]),
    "a file of weights": (["show", f"{FINE}/step10/rank0.safetensors"], 3, ["It is a safetensors file, which ckpt="]),
    "a folder of something else": (["ls", f"{ODD}/notes"], 3, ["names no checkpoint"]),
    "one of several names nothing": (["rm", "runs/odd@step1", "runs/x", "--yes"], 3, ["runs/x names no checkpoint"]),
    "a look into a partial one": (["show", f"{ODD}/step4"], 3, ["step4 is not valid", "partial"]),
    "a look into a damaged one": (["diff", "runs/odd@step1", "runs/odd@step3"], 3, ["step3 is not valid", "100 bytes"]),
    "a pin that keeps nothing": (["pin", "runs/odd@step1", f"{ODD}/step4"], 3, ["step4", "Only a checkpoint"]),
    "no terminal to ask on": (["rm", "runs/fine@step10"], 2, ["1 checkpoint would be removed", "--yes"]),
    "the last one of a run": (["rm", "runs/fine", "--yes"], 2, ["step30: it is the last valid one", "--force"]),
    "the last one, by two names": (
        ["rm", f"{FINE}/step[12]0", "runs/../runs/fine/checkpoints/step30", "--yes"],
        2,
        ["step30: it is the last valid one"],
    ),
    "a pinned one": (["rm", f"{ODD}/late-7", "--yes"], 2, ["late-7: it is pinned", "--force"]),
}


@pytest.mark.parametrize(("arguments", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_one_message_and_changes_nothing(
    arguments: list[str], code: int, words: list[str], ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    said = ckpt(*arguments)
    assert said.code == code
    assert not said.out or ("--json" in arguments and json.loads(said.out)["exit_code"] == code)
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err
    assert all(word in message(said.err) for word in words), said.err
    assert (there(FINE), there(ODD)) == (ALL_FINE, ALL_ODD)
    assert not (Path(ODD) / "step1" / "pinned").exists()


FLAGS = {
    "ls": set(), "show": {"--norms", "--states", "--no-replay"}, "verify": {"--no-replay"},
    "diff": {"--no-replay"}, "pin": set(), "unpin": set(),
    "rm": {"--yes", "--force", "--dry-run"}, "prune": {"--yes", "--dry-run"},
}  # fmt: skip


@pytest.mark.parametrize("action", FLAGS)
@pytest.mark.parametrize("words", [["ckpt", "{}", "--help"], ["help", "ckpt", "{}"]])
def test_the_help_of_an_action_shows_its_own_flags(
    words: list[str], action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(action) for word in words]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: train ckpt {action} ")
    assert set(re.findall(r"--[a-z-]+", out)) == {"--help", "--json", *FLAGS[action]}


def test_the_help_of_ckpt_names_every_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {action} " in out for action in FLAGS)


def test_flags_and_checkpoints_mix(ckpt: Ckpt) -> None:
    said = ckpt("verify", f"{FINE}/step10", "--json", f"{FINE}/step20")
    assert [Path(one["path"]).name for one in said.json] == ["step10", "step20"]


def test_where_no_runs_are_ls_says_so(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    said = ckpt("ls")
    assert said.code == 3
    assert "no folder runs/ here" in said.err


def test_a_run_without_checkpoints_is_passed_over_beside_others(ckpt: Ckpt, root: Path) -> None:
    begin(root, "young", config("young"))
    assert len(ckpt("ls", "--json", "runs/young", "runs/fine").json) == 3
    said = ckpt("ls", "runs/young")
    assert said.code == 3
    assert "no checkpoint yet" in said.err


def test_show_is_a_tree_with_the_sums_of_what_its_branches_hold(ckpt: Ckpt) -> None:
    said = ckpt("show", "runs/fine@step10", "--norms")
    facts, tree = said.out.split("\n\n")
    assert "step      10 (epoch 1)" in facts
    assert "kind      regular (every 10 steps)" in facts
    assert "metric    val/loss 0.5" in facts
    assert [line.split() for line in tree.splitlines()] == [
        ["tensor", "type", "shape", "elements", "size", "norm"],
        ["model/layers.0", "6", "24", "B", "2"],
        ["weight", "F32", "[2,", "2]", "4", "16", "B", "2"],
        ["bias", "F32", "[2]", "2", "8", "B", "0"],
        ["optimizer/state/layers.0.weight/step", "F32", "[]", "1", "4", "B", "10"],
        ["total", "7", "28", "B", "10.198"],
    ]


def test_show_as_json_has_every_tensor_with_its_norm_and_the_ties(ckpt: Ckpt) -> None:
    found = ckpt("show", "runs/odd@step1", "--norms", "--states", "--json").json
    tensors = {one["name"]: (one["type"], one["shape"], one["size_bytes"], one["norm"]) for one in found["tensors"]}
    assert tensors == {
        "model/tied/first": ("F32", [4], 16, 2.0),
        "model/half": ("BF16", [4], 8, 2.0),
        "model/byte": ("F8_E4M3", [2], 2, 5.0),
        "model/complex": ("C64", [1], 8, 5.0),
        "model/scalar": ("F32", [], 4, 7.0),
        "model/nothing": ("F32", [0, 3], 0, 0.0),
        "model/bad": ("F32", [1], 4, "nan"),
    }
    assert found["aliases"] == {"model/tied/second": "model/tied/first"}
    assert found["states"]["rank0"]["progress"] == {"step": 1}
    assert found["kind"] == "ephemeral"
    assert {"path", "run_id", "versions", "files", "metrics", "pinned", "world_size", "config_digest"} <= set(found)


def test_show_names_ties_and_weights_that_are_not_finite(ckpt: Ckpt) -> None:
    out = ckpt("show", "runs/odd@step2").out
    assert "model/tied/second is tied to model/tied/first" in out
    assert "NOT FINITE" in out


def test_verify_reads_all_and_names_each_that_is_not_sound(ckpt: Ckpt) -> None:
    fine, odd = ckpt("verify", FINE), ckpt("verify", "runs/*")
    assert (fine.code, odd.code) == (0, 1)
    assert fine.out.splitlines()[-1] == "3 of 3 valid"
    rows = {Path(line.split()[0]).name: line for line in odd.out.splitlines()[1:-1]}
    assert {name for name, line in rows.items() if line.endswith(" valid")} == {*ALL_FINE, "step1", "step2", "late-7"}
    assert "rank0.safetensors" in rows["step5"]
    assert "digest differs" in rows["step5"]
    assert "no manifest" in rows["step4"]


def test_verify_as_json_has_a_verdict_for_each(ckpt: Ckpt) -> None:
    said = ckpt("verify", "runs/odd@step5", "runs/fine@best", "--json")
    assert said.code == 1
    assert [(Path(one["path"]).name, one["valid"], one["problem"] is None) for one in said.json] == [
        ("step5", False, False),
        ("step20", True, True),
    ]


class Removes:
    """Removes checkpoints when the digests begin to be read, as a run does that trains beside the command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *gone: str) -> None:
        self.gone = list(gone)
        # One reader: another would hold a checkpoint that is to be removed.
        monkeypatch.setattr(os, "cpu_count", lambda: 1)
        usual = Catalog.why_damaged
        monkeypatch.setattr(Catalog, "why_damaged", lambda catalog, entry: self.before(usual, catalog, entry))

    def before(self, usual: Any, catalog: Any, entry: Any) -> Any:
        while self.gone:
            path = Path(self.gone.pop())
            assert LocalStorage(path.parent).remove(path.name)
        return usual(catalog, entry)


def test_verify_passes_over_what_a_run_removes_meanwhile_with_a_word(
    ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    Removes(monkeypatch, f"{FINE}/step10", f"{FINE}/step20")
    said = ckpt("verify", "runs/fine")
    assert said.code == 0
    assert said.out.splitlines()[-1] == "1 of 1 valid"
    assert said.err.splitlines() == [
        f"skipped: {FINE}/step10, which was removed meanwhile",
        f"skipped: {FINE}/step20, which was removed meanwhile",
    ]


def test_verify_of_one_that_was_named_and_is_removed_meanwhile_is_exit_3(
    ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    Removes(monkeypatch, f"{FINE}/step10")
    said = ckpt("verify", f"{FINE}/step10", "runs/fine@step20", "--json")
    assert said.code == 3
    assert [Path(one["path"]).name for one in said.json] == ["step20"]
    assert f"error: {FINE}/step10: removed meanwhile" in said.err
    assert ckpt("verify", f"{FINE}/step10").code == 3


def test_verify_looks_again_where_all_were_removed_meanwhile(
    ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    Removes(monkeypatch, *(f"{FINE}/step{step}" for step in (10, 20, 30)))
    said = ckpt("verify", FINE)
    assert said.code == 3, "nothing is left there"
    assert said.err.count("skipped") == 3


def test_what_a_removal_left_midway_is_passed_over_by_verify_and_reported_by_ls(ckpt: Ckpt) -> None:
    os.rename(f"{FINE}/step10/manifest.json", f"{FINE}/step10/.removed.fine")
    said = ckpt("verify", FINE)
    assert (said.code, said.out.splitlines()[-1]) == (0, "2 of 2 valid")
    assert "skipped: runs/fine/checkpoints/step10" in said.err
    assert ckpt("verify", f"{FINE}/step10").code == 3
    assert [one["state"] for one in ckpt("ls", FINE, "--json").json] == ["being removed", "valid", "valid"]


def test_diff_reports_config_shapes_and_relative_changes(ckpt: Ckpt) -> None:
    said = ckpt("diff", "runs/fine@step10", "runs/fine@step20", "--json")
    assert said.code == 0
    assert said.json == {
        "config": [{"key": "checkpoint.max_checkpoints", "old": 10, "new": 20}],
        "no_config": None,
        "only_first": [],
        "only_second": [],
        "tensors": [
            {"name": "model/layers.0.weight", "relative": 1.0, "why": None},
            {"name": "optimizer/state/layers.0.weight/step", "relative": 1.0, "why": None},
        ],
        "same": 1,
    }
    out = ckpt("diff", "runs/fine@step20", "runs/fine@step30").out
    assert "checkpoint.max_checkpoints: 20 -> 30" in out
    assert "model/layers.0.weight shape [2, 2] -> [3, 2]" in [" ".join(row.split()) for row in out.splitlines()]
    assert "1 of 3 common tensors are the same" in out


def test_diff_of_strangers_reports_what_only_one_has(ckpt: Ckpt) -> None:
    found = ckpt("diff", "runs/odd@step1", "runs/fine@step30", "--json").json
    assert found["only_second"] == [
        "model/layers.0.bias",
        "model/layers.0.weight",
        "optimizer/state/layers.0.weight/step",
    ]
    assert len(found["only_first"]) == 7
    assert found["no_config"] == f"{ODD}/step1 holds no config"


def test_a_checkpoint_does_not_differ_from_itself(ckpt: Ckpt) -> None:
    found = ckpt("diff", "runs/fine@step30", "runs/fine@step30", "--json").json
    assert (found["config"], found["no_config"], found["tensors"]) == ([], None, [])
    found = ckpt("diff", "runs/odd@step1", "runs/odd@step1", "--json").json
    assert found["no_config"] == f"{ODD}/step1 holds no config"


def test_a_pin_is_set_and_taken_back_once(ckpt: Ckpt) -> None:
    pinned = Path(FINE) / "step10" / "pinned"
    assert ckpt("pin", "runs/fine@step10", "--json").json == {"pinned": [f"{FINE}/step10"], "left": {}}
    assert pinned.exists()
    assert ckpt("pin", "runs/fine@step10").out == "nothing to do\n"
    assert "pinned" in ckpt("ls", "runs/fine@step10").out
    assert ckpt("unpin", f"{FINE}/step*").out == f"unpinned: {FINE}/step10\n"
    assert not pinned.exists()


GONE: dict[str, tuple[list[str], list[str]]] = {
    "one": (["runs/odd@step1"], ["late-7", "step2", "step3", "step4", "step5", "step6"]),
    "a partial one": ([f"{ODD}/step4"], ["late-7", "step1", "step2", "step3", "step5", "step6"]),
    "damaged ones": ([f"{ODD}/step{{3,6}}"], ["late-7", "step1", "step2", "step4", "step5"]),
    "a pinned one": ([f"{ODD}/late-7", "--force"], ["step1", "step2", "step3", "step4", "step5", "step6"]),
    "all": (["runs/odd", "--force"], []),
}


@pytest.mark.parametrize(("arguments", "left"), GONE.values(), ids=GONE)
def test_rm_removes_what_is_named_and_no_more(arguments: list[str], left: list[str], ckpt: Ckpt, root: Path) -> None:
    said = ckpt("rm", "--yes", *arguments)
    assert said.code == 0
    assert there(ODD) == left
    assert len(said.out.splitlines()) == 7 - len(left)
    assert (root / ODD / "notes" / "mine.txt").exists()


@pytest.mark.parametrize(("typed", "code", "left"), [("y\n", 0, 2), ("YES\n", 0, 2), ("\n", 1, 3), ("", 1, 3)])
def test_rm_asks_and_takes_anything_but_yes_for_no(
    typed: str, code: int, left: int, ckpt: Ckpt, answers: Callable[[str], None]
) -> None:
    answers(typed)
    said = ckpt("rm", "runs/fine@step10", "--json")
    assert said.code == code
    assert len(there(FINE)) == left
    assert f"{FINE}/step10" in said.err
    assert "remove 1 checkpoint? [y/N]" in said.err
    assert said.json["removed"] == ([] if code else [f"{FINE}/step10"])


def test_an_interrupt_at_the_question_removes_nothing(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True, readline=interrupt))
    assert ckpt("rm", "runs/fine@step10").code == 130
    assert there(FINE) == ALL_FINE


def test_rm_only_shows_what_would_go_in_a_dry_run(ckpt: Ckpt) -> None:
    said = ckpt("rm", "runs/fine@step10", "--dry-run", "--json")
    assert (said.code, said.json) == (0, {"would_be_removed": [f"{FINE}/step10"], "left": {}})
    assert there(FINE) == ALL_FINE


def test_one_that_is_being_read_stays_and_the_others_go(ckpt: Ckpt, root: Path) -> None:
    with Catalog.of(root / FINE).storage.reading("step10"):
        said = ckpt("rm", f"{FINE}/step[12]0", "--yes", "--json")
    assert said.code == 1
    assert said.json == {"removed": [f"{FINE}/step20"], "left": {f"{FINE}/step10": "it is being read"}}
    assert there(FINE) == ["step10", "step30"]
    assert recorded(root) == {"step20": "train ckpt rm"}


def recorded(root: Path) -> dict[str, str | None]:
    """The removals that the run records, and why."""
    file = root / "runs" / "fine" / "checkpoints.jsonl"
    return {one.name: one.removed_reason for one in Life.read_all(read_rows(file))}


def with_rules(root: Path, name: str, text: str) -> None:
    (root / "runs" / name / "config.yaml").write_text(text)


def test_prune_applies_the_rules_of_the_run_as_they_are_now(ckpt: Ckpt, root: Path) -> None:
    assert ckpt("prune", "runs/fine", "--yes").out.splitlines()[-1] == "nothing to do"
    with_rules(root, "fine", config("fine", "1"))
    dry = ckpt("prune", "runs/fine", "--dry-run", "--json")
    assert dry.json == {"would_be_removed": [f"{FINE}/step10", f"{FINE}/step20"], "left": {}}
    assert there(FINE) == ALL_FINE
    said = ckpt("prune", "runs/fine", "--yes")
    assert said.code == 0
    assert there(FINE) == ["step30"]
    assert [f"{FINE}/step30", "stays", "final"] in said.words
    why = "train ckpt prune: beyond the 1 newest regular"
    assert recorded(root) == {"step10": why, "step20": why}


@pytest.mark.parametrize(
    ("own", "goes"),
    [
        ("remove: never", []),
        ("max_checkpoints: 2", ["step10"]),
        ("keep_best: {metric: val/loss, mode: max}", ["step20"]),
        ("extra: 1", ["step10", "step20"]),
    ],
)
def test_prune_goes_by_the_settings_of_a_run_with_a_saver_of_its_own(
    ckpt: Ckpt, root: Path, own: str, goes: list[str]
) -> None:
    node = f"callbacks:\n  checkpoint:\n    _target_: mine.Saver\n    {own}\n"
    with_rules(root, "fine", config("fine", "1") + node)
    message = ckpt("prune", "runs/fine", "--dry-run", "--json").json
    assert message == {"would_be_removed": [f"{FINE}/{name}" for name in goes], "left": {}}


def test_prune_counts_on_no_checkpoint_that_is_not_sound(ckpt: Ckpt, root: Path) -> None:
    (root / ODD / "late-7" / "pinned").unlink()
    flipped = root / ODD / "late-7" / "rank0.safetensors"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"!")
    assert ckpt("prune", "runs/odd", "--yes").code == 0
    # step5 is flipped too, and step2 is not finite: step1 is all that a resume could go on from.
    assert there(ODD) == ALL_ODD


def test_a_run_that_is_training_is_listed_but_not_pruned(ckpt: Ckpt, root: Path) -> None:
    with_rules(root, "fine", config("fine", "1"))
    with RunDir(root / "runs/fine").lock():
        assert ckpt("ls", "runs/fine").code == 0
        assert ckpt("prune", "runs/fine", "--dry-run").code == 0
        said = ckpt("prune", "runs/fine", "--yes")
    assert said.code == 4
    assert "in use" in said.err
    assert there(FINE) == ALL_FINE


@pytest.mark.parametrize("folder", ["store/away", "store/${name}"])
def test_a_run_whose_checkpoints_lie_elsewhere_is_looked_after_by_its_name(ckpt: Ckpt, root: Path, folder: str) -> None:
    begin(root, "away", config("away", "1", folder))
    shutil.copytree(root / FINE, root / "store/away")
    for step in (10, 20):
        shutil.rmtree(root / f"store/away/step{step}")
        save(root, f"store/away/step{step}", {"model": {}}, step=step, run_id="away", attempt=1)
    assert [one["run"] for one in ckpt("ls", "runs/away", "--json").json] == ["runs/away"] * 2
    assert ckpt("ls", "runs/away@step20", "--json").json[0]["path"] == "store/away/step20"
    assert ckpt("prune", "runs/away", "--yes").code == 0
    assert there("store/away") == ["step20", "step30"]
    said = ckpt("prune", "store/away", "--yes")
    assert said.code == 3
    assert "Name the run" in said.err


def test_a_run_that_shares_its_folder_names_its_own_checkpoints_alone(ckpt: Ckpt, root: Path) -> None:
    for name, steps in (("first", (10, 20)), ("second", (5, 20, 40))):
        begin(root, name, config(name, folder="store"))
        for step in steps:
            facts = {"metrics": {"val/loss": 1.0 / step}, "run_id": name, "attempt": 1, "step": step}
            save(root, f"store/{name}-{step}", {"model": {}}, **facts)
    for what, path in (
        ("runs/first@latest", "store/first-20"),
        ("runs/first@best", "store/first-20"),
        ("runs/second@latest", "store/second-40"),
        ("runs/second@step20", "store/second-20"),
    ):
        assert [one["path"] for one in ckpt("ls", what, "--json").json] == [path]
    assert ckpt("ls", "runs/first@step40").code == 3
    assert [one["best"] for one in ckpt("ls", "runs/first", "--json").json] == [False, True]
    assert ckpt("rm", "runs/first", "--yes", "--force").code == 0
    assert there("store") == ["second-20", "second-40", "second-5"]
    left = [one["path"] for one in ckpt("ls", "store", "--json").json]
    assert left == ["store/second-5", "store/second-20", "store/second-40"], "the folder itself names all"


def test_what_the_disk_refuses_is_reported_without_a_traceback(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", os.fspath(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        said = ckpt("rm", "runs/fine@step10", "--yes")
    assert said.code == 1
    assert "rm: Permission denied\n  --> " in said.err
    assert "Traceback" not in said.err


def test_verify_names_a_format_that_validate_would_refuse(ckpt: Ckpt, root: Path) -> None:
    path = root / FINE / "step20/manifest.json"
    path.write_bytes(replace(Manifest.parse(path.read_bytes()), format="zarr").to_bytes())
    output = ckpt("verify", "runs/fine")
    assert output.code != 0
    assert "its format 'zarr' is unknown" in output.out + output.err


def test_a_copy_is_not_among_a_runs_checkpoints_but_can_be_looked_at_by_its_own_name(ckpt: Ckpt, root: Path) -> None:
    shutil.copytree(root / FINE / "step20", root / FINE / "best_so_far")
    assert "best_so_far" not in ckpt("ls", "runs/fine").out
    for action in ("ls", "show", "verify"):
        output = ckpt(action, f"{FINE}/best_so_far")
        assert (output.code, "best_so_far" in output.out) == (0, True), action
