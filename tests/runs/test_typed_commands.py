"""What is printed as a command means the same when a shell reads it: real shells split the words, nothing is run."""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import ROOT

from trainer_cli.addons.exact import data_command as data
from trainer_cli.addons.exact.divergence import Divergence, Stage
from trainer_cli.addons.exact.divergence_report import DivergenceReport
from trainer_cli.addons.exact.trace import Value
from trainer_cli.commands.choices import no_verb
from trainer_cli.config.overrides import read_overrides
from trainer_cli.errors import ConfigError, ConfigErrors, UserError
from trainer_cli.running.ending import print_outcome
from trainer_cli.runs.run_dir import Outcome, RunDir
from trainer_cli.selection.patterns import ckpt_argument
from trainer_cli.steps.run_status import RunStatus

NAMES = (
    "plain", "a b", " a", "a ", "a[1]", "[b]", "it's", 'say "x"', "'a'", '"a"', "$HOME", "${HOME}", "$(id)",
    "`id`", "!a", "a!b", "!!", "~", "~root", "a~", "#a", "a #b", "größe", "日本", "a,b", "a{1,2}", "a=b",
    "=a", "a;b", "a&b", "a|b", "a>b", "(a)", "a*", "a?b", "a\\b", "a\\", "-a", "null", "%1", "^a", "a'\"b",
    "a\tb",
)  # fmt: skip
SHELLS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
    for name in ("bash", "zsh")
]


def words_of(shell: str, commands: list[str]) -> list[list[str]]:
    """The words that a shell makes of each command, all read by one process."""
    begin = "words() { printf '%s\\0' \"$@\"; printf '\\n\\0'; }\n"
    script = begin + "\n".join(f"words {command}" for command in commands)
    done = subprocess.run([shell, "-c", script], check=True, capture_output=True, text=True, timeout=500)
    assert done.stderr == ""
    return [command.split("\0")[:-1] for command in done.stdout.split("\n\0")[:-1]]


def closing_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The commands that `fit` ends with: to evaluate its checkpoints, and to show its runs."""
    run = RunDir(folder)
    (run.checkpoints_folder / "step9").mkdir(parents=True)
    kept = [{"name": "step9", "why": "final"}]
    outcome = Outcome(status=RunStatus.finished, reason="enough", step=9, wall_time_s=1.0, checkpoints=kept)
    print_outcome(run, outcome, {})
    printed = capsys.readouterr().out
    return [line[2:] for line in printed[printed.index("next:\n") :].splitlines()[1:]]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_commands_that_fit_ends_with_name_the_run(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name / "run" for name in NAMES if "/" not in name]
    commands = [command for folder in folders for command in closing_commands(folder, capsys)]
    found = iter(words_of(shell, commands))
    for folder in folders:
        verb, words = ["train", "validate"], next(found)
        assert words[:2] == verb
        assert read_overrides(words[2:]).ckpt == f"{folder}/checkpoints/step*"
        assert next(found) == ["train", "serve", str(folder.parent)]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_checkpoint_that_an_error_names_is_the_one_that_is_read(shell: str) -> None:
    patterns = [f"{name}{rest}" for name in NAMES for rest in ("", "/checkpoints/step*", "@latest", "/step{1,2}")]
    typed = words_of(shell, [ckpt_argument(pattern) for pattern in patterns])
    assert [Path(str(read_overrides(words).ckpt)) for words in typed] == [Path(pattern) for pattern in patterns]


def wrong_verbs(name: str) -> Iterator[list[str]]:
    yield [f"name={name}", "seed=3"]
    # Those that quotes or a list change.
    if set("'\"[],\\") & set(name):
        yield [f"run_dir='{name}'", f"ckpt=[{name},b]"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_that_is_meant_without_a_verb_has_the_same_words(shell: str) -> None:
    lines = [line for name in NAMES for line in wrong_verbs(name)]
    errors = [(line, no_verb(line[0], line, ["fit"])) for line in lines]
    # Of words that do not compose the mistakes are named, and no command.
    composed = [(line, str(error.cure)) for line, error in errors if not isinstance(error, ConfigErrors)]
    assert len(composed) > 10
    commands = [cure.removeprefix("Did you mean ")[1:-2] for _, cure in composed]
    assert words_of(shell, commands) == [["train", "fit", *line] for line, _ in composed]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_quotes_that_a_string_is_advised_to_have_keep_it(shell: str) -> None:
    names = [name for name in NAMES if name != "a\tb"]
    cures: dict[str, str] = {}
    for name in names:
        for line in (f"+model.x={name}", f"+model.x={name},b"):
            try:
                read_overrides([line])
            except ConfigError as error:
                if "string" in str(error.hint):
                    cures[line] = str(error.hint)
    shown = [hint[hint.rindex(start) + len(start) :] for hint in cures.values() for start in [_lead(hint)]]
    commands = [text.rstrip(".") for text in shown]
    assert len(commands) > 30
    for line, (word,) in zip(cures, words_of(shell, commands), strict=True):
        (override,) = read_overrides([word]).overrides
        text = line.partition("=")[2]
        assert override.value() == text, (line, word)


def _lead(hint: str) -> str:
    return next(lead for lead in ("or a string write ", "pairs: ", "quotes: ", ": ") if lead in hint)


def report_of_divergence(run: Path) -> str:
    first = Divergence((3, 3), Stage.loss, (Value("loss", "1", "2"),))
    return str(DivergenceReport(runs=(run, run), divergence=first))


def request_for_a_step(run: Path) -> str:
    with pytest.raises(UserError) as caught:
        data.run(argparse.Namespace(run_dir=run, steps=None, find=None, overrides=[]))
    return str(caught.value.cure)


PRINTED: dict[str, tuple[Callable[[Path], str], list[list[str]]]] = {
    "diverge": (report_of_divergence, [["replay", "RUN", "3"], ["data", "RUN", "3", "--show"]]),
    "data without a step": (request_for_a_step, [["data", "RUN", "1"]]),
}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("what", PRINTED)
def test_a_command_that_looks_closer_names_the_run(shell: str, what: str) -> None:
    show, expected = PRINTED[what]
    # A backquote would end the quotes in which a sentence has its command.
    runs = [Path("runs") / name for name in NAMES if "`" not in name]
    commands = [re.findall(r"^  (train .*)$|`(train [^`]*)`", show(run), re.MULTILINE) for run in runs]
    typed = iter(words_of(shell, ["".join(found) for of_run in commands for found in of_run]))
    for run in runs:
        for words in expected:
            assert next(typed) == ["train", *(str(run) if word == "RUN" else word for word in words)]
    assert next(typed, None) is None


QUOTED = ("quote(", "shlex.join(", "ckpt_argument(")
_COMMAND = (
    r"(train (replay|data|ckpt|ckpt \w+|serve|validate|diverge|bisect|report|tail|top|predict|check \w+)|python|cd) "
)
_IN_SOURCE = re.compile(_COMMAND + r"""(["']\s*[fr]*["'])?\{""")
"""A file without this holds no such command, and need not be parsed."""
QUOTED_BEFORE = {
    "run_name", "words",  # of shlex.quote
    "args.action", "word", "name",  # a verb, an action, the name of a program
}  # fmt: skip


def test_what_a_printed_command_names_is_quoted_for_a_shell() -> None:
    bare = [
        f"{file.name}:{value.lineno}: {ast.unparse(value.value)}"
        for file in sorted((ROOT / "trainer_cli").rglob("*.py"))
        if _IN_SOURCE.search(source := file.read_text())
        for text in ast.walk(ast.parse(source))
        if isinstance(text, ast.JoinedStr)
        for before, value in zip(text.values, text.values[1:], strict=False)
        if isinstance(before, ast.Constant) and isinstance(value, ast.FormattedValue)
        if re.search(f"{_COMMAND}$", str(before.value))
        if not any(quotes in ast.unparse(value.value) for quotes in QUOTED)
        if ast.unparse(value.value) not in QUOTED_BEFORE
    ]
    assert bare == []
