"""What docs/agents.md promises to a program: its tasks by exit codes and `--json` alone, and commands given again."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command import ROOT, Result, train
from compare import assert_same_state, content, metrics
from here import train_here

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"`train ([^`]+)`")


def rows_of(title: str) -> list[list[str]]:
    """The cells of each row of the table in a section."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    return [row.split(" | ") for row in rows[1:]]


TASKS = [(task, COMMAND.findall(command)[0], int(code)) for task, command, code in rows_of("Ten tasks")]
ANSWERS = {command: keys for name, keys in rows_of("Answers") for command in COMMAND.findall(name)}
AGAIN = {command: what for commands, what in rows_of("Safe to repeat") for command in COMMAND.findall(commands)}


def described(words: str, table: dict[str, str]) -> str | None:
    """What a table says about a command, by the longest beginning of its words."""
    return next(
        (table[name] for name in sorted(table, key=len, reverse=True) if f"{words} ".startswith(f"{name} ")), None
    )


class Done(NamedTuple):
    """A command of the page that was run, and then given again."""

    first: Result
    again: Result | None


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agent") / "mine"


@pytest.fixture(scope="module")
def done(project: Path) -> dict[str, Done]:
    """All commands of the page, in order, those with the same answer twice."""
    results = {}
    for _, words, _ in TASKS:
        cwd = project.parent if words == "new mine" else project
        # Commands that start others, here: those are then forks of a warm process.
        run = train_here if words.startswith(("compare", "fit -m")) else train
        first = run(*shlex.split(words), cwd=cwd)
        repeats = described(words, AGAIN) is not None and "bad" not in words and "max_time" not in words
        results[words] = Done(first, run(*shlex.split(words), cwd=cwd) if repeats else None)
    return results


def read_answer(result: Result) -> list[dict[str, Any]]:
    """The entries of an answer: one, those of a list, or those of its lines."""
    try:
        answer = json.loads(result.out)
    except ValueError:
        return [json.loads(line) for line in result.out.splitlines()]
    return answer if isinstance(answer, list) else [answer]


def has_key(answer: Any, key: str) -> bool:
    """Whether an answer has a key; of a list, whether each entry has it."""
    if isinstance(answer, list):
        return all(has_key(entry, key) for entry in answer)
    first, _, rest = key.partition(".")
    return first in answer and (not rest or has_key(answer[first], rest))


@pytest.mark.parametrize(("words", "code"), [(words, code) for _, words, code in TASKS])
def test_a_task_of_the_page_has_its_exit_code_and_the_keys_of_its_answer(
    words: str, code: int, done: dict[str, Done]
) -> None:
    result = done[words].first
    assert result.code == code, result.err
    if "--json" not in words:
        return
    answer = read_answer(result)
    if code == 2:
        keys = next(keys for name, keys in rows_of("Answers") if name == "an error")
    else:
        keys = described(words, ANSWERS) or ""
    named = re.findall(r"`([^`]+)`", keys)
    assert named
    assert answer
    assert [key for key in named if not has_key(answer, key)] == []


@pytest.mark.parametrize("words", [words for _, words, _ in TASKS if described(words, AGAIN)])
def test_a_command_may_be_given_again(words: str, done: dict[str, Done]) -> None:
    first, again = done[words]
    what = described(words, AGAIN)
    assert what is not None
    if again is None:
        return
    wanted = re.search(r"exit code (\d)", what)
    assert again.code == (first.code if wanted is None else int(wanted[1])), again.err
    if "same answer" in what:
        ages = [{**entry, "age_s": None} for entry in read_answer(first)]
        assert [{**entry, "age_s": None} for entry in read_answer(again)] == ages


def test_the_answers_solve_the_tasks(project: Path, done: dict[str, Done]) -> None:
    """Each value that a later command needs is in the answer of an earlier one."""
    answers = {task: read_answer(done[words].first) for task, words, _ in TASKS if "--json" in words}
    (mistake,) = answers["be told of a mistake"][0]["mistakes"]
    assert mistake["cure"] == "Did you mean 'optimizer.lr=1'?"
    failed = [run for run in answers["find out which runs failed, and why"] if run["state"] == "failed"]
    assert [run["run"] for run in failed] == ["runs/bad"]
    assert "not finite" in failed[0]["reason"]
    step = answers["find the step at which it failed"][0]["step"]
    tests = {test["step"]: test["holds"] for test in answers["find the step at which it failed"][0]["tests"]}
    assert (tests[step], tests[step - 1]) == (True, False)
    (best,) = [each for each in answers["list checkpoints, and see the best"] if each["best"]]
    (row,) = answers["evaluate it"][0]["rows"]
    assert (row["checkpoint"], row["metrics"]["loss"]) == (best["path"], best["metrics"]["val/loss"])
    verdict = answers["compare two configs"][0]
    assert (verdict["verdict"], verdict["exit_code"], verdict["error"]) == ("worse", 1, None)
    jobs = {run["run"]: run["value"] for run in answers["read the table of the [sweep](sweeps.md)"]}
    assert min(jobs, key=lambda run: jobs[run]) == "runs/mine/sweep/optimizer.lr=0.01"
    (replayed,) = answers["replay a step"][0]["steps"]
    assert replayed["step"] == 7
    exported = project / answers["export the weights"][0]["exported"]
    assert exported.is_file()


def test_a_run_that_was_stopped_and_started_again_is_an_uninterrupted_one(project: Path, done: dict[str, Done]) -> None:
    part, whole = project / "runs/part", project / "runs/mine"
    assert len(json.loads((part / "summary.json").read_text())["attempts"]) > 1
    assert metrics(part) == metrics(whole)
    assert_same_state(part, whole)


def test_a_finished_run_is_not_touched(project: Path, done: dict[str, Done]) -> None:
    before = content(project / "runs/part/checkpoints")
    (words,) = [words for task, words, _ in TASKS if task == "resume it"]
    assert train(*shlex.split(words), cwd=project).code == 0
    assert content(project / "runs/part/checkpoints") == before


MISTAKES = {
    "fit mine optimizer.lrr=1 --json": (2, "there is no key 'optimizer.lrr'"),
    "ckpt ls runs/other --json": (3, "runs/other names no checkpoint"),
    "plan other --json": (2, "'other' is not of the form key=value"),
    "top --jsn --json": (2, "--jsn"),
    "compare mine other --json": (66, "B is 'other'"),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_an_error_is_an_answer_on_one_line(words: str, project: Path, done: dict[str, Done]) -> None:
    code, message = MISTAKES[words]
    result = train(*words.split(), cwd=project)
    (line,) = result.out.splitlines()
    error = json.loads(line)
    assert (result.code, error["exit_code"]) == (code, code)
    assert message in error["error"]


def test_an_error_of_the_users_code_is_an_answer_too(project: Path, done: dict[str, Done]) -> None:
    parts = project / "mine/model.py"
    text = parts.read_text()
    parts.write_text(text + "\nraise RuntimeError('half written')\n")
    try:
        result = train("check", "model", "mine", "--json", cwd=project)
    finally:
        parts.write_text(text)
    assert "half written" in json.loads(result.out)["error"]
    assert json.loads(result.out)["exit_code"] == result.code
