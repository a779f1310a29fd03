"""How errors are printed: what is wrong, `-->` where, `help:` with the cure; in colour on a terminal."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

from trainer_cli.errors import ConfigErrors, TrainError
from trainer_cli.terminal import painted

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
