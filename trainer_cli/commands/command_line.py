"""The command `train`: the table of verbs, the parsing of arguments, and errors as messages and exit codes."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import gc
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from trainer_cli.addon import Verb, add_verbs, find_verb
from trainer_cli.commands.streams import prepare_streams
from trainer_cli.errors import (
    DISK_CURES,
    NO_SPACE,
    OF_ONE_FILE,
    ExitCode,
    TrainError,
    UserError,
    disk_cure,
    forget_secrets,
    raise_all,
    without_secrets,
)
from trainer_cli.gc_pause import gc_paused
from trainer_cli.patterns import did_you_mean
from trainer_cli.terminal import (
    LOADING_TORCH,
    begin_answer,
    clear_status,
    columns,
    is_answered,
    painted,
    show_status,
    with_headings,
    wrapped_help,
)

VERBS: Mapping[str, Verb] = {
    "fit": Verb("trainer_cli.commands.fit", "train, or resume where a run stopped", loads_torch=True),
    "validate": Verb(
        "trainer_cli.commands.validate", "evaluate every checkpoint that a glob matches", loads_torch=True
    ),
    "plan": Verb(
        "trainer_cli.commands.plan", "show what a fit would do: steps, evaluations, checkpoints, disk", loads_torch=True
    ),
    "top": Verb("trainer_cli.commands.top", "show all runs below a folder, live: state, step, rate, loss, time left"),
    "tail": Verb("trainer_cli.commands.tail", "show the last log lines and metrics of a run, and follow them"),
    "check": Verb(
        "trainer_cli.commands.check", "check data, model, resume and runs: before the first step, and after the last"
    ),
    "config": Verb("trainer_cli.commands.config", "print the composed config, and where each value comes from"),
    "ckpt": Verb("trainer_cli.commands.ckpt", "handle checkpoints: ls, show, verify, diff, pin, rm, prune, export"),
    "list": Verb("trainer_cli.commands.list", "list the experiments, models, data and other options"),
    "new": Verb("trainer_cli.commands.new", "create a project: model, data, configs and tests that run"),
    "docs": Verb("trainer_cli.commands.docs", "list the pages of the documentation, or print one"),
    "env": Verb("trainer_cli.commands.env", "show versions, devices and paths, for a bug report", loads_torch=True),
    "complete": Verb("trainer_cli.commands.complete", "print the completion script for bash or zsh"),
}
"""The verbs that do not come from add-ons."""
EXAMPLES = """examples:
  train list                                        what there is
  train fit digits                                  train an experiment
  train fit digits optimizer.lr=0.01                with a change
  train validate ckpt='runs/digits/checkpoints/*'   evaluate all its checkpoints
  train new mine                                    begin a project of your own"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are raised as UserError."""

    def format_help(self) -> str:
        """The help, with bold headings on a terminal."""
        return with_headings(super().format_help(), sys.stdout)

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of ending the process, with an example or the nearest choice."""
        cure = f"See {self.prog} --help."
        missing = message.removeprefix("the following arguments are required: ")
        # An example that begins with a positional argument.
        example = re.search(rf"^  ({self.prog} [^-\n].*?)( {{2,}}|$)", self.epilog or "", re.M)
        if missing != message and example:
            message, cure = f"{self.prog} needs {missing}", f"For example: {example[1]}"
        elif choice := re.search(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message):
            flag, word, listed = choice.groups()
            names = re.findall(r"[^', ]+", listed)
            message = f"{flag} is {word!r}, but it must be one of {', '.join(names)}"
            cure = did_you_mean(word, names).strip() or cure
            if flag == "--format" and word.startswith("on"):
                from trainer_cli.commands.choices import ONNX

                cure = ONNX
        elif "not allowed with" in message:
            cure = "Leave one of them out."
        raise UserError(message, cure=cure)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """The flags that a word abbreviates; none if there are several: then `-c` is an unknown flag, not ambiguous."""
        matches = super()._get_option_tuples(option_string)
        return matches if len(matches) < 2 else []


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps examples and paragraphs at words, as argparse does the texts of flags."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap a description or epilog."""
        return wrapped_help(text, width)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. Mistakes of the user become one message on stderr."""
    # This comes first: what follows may print, or open a file that would get the number of a closed stream.
    prepare_streams()
    # A program may call this for several commands: each has its own secrets.
    forget_secrets()
    begin_answer()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        # Only for the command itself: a program that calls main() continues afterwards.
        atexit.register(_at_exit)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except TrainError as error:
        # Imported here, as below: most commands end without an error.
        from trainer_cli.commands.print_errors import print_error, record_for_torchrun

        print_error(error, whole=_wants_traceback())
        record_for_torchrun(error)
        return _fail(arguments, error, error.exit_code)
    except KeyboardInterrupt as interrupt:
        clear_status()
        print("interrupted", *getattr(interrupt, "__notes__", ()), sep="\n", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has what it wanted: neither a mistake of the user nor a fault of ours.
        return _error_code(arguments, _reader_closed())
    except Exception as error:
        from trainer_cli.commands.print_errors import print_crash, print_error

        if _is_disk_error(error) and not _wants_traceback():
            cure = f"What was committed before is intact. {disk_cure(error)}"
            print_error(TrainError(error.strerror or str(error), where=error.filename, cure=cure))
            # A name that is too long was chosen by the user, at least in part.
            code = ExitCode.USER if error.errno == errno.ENAMETOOLONG else ExitCode.FAILED
            return _fail(arguments, error, code)
        print_crash(error, whole=_wants_traceback())
        return _fail(arguments, error, ExitCode.FAILED)


def _fail(arguments: Sequence[str], error: Exception, exit_code: int) -> int:
    """The exit code of an error, which is the answer of `--json` if none was printed before."""
    code = _error_code(arguments, exit_code)
    if "--json" in arguments and not is_answered():
        from trainer_cli.commands.print_errors import print_json_error

        print_json_error(error, code)
    return code


def _error_code(arguments: Sequence[str], code: int) -> int:
    """The exit code of an error: of a verb whose own exit codes are answers it is another one."""
    verb = find_verb(arguments[0]) if arguments and code < ExitCode.STOPPED_EARLY else None
    return int(code) + (0 if verb is None else verb.error_offset)


def _is_disk_error(error: Exception) -> TypeGuard[OSError]:
    """Whether an error needs no traceback: the disk is full, or a file of ours cannot be written."""
    if not isinstance(error, OSError) or error.errno not in DISK_CURES:
        return False
    from trainer_cli.commands.print_errors import is_without_user_code

    # Such an error may come from code of the user, whose line the traceback shows.
    if error.errno in OF_ONE_FILE and not is_without_user_code(error.__traceback__):
        return False
    return error.errno in NO_SPACE or error.filename is not None


def _at_exit() -> None:
    """Skip the interpreter's last garbage collection, unless torch is loaded: it takes as long as a fast verb."""
    if "torch" not in sys.modules:
        gc.freeze()


def _wants_traceback() -> bool:
    """Whether the user asks for whole tracebacks, by TRAIN_FULL_ERROR."""
    return os.environ.get("TRAIN_FULL_ERROR", "") not in ("", "0")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every verb that composes a config."""
    add_overrides(parser, "key=value, group=option, +key=value, ~key")
    add_config_dir(parser)
    parser.add_argument("-cn", "--config-name", metavar="NAME", default="config", help="primary config (config)")


def add_overrides(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the overrides of a config, with this text in the help."""
    # Without the default, argparse would list it among the missing arguments.
    parser.add_argument("overrides", nargs="*", default=[], metavar="OVERRIDE", help=text)


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names a folder of configs."""
    parser.add_argument(
        "-cd",
        "--config-dir",
        metavar="DIR",
        type=Path,
        help="search this folder before ./configs and the shipped one",
    )


def add_job_limits(parser: argparse.ArgumentParser, default: str, *, when: str = "") -> None:
    """Add the flags that say how many jobs run at a time, and on which devices.

    Args:
        default: how many run without them.
        when: the beginning of their help, for a verb that does not always take them.
    """
    at_once, own_device = "number of runs at a time", "give each run a GPU of its own: 0,2, UUIDs, or all"
    parser.add_argument("--jobs", type=int, metavar="N", help=f"{when}{at_once} ({default})")
    parser.add_argument("--devices", metavar="LIST", help=f"{when}{own_device}")
    parser.add_argument("--jobs-per-device", type=int, metavar="K", help=f"{when}{at_once} on one GPU (1)")


def add_allow_pickle(parser: argparse.ArgumentParser) -> None:
    """Add the flag that allows files to run code when they are loaded."""
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="load a ckpt= of another program even if it can run any code: only for files that you trust",
    )


def add_no_replay(parser: argparse.ArgumentParser) -> None:
    """Add the flag that refuses checkpoints which would have to be computed."""
    parser.add_argument(
        "--no-replay",
        action="store_true",
        help="refuse RUN@stepN if there is no checkpoint of that step, instead of computing it",
    )


_SUPERVISED = "--supervised"
"""Argument of a child process that ends with its parent."""


def _dispatch(arguments: list[str]) -> int:
    """Find the verb, parse its arguments and run it. Returns the exit code.

    What was parsed has `as_child` beside the arguments: the words by which a child process does the same, and ends with
    this one; and `supervised`: whether this is such a process.

    Raises:
        UserError: there is no such verb, or an argument is wrong.
    """
    if sys.platform == "win32":
        raise UserError(
            "Windows is not supported: files cannot be locked and replaced there as training safely needs",
            cure="Use WSL: https://learn.microsoft.com/windows/wsl/install",
        )
    word, words = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if word == "help" and words:
        word, words = words[0], [*words[1:], "--help"]
    if word in ("-h", "--help", "help"):
        print(_overview())
        return int(ExitCode.DONE if arguments else ExitCode.USER)
    if word in ("-V", "--version"):
        print(_version())
        return int(ExitCode.DONE)
    asks_help = not {"-h", "--help"}.isdisjoint(words)
    # Before any import, which would fail with a traceback if the current folder no longer exists.
    if not asks_help:
        _refuse_missing_folder()
    verb = VERBS.get(word) or find_verb(word)
    if verb is None:
        _refuse_missing_folder()
        from trainer_cli.commands.choices import no_verb

        raise no_verb(word, arguments, listed_verbs())
    if not {"-h", "--help"}.isdisjoint(words[:-1]):
        from trainer_cli.commands.choices import wants_help_on

        if (error := wants_help_on(words)) is not None:
            raise error
    if is_supervised := _SUPERVISED in words:
        from trainer_cli.processes import stop_with_parent

        words.remove(_SUPERVISED)
        # Before the imports, which take seconds: the parent may be killed during them.
        stop_with_parent()
    if verb.loads_torch and not asks_help:
        # The jobs of a sweep load torch, in processes of their own, after all their configs are checked.
        show_status(LOADING_TORCH if {"-m", "--multirun"}.isdisjoint(words) else "checking the jobs …")
    with gc_paused():
        # Only the verb's own module: each imports what it needs, and the help of others waits for nothing.
        module = import_module(verb.module)
    parser = parser_of(word, verb)
    try:
        parsed = _parse(parser, word, getattr(module, "before_parsing", list)(words))
    except SystemExit as stop:
        # argparse raises it after --help.
        return _exit_code(stop.code)
    parsed.supervised, parsed.as_child = is_supervised, [word, _SUPERVISED, *words]
    _name_levels()
    return _exit_code(module.run(parsed))


def _name_levels() -> None:
    """Begin messages that are logged before `to_console`, or in verbs without it, with their level."""
    # Imported here, so that the help of a verb does not wait for it.
    import logging

    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"{record.levelname.lower()}: {without_secrets(super().format(record))}"

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Formatter())


def _refuse_missing_folder() -> None:
    """Raise UserError if the current folder was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        cure = 'Change to another folder, or, if it was recreated: cd "$PWD".'
        raise UserError("the current folder no longer exists", where=os.environ.get("PWD"), cure=cure) from None


def listed_verbs() -> dict[str, Verb]:
    """The verbs of `train`, with those of add-ons."""
    return {name: verb for name, verb in add_verbs(VERBS).items() if verb.summary}


def parser_of(word: str, verb: Verb) -> Parser:
    """The parser of a verb."""
    module = import_module(verb.module)
    parser = Parser(
        prog=f"train {word}",
        description=f"{verb.summary[:1].upper()}{verb.summary[1:]}.",
        epilog=getattr(module, "EXAMPLES", None),
        formatter_class=_HelpFormatter,
        # An abbreviation would change its meaning with the next flag that is added.
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser


def actions_of(parser: argparse.ArgumentParser) -> Mapping[str, Parser]:
    """Name -> parser of each action of a verb; most verbs have no actions."""
    subparsers = _find_subparsers(parser)
    return {} if subparsers is None else subparsers.choices


def _find_subparsers(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[Parser] | None:
    return next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)


def _parse(parser: Parser, verb: str, words: list[str]) -> argparse.Namespace:
    """Parse the arguments of a verb, or of the action that the first word names.

    Raises:
        UserError: an argument is unknown or missing; it names the nearest known one.
    """
    actions = actions_of(parser)
    # Without add-ons a verb may have no action left.
    has_actions = _find_subparsers(parser) is not None
    if has_actions and words[:1] not in (["-h"], ["--help"]):
        if not words or words[0] not in actions:
            from trainer_cli.commands.choices import no_action

            raise no_action(verb, words, actions)
        verb, parser, words = f"{verb} {words[0]}", actions[words[0]], words[1:]
    # argparse cannot parse actions intermixed; only --help gets here with them.
    has_actions = _find_subparsers(parser) is not None
    parse = parser.parse_known_args if has_actions else parser.parse_known_intermixed_args
    parsed, unknown = parse(words)
    takes_overrides = hasattr(parsed, "overrides")
    if any(word.startswith("-") for word in unknown):
        from trainer_cli.commands.choices import wrong_flags

        unknown_flags = [word.partition("=")[0] for word in unknown]
        owners = {
            flag: [action for action, subparser in actions.items() if flag in subparser._option_string_actions]
            for flag in unknown_flags
        }
        flags = parser._option_string_actions
        raise_all(wrong_flags(unknown, words, flags, verb=verb, owners=owners, parsed=parsed))
    if any(word.startswith("load.average=") for word in unknown) and "--ema" in parser._option_string_actions:
        raise UserError(f"train {verb} takes no key load.average", cure="Write --ema none for the trained weights.")
    if unknown and verb in ("top", "tail"):
        from trainer_cli.commands.choices import several_runs

        # Without flags, which the verbs of the hint lack.
        raise several_runs(verb, [str(parsed.dir if verb == "top" else parsed.run_dir), *unknown])
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_overrides and not all("=" in word or word.startswith("~") for word in parsed.overrides):
        from trainer_cli.commands.choices import experiment_by_name, stray_word

        parsed.overrides = experiment_by_name(parsed.overrides, parsed.config_dir)
        has_config_name = hasattr(parsed, "config_name")
        # A run beside `--diff` is the other one.
        verb = verb if getattr(parsed, "diff", None) is None else "diff"
        error = stray_word(parsed.overrides, verb=verb, config_dir=parsed.config_dir, has_config_name=has_config_name)
        if error is not None:
            raise error
    return parsed


def _exit_code(value: Any) -> int:
    """The exit code of what a verb returned or argparse exited with: a number, None for success, or a message."""
    if isinstance(value, int):
        return value
    return int(ExitCode.DONE if value is None else ExitCode.FAILED)


def _overview() -> str:
    """The help of `train` itself."""
    verbs = listed_verbs()
    name_width, width = max(map(len, verbs)), columns(sys.stdout)
    rows = []
    for name, verb in verbs.items():
        row = f"  {name:{name_width}}  {verb.summary}"
        wrapped_row = textwrap.fill(row, width, subsequent_indent=" " * (name_width + 4))
        rows.append(wrapped_row.replace(name, painted(name, "bold", sys.stdout), 1))
    listed = "\n".join(rows)
    return with_headings(
        "usage: train VERB [OVERRIDE ...] [FLAGS]\n\n"
        f"{wrapped_help('Train PyTorch models from YAML, and resume exactly.', width)}\n\n"
        f"verbs:\n{listed}\n\n{wrapped_help(EXAMPLES, width)}\n\n"
        f"{wrapped_help('`train VERB --help` for more; `train --version` for the version.', width)}",
        sys.stdout,
    )


def _version() -> str:
    """The name and version of the program."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"train {version('trainer-cli')}"
    except PackageNotFoundError:
        return "train (not installed)"


def _reader_closed() -> int:
    """Fail without a message when the reader of our output has closed it (`train list | head -1`)."""
    # The interpreter flushes stdout at exit, and would report the broken pipe.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(ExitCode.FAILED)
