"""Uses the package in copies whose add-ons are deleted, each in a fork of one process that has imported torch.

    python without_addons.py FOLDER < CASES

CASES is JSON: the name of a copy in FOLDER -> the add-ons that it lacks. Prints JSON: the name -> what failed there.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

# What takes long to import, and is no part of the package.
MODULES = (
    "hydra", "numpy", "omegaconf", "rich.console", "safetensors.torch", "torch", "torch.utils.data", "yaml",
    "torch.utils.tensorboard", "hydra.core.override_parser.overrides_parser", "fsspec", "xxhash", "pytest",
)  # fmt: skip
FIT = ["fit", "digits_mlp", "checkpoint.save_interval=2"]
NEEDS: Mapping[str, Sequence[Sequence[str]]] = {
    "auto": [[*FIT, "name=auto", "data.batch_size=auto"]],
    "exact": [
        ["replay", "runs/digits_mlp", "2"],
        ["data", "runs/digits_mlp", "2"],
        ["check", "run", "runs/digits_mlp"],
        ["ckpt", "show", "runs/digits_mlp@step1"],
        [*FIT, "name=fork", "ckpt=runs/digits_mlp@step1"],
    ],
    "formats": [
        ["ckpt", "export", "runs/digits_mlp@latest", "--format", "torch"],
        [*FIT, "name=format", "checkpoint.format=torch_file"],
        [*FIT, "name=foreign", "ckpt=weights.pt", "load.states=[model]"],
    ],
    "inspect": [[*FIT, "name=norms", "callbacks=norms"]],
    "jobs": [[*FIT, "-m", "seed=1,2"], ["plan", "-m", "digits_mlp", "seed=1,2"], [*FIT, "name=jobs", "restarts.max=1"]],
    "precheck": [["check", "data", "digits_mlp"], ["check", "model", "digits_mlp"], ["plan", "digits_mlp", "--probe"]],
    "predict": [["predict", "ckpt=runs/digits_mlp@latest"]],
    "search": [
        [*FIT, "-m", "seed=1,2", "sweep.search=random", "sweep.trials=2"],
        [*FIT, "-m", "seed=1,2", "sweep.prune=asha"],
    ],
    "sparsity": [[*FIT, "name=sparse", "sparsity=gmp"]],
    "stores": [
        [*FIT, "name=stored", "checkpoint.folder=s3://bucket/run"],
        [*FIT, "name=copied", "checkpoint.copy_to.folder=copies"],
        ["plan", "digits_mlp", "name=copied", "checkpoint.copy_to.folder=copies"],
        ["validate", "ckpt=http://127.0.0.1:9/step3"],
    ],
    "text": [["fit", "char_gpt", "data.path=text.txt"], ["plan", "digits_mlp", "model._target_=trainer_cli.GPT"]],
    "trackers": [[*FIT, "name=tracked", "loggers=wandb"]],
    "view": [["report", "runs/digits_mlp"], ["serve", "runs"]],
}
"""What needs each add-on: commands that are refused without it."""
VERBS = {
    "exact": ("replay", "diverge", "bisect", "data"),
    "predict": ("predict",),
    "view": ("serve", "report"),
}


COMPOSING = (
    "test_the_settings_of_an_answer_compose",
    "test_a_command_of_an_answer_exists",
    "test_an_experiment_is_chosen_by_its_name_alone_except_where_the_spelling_of_hydra_is_explained",
    "test_the_overrides_in_the_tables_can_be_composed",
)
"""Tests of pages that take the longest: they run where all add-ons are missing."""
OF_OTHERS = (
    "test_the_listed_arguments_are_those_of_the_installed_package",
    "test_the_names_in_all_tables_are_those_of_the_installed_package",
)
"""Tests of pages that compare them with other packages."""


def run(*words: str) -> tuple[int, str, str]:
    """Run a command of this copy: its exit code, and what it printed."""
    from trainer_cli.commands.command_line import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()


def use(missing: Sequence[str], root: Path) -> Iterator[str]:
    """Use everything that the core has; yields what fails."""
    gone = {verb for addon in missing for verb in VERBS.get(addon, ())}
    torch = sys.modules["torch"]
    torch.save({"weight": torch.zeros(2)}, "weights.pt")
    Path("text.txt").write_text("some text " * 400)
    for words in (
        ["--help"],
        ["list"],
        ["complete", "bash"],
        ["env", "--json"],
        ["config", "digits_mlp"],
        [*FIT, "loop.max_duration=4"],
        [*FIT, "loop.max_duration=6"],
        ["plan", "digits_mlp", "loop.max_duration=9"],
        ["validate", "ckpt=runs/digits_mlp"],
        ["ckpt", "ls", "runs/digits_mlp"],
        ["ckpt", "verify", "runs/digits_mlp"],
        ["tail", "runs/digits_mlp"],
        ["top", "runs"],
    ):
        code, out, err = run(*words)
        if code:
            yield f"train {' '.join(words)}: exit code {code}\n{err}"
        if words == ["--help"] and (listed := [verb for verb in gone if f"\n  {verb} " in out]):
            yield f"train --help lists {listed}"
        if words[0] == "env":
            states = json.loads(out)["addons"]
            if wrong := {name for name in states if (states[name] == "missing") is not (name in missing)}:
                yield f"train env is wrong on {wrong}"
    if "resuming at step 4" not in Path("runs/digits_mlp/train.log").read_text():
        yield "the second fit has not resumed"
    for addon in missing:
        for needing in NEEDS.get(addon, ()):
            code, out, err = run(*needing)
            # An add-on that another one would have asked for may be named.
            if code != 2 or not any(f"the add-on '{name}'" in err for name in missing):
                yield f"without {addon}, train {' '.join(needing)}: exit code {code}\n{out}{err}"
    yield from find_wrong_pages(missing, gone)
    for _, module, _ in pkgutil.walk_packages([str(root / "trainer_cli")], "trainer_cli."):
        # Not the earlier place of a name of `exact`.
        if not module.endswith("__main__") and not module.startswith("trainer_cli.testing."):
            importlib.import_module(module)


def find_wrong_pages(missing: Sequence[str], gone: set[str]) -> Iterator[str]:
    """The generated reference has all that is there, and nothing of what is not."""
    generated = importlib.import_module("generated")
    if listed := [verb for verb in gone if f"## train {verb}\n" in "".join(generated.commands())]:
        yield f"the reference of commands has {listed}"
    with open(Path(generated.PACKAGE, "addons", "shipped.json"), encoding="utf-8") as file:
        names = [name for addon, brings in json.load(file).items() if addon in missing for name in brings["names"]]
    page = "\n".join(generated.classes())
    if listed := [name for name in names if f":: trainer_cli.{name}\n" in page]:
        yield f"the reference of public names has {listed}"


def run_page_tests(missing: Sequence[str], *, is_last: bool) -> Iterator[str]:
    """Run the tests of the pages, except those with a fixture; yields what fails."""
    for name in ("test_docs", "test_howto", "test_moving"):
        left_out = OF_OTHERS if is_last else (*OF_OTHERS, *COMPOSING)
        tests = vars(importlib.import_module(name))
        for key in (each for each in tests if each.startswith("test_") and each not in left_out):
            for row in rows_of(tests[key], missing):
                try:
                    tests[key](**row)
                except pytest.skip.Exception:
                    pass
                except Exception:
                    yield f"{name}::{key} {row}:\n{traceback.format_exc()}"


def rows_of(test: Callable[..., None], missing: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The arguments with which a test runs: of each row, without those that a missing add-on skips."""
    marks = [each.mark if hasattr(each, "mark") else each for each in getattr(test, "pytestmark", ())]
    tables = [each.args for each in marks if each.name == "parametrize"]
    names, rows = tables[0] if tables else ((), [()])
    names = names.split(",") if isinstance(names, str) else names
    for row in rows if set(names) == set(inspect.signature(test).parameters) else ():
        on_row = (
            row if isinstance(row, ParameterSet) else pytest.param(*(row if len(names) > 1 else [row] if names else []))
        )
        needed = [mark.args[0] for mark in (*marks, *on_row.marks) if mark.name == "addon"]
        if not set(needed) & set(missing):
            yield dict(zip(names, on_row.values, strict=True))


def start(name: str, missing: Sequence[str], folder: Path) -> int:
    """Fork a process that uses one copy, and writes what failed."""
    if pid := os.fork():
        return pid
    root = folder / name
    failures: list[str] = []
    try:
        work = root / "work"
        work.mkdir()
        os.chdir(work)
        sys.path[:0] = [str(root), str(root / "docs"), str(root / "tests")]
        failures += use(missing, root)
        failures += run_page_tests(missing, is_last=name == "all")
    except BaseException:
        failures.append(traceback.format_exc())
    finally:
        (folder / f"{name}.json").write_text(json.dumps(failures))
        os._exit(0)


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.load(sys.stdin)
    for module in MODULES:
        importlib.import_module(module)
    waiting, running = list(cases.items()), set[int]()
    while waiting or running:
        while waiting and len(running) < 2:
            name, missing = waiting.pop(0)
            running.add(start(name, missing, folder))
        pid, _ = os.wait()
        running.remove(pid)
    json.dump({name: json.loads((folder / f"{name}.json").read_text()) for name in cases}, sys.stdout)


if __name__ == "__main__":
    main()
