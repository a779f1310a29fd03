"""The command `train`: a table of verbs, and the one door where errors become messages and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ExitCode, TrainError, UserError


@dataclass(frozen=True, slots=True)
class Verb:
    """A module with `add_arguments(parser)` and `run(args) -> int`, imported only when its verb is called."""

    module: str
    summary: str


VERBS: Mapping[str, Verb] = {
    "fit": Verb("trainer_cli.cli.fit", "train, or go on where a run stopped"),
    "validate": Verb("trainer_cli.cli.validate", "evaluate every checkpoint that a glob matches"),
    "config": Verb("trainer_cli.cli.config", "print the composed config, and where each value comes from"),
    "list": Verb("trainer_cli.cli.list", "list experiments, models, data and everything else to choose from"),
}
EXAMPLES = """examples:
  train list                                        what there is
  train fit experiment=digits                       train an experiment
  train fit experiment=digits optimizer.lr=0.01     with a change
  train validate ckpt='runs/digits/checkpoints/*'   evaluate all its checkpoints"""


# No fault of ours, and nothing that a traceback would explain: a full disk, a quota, a file grown too large.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints leave by the same door as all others."""

    def error(self, message: str) -> NoReturn:
        """Complain by an exception instead of ending the process."""
        raise UserError(message, cure=f"See {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. Mistakes of the user become one message on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except TrainError as error:
        if _wants_all():
            traceback.print_exc()
        print(f"train: error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("train: interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        return _reader_gone()
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL and not _wants_all():
            where = f" ({error.filename})" if error.filename else ""
            print(f"train: error: {error.strerror}{where}. What was committed before is intact.", file=sys.stderr)
        else:
            traceback.print_exc()
        return int(ExitCode.FAILED)


def _wants_all() -> bool:
    return os.environ.get("TRAIN_FULL_ERROR", "") not in ("", "0")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """What every verb takes that composes a config."""
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


def _dispatch(arguments: list[str]) -> int:
    if sys.platform == "win32":
        raise UserError(
            "Windows is not supported: files cannot be locked and replaced there as training safely needs",
            cure="Use WSL: https://learn.microsoft.com/windows/wsl/install",
        )
    word = arguments[0] if arguments else "--help"
    if word in ("-h", "--help", "help"):
        print(_overview())
        return int(ExitCode.DONE if arguments else ExitCode.USER)
    if word in ("-V", "--version"):
        print(_version())
        return int(ExitCode.DONE)
    verb = VERBS.get(word)
    if verb is None:
        raise _no_verb(word, arguments)
    module = import_module(verb.module)
    summary = verb.summary[0].upper() + verb.summary[1:] + "."
    parser = Parser(prog=f"train {word}", description=summary, allow_abbrev=False)
    module.add_arguments(parser)
    try:
        parsed = parser.parse_intermixed_args(arguments[1:])
    except SystemExit as stop:  # --help
        return _code(stop.code)
    return _code(module.run(parsed))


def _code(value: Any) -> int:
    return value if isinstance(value, int) else int(ExitCode.DONE if value is None else ExitCode.FAILED)


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:{width}}  {verb.summary}" for name, verb in VERBS.items())
    return (
        "usage: train VERB [OVERRIDE ...] [FLAGS]\n\n"
        f"Train PyTorch models from YAML, and resume exactly.\n\nverbs:\n{verbs}\n\n{EXAMPLES}\n\n"
        "`train VERB --help` tells more; `train --version` the version."
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"train {version('trainer-cli')}"
    except PackageNotFoundError:
        return "train (not installed)"


def _no_verb(word: str, arguments: Sequence[str]) -> UserError:
    if "=" in word:
        return UserError(
            f"{word!r} stands where a verb belongs", cure=f"Did you mean 'train fit {' '.join(arguments)}'?"
        )
    cure = did_you_mean(word, VERBS).strip() or f"There are: {', '.join(VERBS)}."
    return UserError(f"there is no verb {word!r}", cure=cure)


def _reader_gone() -> int:
    """The reader of our output closed it (`train list | head -1`): say no more, and fail quietly."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(ExitCode.FAILED)
