"""A start brings only what the run uses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import SMALL, environment, make_project, run_program, train, warm_server

_LOADED_AT_THE_END = """
import gc, json, os, sys
from trainer_cli.commands.command_line import main
code = main(sys.argv[1:])
state = {"modules": list(sys.modules), "collects": gc.isenabled(), "spins": os.environ.get("GOMP_SPINCOUNT")}
print(json.dumps({"code": code, **state}))
"""
_UNUSED = ("torch._dynamo", "sympy", "rich", "sklearn")
"""What a default run with nothing compiled, on no terminal, can do without."""
_UNUSED_AT_FIRST = ("torch.utils.tensorboard", "tensorboard", "google.protobuf")
"""What is imported for the first record, and not before the first step."""
_LOADED_AFTER_A_STEP = """
import sys
from pathlib import Path

from trainer_cli import Callback


class Loaded(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.progress.step == 1:
            Path("loaded").write_text("\\n".join(sys.modules))
"""


def without_spins() -> dict[str, str]:
    return {name: value for name, value in environment().items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork")
def test_the_process_that_tests_fork_from_is_in_a_folder_that_no_test_removes(tmp_path: Path) -> None:
    """A test would start it in its own folder; where the current folder is gone, torch._dynamo can't be imported."""
    program = "import os, sys\nprint(os.readlink(f'/proc/{os.getppid()}/cwd'))"
    assert run_program(program, folder=tmp_path).out == "/\n"


def test_a_default_run_imports_neither_the_compiler_nor_rich(tmp_path: Path) -> None:
    steps = ["+experiment=digits_mlp", "loop.max_duration=2", "scheduler.warmup=0", "loop.log_interval=1"]
    process = subprocess.run(
        [sys.executable, "-c", _LOADED_AT_THE_END, "fit", *steps],
        cwd=tmp_path, env=without_spins(), capture_output=True, text=True,
    )  # fmt: skip
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["code"] == 0, process.stderr
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in process.stderr.splitlines()), (
        "no terminal"
    )
    assert [name for name in _UNUSED if name in found["modules"]] == []
    assert list((tmp_path / "runs/digits_mlp/tensorboard").iterdir()), "nothing was written for TensorBoard"
    assert found["spins"], "threads that wait take the time of those that work"
    assert found["collects"], "garbage is not collected any more"


def test_the_first_step_does_not_wait_for_tensorboard(tmp_path: Path) -> None:
    project = make_project(tmp_path, **{"mine/loaded.py": _LOADED_AFTER_A_STEP})
    loaded = "+callbacks.loaded={_target_: mine.loaded.Loaded}"
    assert train("fit", "experiment=mine", loaded, cwd=project, cold=True).code == 0
    assert not {*_UNUSED_AT_FIRST} & {*(project / "loaded").read_text().splitlines()}


def test_with_json_stdout_has_the_summary_alone_however_the_fit_ends(tmp_path: Path) -> None:
    refused = train("fit", "--json", *SMALL, "loop.max_step=1", cwd=tmp_path)
    assert (refused.code, json.loads(refused.out)["mistakes"][0]["where"]) == (2, "loop.max_step"), "no run was opened"
    failed = train("fit", "--json", *SMALL, "optimizer.lr=1e30", "name=failed", cwd=tmp_path)
    assert (failed.code, json.loads(failed.out)["status"]) == (1, "failed")
    done = train("fit", "--json", *SMALL, cwd=tmp_path)
    summary = json.loads(done.out)
    assert (done.code, summary["status"], summary["step"]) == (0, "finished", 20)
    assert summary == json.loads((tmp_path / "runs/digits_mlp/summary.json").read_text())
    assert "finished at step 20" in done.err
    again = train("fit", "--json", *SMALL, cwd=tmp_path)
    assert json.loads(again.out) == summary
    assert "nothing to do" in again.err


@pytest.mark.skipif(sys.platform != "linux", reason="commands are new interpreters")
@pytest.mark.parametrize(
    ("variable", "forks"), [("TORCHINDUCTOR_CACHE_DIR", True), ("MINE", True), ("OMP_NUM_THREADS", False)]
)
def test_a_command_of_the_tests_is_forked_unless_a_variable_is_read_before_that(variable: str, forks: bool) -> None:
    assert warm_server().can_become({**environment(), variable: "7"}) is forks
