"""The command `train`: a table of verbs, and the place where errors become messages and exit codes.

Prepare the standard streams: none is closed, none fails at a letter, and a terminal may be closed meanwhile.

How errors are printed: what is wrong, `-->` where, `help:` with the cure; in colour on a terminal.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import gc
import io
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeGuard

from trainer_cli.core.gc_pause import gc_paused
from trainer_cli.errors import DISK_CURES, NO_SPACE, ConfigErrors, ExitCode, TrainError, UserError, disk_cure
from trainer_cli.terminal import painted


def prepare_streams() -> None:
    """Prepare stdin, stdout and stderr for a verb."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _opened(mode))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            if stream.errors == "strict" or (stream.errors == "surrogateescape" and not _is_utf8(stream)):
                # A name beyond what the stream can encode must not end a training at its last line.
                stream.reconfigure(errors="replace")
            if stream.isatty():
                setattr(sys, name, _until_closed(stream))


def _is_utf8(stream: io.TextIOWrapper) -> bool:
    return stream.encoding.lower().replace("-", "") == "utf8"


def _opened(mode: str) -> io.TextIOWrapper:
    """The stream for one that the caller closed (`>&-`), on /dev/null.

    Otherwise the next opened file, perhaps a checkpoint, would get its number, and prints would go there.
    """
    number = os.open(os.devnull, os.O_RDWR)  # The lowest that is free: the stream's own.
    os.set_inheritable(number, True)
    stream: io.TextIOWrapper = os.fdopen(number, mode, encoding="utf-8", closefd=False)  # type: ignore[assignment]
    return stream


def _until_closed(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream to the same terminal that discards what is written after it was closed."""
    stream.flush()
    try:
        raw = _Terminal(stream.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:
        return stream  # no file of the system
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering
    )


class _Terminal(io.FileIO):
    """A terminal. Once it is closed each write fails with EIO; the run then saves and ends by SIGHUP."""

    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes  # type: ignore[arg-type]


_OURS = ("trainer_cli", "hydra", "omegaconf")
"""This package, and those that only this one calls, so that an error within them is a fault of ours as well."""
_CALLS_OF_MODULES = ("_wrapped_call_impl", "_call_impl")


def print_error(error: TrainError) -> None:
    """Print an error to stderr; several mistakes one after the other, with their number."""
    mistakes = error.mistakes if isinstance(error, ConfigErrors) else (error,)
    blocks = ["\n".join(_lines(one)) for one in mistakes]
    if len(mistakes) > 1:
        blocks.append(f"Found {len(mistakes)} mistakes.")
    print("\n\n".join(blocks), file=sys.stderr)


def _lines(error: TrainError) -> Iterator[str]:
    yield f"{painted('error:', 'red', sys.stderr)} {error.what.rstrip()}"
    if error.place:
        yield f"  {painted('-->', 'blue', sys.stderr)} {error.place}"
    if error.cure:
        yield f"{painted('help:', 'cyan', sys.stderr)} {error.cure}"


def print_crash(error: BaseException, *, whole: bool = False) -> None:
    """Print an error that is no TrainError with its traceback, and what to do if it is a fault of this program.

    Unless `whole`, the traceback begins in the first code that is not this program's, in most cases the user's, and
    leaves out the two functions by which torch calls each module.
    """
    begin = None if whole else _first_of_others(error.__traceback__)
    found = traceback.TracebackException(type(error), error, begin or error.__traceback__)
    if begin is not None:
        found.stack = traceback.StackSummary.from_list(
            [one for one in found.stack if one.name not in _CALLS_OF_MODULES]
        )
        print("Calls within train and torch are left out; TRAIN_FULL_ERROR=1 shows them.", file=sys.stderr)
    print("".join(found.format()), end="", file=sys.stderr)
    if _is_ours(error.__traceback__):
        print_error(
            TrainError(
                "this is a fault of train, not of your config or code",
                cure="Please report it, with the traceback above and the output of `train env`.",
            )
        )


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether an error was raised by this package, rather than by a user's code or a library that it called."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return _package(trace) in _OURS


def _first_of_others(trace: TracebackType | None) -> TracebackType | None:
    """The first call of code that is neither ours nor torch's, which calls modules by several functions of its own."""
    while trace is not None and _package(trace) in (*_OURS, "torch", "__main__"):
        trace = trace.tb_next
    return trace


def _package(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]


class Verb(NamedTuple):
    """A module with `EXAMPLES`, `add_arguments(parser)` and `run(args) -> int`, imported only when called.

    It may have `before_parsing(words)`, which returns the words of the command line as argparse is to read them.
    """

    module: str
    summary: str


VERBS: Mapping[str, Verb] = {
    "fit": Verb("trainer_cli.commands.fit", "train, or resume where a run stopped"),
    "validate": Verb("trainer_cli.commands.validate", "evaluate every checkpoint that a glob matches"),
    "plan": Verb("trainer_cli.commands.plan", "show what a fit would do: steps, evaluations, checkpoints, disk"),
    "top": Verb("trainer_cli.commands.top", "show all runs below a folder, live: state, step, rate, loss, time left"),
    "tail": Verb("trainer_cli.commands.tail", "show the last log lines and metrics of a run, and follow them"),
    "report": Verb("trainer_cli.commands.report", "write runs into one HTML file: curves, checkpoints, config, sweeps"),
    "check": Verb("trainer_cli.commands.check", "check that a stopped and resumed training equals one without a stop"),
    "config": Verb("trainer_cli.commands.config", "print the composed config, and where each value comes from"),
    "ckpt": Verb("trainer_cli.commands.ckpt", "list, show, verify, compare, pin, remove, prune and export checkpoints"),
    "list": Verb("trainer_cli.commands.list", "list experiments, models, data and everything else to choose from"),
    "new": Verb("trainer_cli.commands.new", "make a project of your own: model, data, configs and tests that run"),
    "env": Verb("trainer_cli.commands.env", "show versions, devices and paths, for a bug report"),
    "complete": Verb("trainer_cli.commands.complete", "print what makes your shell complete commands: bash or zsh"),
}
_INTERNAL = {"_job": Verb("trainer_cli.commands.job", "run a job of a sweep")}
"""Verbs that `train` starts itself with; neither listed nor suggested."""
EXAMPLES = """examples:
  train list                                        what there is
  train fit +experiment=digits                      train an experiment
  train fit +experiment=digits optimizer.lr=0.01    with a change
  train validate ckpt='runs/digits/checkpoints/*'   evaluate all its checkpoints
  train new mine                                    begin a project of your own"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are raised as UserError."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process."""
        raise UserError(message, cure=f"See {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. Mistakes of the user become one message on stderr."""
    prepare_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        atexit.register(_at_exit)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except TrainError as error:
        if _wants_traceback():
            traceback.print_exc()
        print_error(error)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        return _reader_closed()
    except Exception as error:
        if _is_disk_error(error) and not _wants_traceback():
            cure = f"What was committed before is intact. {disk_cure(error)}"
            print_error(TrainError(error.strerror or str(error), where=error.filename, cure=cure))
        else:
            print_crash(error, whole=_wants_traceback())
        return int(ExitCode.FAILED)


def _is_disk_error(error: Exception) -> TypeGuard[OSError]:
    """Whether an error needs no traceback: the disk is full, or a file cannot be written."""
    if not isinstance(error, OSError) or error.errno not in DISK_CURES:
        return False
    return error.errno in NO_SPACE or error.filename is not None


def _at_exit() -> None:
    """Skip the interpreter's last garbage collection if torch is not loaded: it takes as long as a fast answer."""
    if "torch" not in sys.modules:
        gc.freeze()


def _wants_traceback() -> bool:
    return os.environ.get("TRAIN_FULL_ERROR", "") not in ("", "0")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every verb that composes a config."""
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="key=value, group=option, +key=value, ~key")
    add_config_dir(parser)
    parser.add_argument("-cn", "--config-name", metavar="NAME", default="config", help="primary config (config)")


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """The flag that names a folder of configs."""
    parser.add_argument(
        "-cd",
        "--config-dir",
        metavar="DIR",
        type=Path,
        help="search this folder before ./configs and the shipped one",
    )


def add_allow_pickle(parser: argparse.ArgumentParser) -> None:
    """The flag that allows files to run code when they are loaded."""
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="load a ckpt= of another program even if it can run any code: only for files that you trust",
    )


def _dispatch(arguments: list[str]) -> int:
    if sys.platform == "win32":
        raise UserError(
            "Windows is not supported: files cannot be locked and replaced there as training safely needs",
            cure="Use WSL: https://learn.microsoft.com/windows/wsl/install",
        )
    word, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if word == "help" and rest:
        word, rest = rest[0], [*rest[1:], "--help"]
    if word in ("-h", "--help", "help"):
        print(_overview())
        return int(ExitCode.DONE if arguments else ExitCode.USER)
    if word in ("-V", "--version"):
        print(_version())
        return int(ExitCode.DONE)
    if {"-h", "--help"}.isdisjoint(rest):
        _refuse_missing_folder()
    verb = {**VERBS, **_INTERNAL}.get(word)
    if verb is None:
        from trainer_cli.commands.choices import no_verb

        raise no_verb(word, arguments, VERBS)
    with gc_paused():
        module = import_module(verb.module)
    parser = parser_of(word, module)
    try:
        parsed = _parsed(parser, word, getattr(module, "before_parsing", list)(rest))
    except SystemExit as stop:  # --help
        return _code(stop.code)
    return _code(module.run(parsed))


def _refuse_missing_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        cure = 'Change to another folder, or, if it was made again: cd "$PWD".'
        raise UserError("the current folder is gone", where=os.environ.get("PWD"), cure=cure) from None


def parser_of(word: str, module: Any) -> Parser:
    """The parser of a verb, whose module is imported already."""
    summary = {**VERBS, **_INTERNAL}[word].summary
    parser = Parser(
        prog=f"train {word}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=getattr(module, "EXAMPLES", None),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser


def actions_of(parser: argparse.ArgumentParser) -> Mapping[str, Parser]:
    """The parsers of a verb's actions, by name; none for most verbs."""
    return next((one.choices for one in parser._actions if isinstance(one, argparse._SubParsersAction)), {})


def _parsed(parser: Parser, word: str, rest: list[str]) -> argparse.Namespace:
    """The arguments of a verb, or of the action that the first of them names.

    Raises:
        UserError: an argument that it does not take, with the nearest that it does.
    """
    actions = actions_of(parser)
    if actions and rest[:1] not in (["-h"], ["--help"]):
        if not rest or rest[0] not in actions:
            from trainer_cli.commands.choices import no_action

            raise no_action(word, rest, actions)
        word, parser, rest = f"{word} {rest[0]}", actions[rest[0]], rest[1:]
    # argparse cannot parse actions intermixed; only --help gets here with them.
    parse = parser.parse_known_args if actions_of(parser) else parser.parse_known_intermixed_args
    parsed, unknown = parse(rest)
    flag = next((one for one in unknown if one.startswith("-")), None)
    takes_overrides = hasattr(parsed, "overrides")
    if flag is not None:
        from trainer_cli.commands.choices import no_flag

        owners = [name for name, one in actions.items() if flag.partition("=")[0] in one._option_string_actions]
        raise no_flag(flag, rest, parser._option_string_actions, verb=word, overrides=takes_overrides, owners=owners)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_overrides and not all("=" in one or one.startswith("~") for one in parsed.overrides):
        from trainer_cli.commands.choices import experiment_by_name, stray_word

        parsed.overrides = experiment_by_name(parsed.overrides, parsed.config_dir)
        stray = stray_word(parsed.overrides, verb=word, config_dir=parsed.config_dir)
        if stray is not None:
            raise stray
    return parsed


def _code(value: Any) -> int:
    return value if isinstance(value, int) else int(ExitCode.DONE if value is None else ExitCode.FAILED)


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:{width}}  {verb.summary}" for name, verb in VERBS.items())
    return (
        "usage: train VERB [OVERRIDE ...] [FLAGS]\n\n"
        f"Train PyTorch models from YAML, and resume exactly.\n\nverbs:\n{verbs}\n\n{EXAMPLES}\n\n"
        "`train VERB --help` for more; `train --version` for the version."
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"train {version('trainer-cli')}"
    except PackageNotFoundError:
        return "train (not installed)"


def _reader_closed() -> int:
    """The reader of our output closed it (`train list | head -1`): fail without a message."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(ExitCode.FAILED)
