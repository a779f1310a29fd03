"""The command line: verbs, exit codes, and errors as messages."""

from __future__ import annotations

import argparse
import errno
import gc
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import ROOT

from trainer_cli.addon import Verb
from trainer_cli.commands import command_line as main_module
from trainer_cli.commands.command_line import add_config_arguments, main
from trainer_cli.errors import DISK_CURES, CheckpointError, RunDirectoryError, SaveError, TrainError, UserError
from trainer_cli.terminal import COLOURS


def verb_that(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    """Make `train probe` call `run`."""
    monkeypatch.setattr(main_module, "VERBS", {"probe": Verb("probe_module", "try something")})
    monkeypatch.setitem(sys.modules, "probe_module", SimpleNamespace(add_arguments=add_config_arguments, run=run))


def raising(error: BaseException) -> object:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TrainError("a"), 1),
        (SaveError("a"), 1),
        (UserError("a"), 2),
        (CheckpointError("a"), 3),
        (RunDirectoryError("a"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_our_errors_are_one_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    monkeypatch.delenv("TRAIN_FULL_ERROR", raising=False)
    verb_that(monkeypatch, raising(error))
    assert main(["probe"]) == code
    captured = capsys.readouterr()
    assert captured.err == ("interrupted\n" if code == 130 else "error: a\n")
    assert captured.out == ""


@pytest.mark.parametrize("error", [ValueError("ours"), OSError(errno.EIO, "the camera is gone")])
def test_any_other_error_and_one_of_input_without_a_file_show_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    verb_that(monkeypatch, raising(error))
    assert main(["probe"]) == 1
    said = capsys.readouterr().err
    left_out, _, trace = said.partition("\n")
    assert "TRAIN_FULL_ERROR=1" in left_out
    assert trace.startswith("Traceback (most recent call last):\n")
    assert f"{Path(__file__).name}" in trace.splitlines()[1], "it begins where the error's own code does"
    assert f"\nerror: {type(error).__name__}: {error}\n  --> " in said
    assert "fault of train" not in said
    monkeypatch.setenv("TRAIN_FULL_ERROR", "1")
    assert main(["probe"]) == 1
    assert "command_line.py" in capsys.readouterr().err.splitlines()[1]


def test_an_error_of_our_own_code_says_how_to_report_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main_module, "VERBS", {"list": Verb("trainer_cli.errors", "not a verb's module")})
    assert main(["list"]) == 1
    trace, _, said = capsys.readouterr().err.partition("\nerror: ")
    assert trace.startswith("Traceback")
    assert "\nAttributeError: " in trace
    assert said == (
        "this is a fault of train, not of your config or code\n"
        "help: Please report it, with the traceback above and the output of `train env`.\n"
    )


RED, BLUE, CYAN = (f"\x1b[1;38;5;{COLOURS[name]}m" for name in ("red", "blue", "cyan"))


@pytest.mark.parametrize(
    ("terminal", "no_color", "shown"),
    [
        (True, "", f"{RED}error:\x1b[0m a\n  {BLUE}-->\x1b[0m b\n{CYAN}help:\x1b[0m c\n"),
        (True, "1", "error: a\n  --> b\nhelp: c\n"),
        (False, "", "error: a\n  --> b\nhelp: c\n"),
    ],
)
def test_errors_are_coloured_on_a_terminal_alone_and_not_where_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, no_color: str, shown: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    verb_that(monkeypatch, raising(UserError("a", where="b", cure="c")))
    assert main(["probe"]) == 2
    assert capsys.readouterr().err == shown


def test_a_continued_line_of_an_error_is_indented(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    words = "some words of a message"
    verb_that(monkeypatch, raising(UserError(words, where=words, cure=words)))
    assert main(["probe"]) == 2
    assert capsys.readouterr().err.replace("\x1b[K", "").splitlines() == [
        "error: some words of a", "  message", "  --> some words of a", "    message",
        "help: some words of a", "  message",
    ]  # fmt: skip


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE])
def test_a_disk_that_is_full_or_fails_is_one_message_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    verb_that(monkeypatch, raising(OSError(number, os.strerror(number), "runs/x/metrics.jsonl")))
    assert main(["probe"]) == 1
    said = capsys.readouterr().err
    intact = "What was committed before is intact."
    assert said == f"error: {os.strerror(number)}\n  --> runs/x/metrics.jsonl\nhelp: {intact} {DISK_CURES[number]}\n"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENAMETOOLONG])
@pytest.mark.parametrize("module", ["trainer_cli.runs.record", "pathlib", "mine.model"])
def test_a_file_that_may_not_be_opened_shows_a_traceback_only_in_a_users_code(
    module: str, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, Any] = {"__name__": module, "error": OSError(number, os.strerror(number), "runs/x/file")}
    exec("def run(args):\n    raise error", namespace)
    verb_that(monkeypatch, namespace["run"])
    code, output = main(["probe"]), capsys.readouterr().err
    if module == "mine.model":
        assert code == 1
        assert "Traceback" in output
        return
    assert code == (2 if number == errno.ENAMETOOLONG else 1)
    assert output.startswith(f"error: {os.strerror(number)}\n  --> runs/x/file\nhelp: What was committed before is ")
    assert DISK_CURES[number] in output.replace("\n", " ")


@pytest.mark.parametrize(
    "command",
    [
        ["fit", "+experiment=digits_mlp", "run_dir=runs/{name}"],
        ["plan", "+experiment=digits_mlp", "checkpoint.folder={name}"],
        ["report", "runs/{name}"],
        ["tail", "runs/{name}"],
        ["top", "runs/{name}", "--once"],
        ["validate", "ckpt=runs/{name}"],
    ],
    ids=lambda command: command[0],
)
def test_a_name_that_is_too_long_is_a_mistake_of_the_user(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = main([word.format(name="x" * 300) for word in command]), capsys.readouterr().err
    assert code in (2, 3), output
    assert "Traceback" not in output
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_traceback_of_a_mistake_is_shown_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAIN_FULL_ERROR", "1")
    verb_that(monkeypatch, raising(UserError("yours")))
    assert main(["probe"]) == 2
    captured = capsys.readouterr().err
    assert "Traceback" in captured
    assert captured.endswith("\nerror: yours\n")


def test_the_verbs_own_exit_code_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    verb_that(monkeypatch, lambda args: 75)
    assert main(["probe"]) == 75


def test_overrides_and_flags_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def see(args: Any) -> int:
        seen.append(args)
        return 0

    verb_that(monkeypatch, see)
    assert main(["probe", "+a=1", "-cd", "x", "~b", "--config-name", "y", "c=-1", "++d=[a,b]"]) == 0
    assert seen[0].overrides == ["+a=1", "~b", "c=-1", "++d=[a,b]"]
    assert (str(seen[0].config_dir), seen[0].config_name) == ("x", "y")


def test_how_a_sweep_starts_its_jobs_is_no_part_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["fit", "--help"]):
        assert main(argv) == 0
    assert main(["fit", "--frozen", "x.yaml"]) == 2
    assert main(["jobs"]) == 2
    message = capsys.readouterr()
    assert "train fit has no flag --frozen\n" in message.err
    assert "_job" not in message.out + message.err
    assert "frozen" not in message.out


def test_windows_is_pointed_to_wsl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["list"]) == 2
    assert "WSL" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["", *main_module.listed_verbs()])
def test_no_line_of_the_help_is_wider_than_the_terminal_and_no_word_is_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    printed = {}
    for width in (80, 300):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main([*word.split(), "--help"]) == 0
        printed[width] = capsys.readouterr().out
    assert max(map(len, printed[80].splitlines())) <= 80
    # A command that is broken is continued as in a shell.
    assert [text for text in printed[80].split() if text != "\\"] == printed[300].split()


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"], ["--version"], ["help", "fit"]])
def test_help_and_version_are_done(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == 0
    assert "train" in capsys.readouterr().out


def test_the_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in main_module.listed_verbs())


@pytest.mark.parametrize("word", list(main_module.listed_verbs()))
def test_the_help_of_a_verb_says_what_it_does_and_shows_examples(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert main([word, "--help"]) == 0
    out = capsys.readouterr().out
    summary = main_module.listed_verbs()[word].summary
    assert summary[1:] in " ".join(out.split())
    assert f"examples:\n  train {word}" in out
    if word == "fit":
        assert "`train list` shows what there is to choose, `train config --fields` every key" in " ".join(out.split())


def test_a_reader_that_closes_the_pipe_causes_no_message() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "trainer_cli", "list"],
        check=False,
        stdout=write,
        stderr=subprocess.PIPE,
        env=environment,
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == b""


def closed(streams: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of python that begins with streams closed, such as `>&-`."""
    line = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, *command]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(line, check=False, capture_output=True, text=True, env=environment)


def test_what_is_said_on_a_closed_stream_goes_nowhere() -> None:
    done = closed(">&-", "-m", "trainer_cli", "list")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = closed("2>&-", "-m", "trainer_cli", "list", "nothing")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_closed_stream(streams: str, tmp_path: Path) -> None:
    code = (
        "import os, sys; from trainer_cli.commands.command_line import main\n"
        "code = main(['--version'])\n"
        "file = open(sys.argv[1], 'w')\n"
        "kept = all(os.get_inheritable(number) for number in range(3))\n"
        "os.write(1, b'stray'); os.write(2, b'stray'); print('stray', flush=True)\n"
        "os.system('echo stray; echo stray >&2; read stray')\n"
        "file.write(f'{code} {kept} {file.fileno() > 2}')\n"
    )
    closed(streams, "-c", code, str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "0 True True"


@pytest.mark.parametrize(
    "argv", [["config"], ["list"], ["experiment=x"], ["config", "seed"], ["new", "x"], ["ckpt", "ls"]]
)
def test_a_current_folder_that_is_gone_is_one_message(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.setenv("PWD", "/folder/gone")
    with monkeypatch.context() as there:
        there.chdir(folder)
        folder.rmdir()
        assert (main(argv), main([*argv, "--help"])) == (2, 2 if "=" in argv[0] else 0)
    said = capsys.readouterr().err
    message = 'Change to another folder, or, if it was recreated: cd "$PWD".'
    assert said.startswith(f"error: the current folder no longer exists\n  --> /folder/gone\nhelp: {message}\n")
    assert "Traceback" not in said


def test_collecting_garbage_is_left_as_it_was_and_on_where_something_is_built(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer_cli.config.composing import compose
    from trainer_cli.running.build import Builder

    assert gc.isenabled()
    main(["config", "nothing=3"])
    assert gc.isenabled()
    composed = compose([])
    Builder(composed.config, composed.trust)
    assert gc.isenabled()
    gc.disable()
    try:
        main(["config"])
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(("size", "rank"), [("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")])
def test_what_one_process_does_is_refused_in_several_and_only_the_first_says_so(
    size: str, rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {size: "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for command, why in ((["validate", "ckpt=none"], "one of 2 processes"), (["fit", "-m", "seed=1,2"], "a sweep is")):
        errors = []
        for number in ("0", "1"):
            monkeypatch.setenv(rank, number)
            assert main(command) == 2
            errors.append(capsys.readouterr().err)
        assert why in errors[0]
        assert errors[1] == ""
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(size, "1")
    assert main(["fit", "digits", "nope=3"]) == 2
    assert "there is no key 'nope'" in capsys.readouterr().err


def test_a_message_before_messages_are_set_up_begins_with_its_level(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    handler = logging.lastResort
    assert handler is not None
    for level in ("warning", "error"):
        record = logging.LogRecord("trainer_cli", getattr(logging, level.upper()), "", 0, "old.yaml: %s", ("x",), None)
        assert handler.format(record) == f"{level}: old.yaml: x"


def test_docs_lists_every_page_and_prints_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    listed = capsys.readouterr().out
    for page in (ROOT / "docs").rglob("*.md"):
        assert re.search(rf"^{page.relative_to(ROOT / 'docs').with_suffix('')} ", listed, re.MULTILINE)
    assert listed.endswith(f"folder: {ROOT / 'docs'}\n")
    assert main(["docs", "moving/lightning"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs/moving/lightning.md").read_text("utf-8")


def test_torchrun_shows_a_refusal_as_the_root_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert main(["config", "digits", "sed=1"]) == 2
    assert "there is no key 'sed'" in capsys.readouterr().err
    shown = str(ChildFailedError("trainer_cli", {0: ProcessFailure(0, 1, 2, str(file))}))
    cause = shown.partition("Root Cause")[2]
    assert "traceback : there is no key 'sed' (command line). Did you mean 'seed=1'?" in cause


@pytest.mark.parametrize(
    "word", ["patience", "Metrics", "early stopping", "resume_allow", "extras", "OMP_NUM_THREADS", "scheduler_factory"]
)
def test_docs_lists_the_pages_that_mention_a_word_the_most_first(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", word]) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    folder = ROOT / "docs"
    counts = {
        page.relative_to(folder).with_suffix("").as_posix(): page.read_text("utf-8").lower().count(word.lower())
        for page in folder.rglob("*.md")
    }
    shown = [(line.split()[0], int(line.split()[1])) for line in lines]
    assert dict(shown) == {name: count for name, count in counts.items() if count}
    assert [count for _, count in shown] == sorted((count for _, count in shown), reverse=True)


def test_a_word_that_no_page_mentions_is_refused_with_the_nearest_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "own-modell"]) == 2
    error = capsys.readouterr().err
    assert "there is no page 'own-modell', and none mentions it" in error
    assert "Did you mean 'own-model'?" in error
