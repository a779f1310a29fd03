"""The entry point of the command `train`, and of `python -m trainer_cli`."""

import atexit
import contextlib
import os
import sys

from trainer_cli.signals import exit_early, keep_exit_code

_TRAINING = ("fit", "_job")


def main() -> int:
    """Run the command line and return its exit code.

    Before anything else is imported, signals are made to end a training with 75. A signal that comes while Python
    itself starts, in the first hundredths of a second, still kills the process.
    """
    if sys.argv[1:2] == ["_fork_server"]:
        # This comes before the imports register theirs: exit handlers run from the last to the first.
        atexit.register(_end_fork)
        from trainer_cli.fit_parts import SERVE_FORKS

        global _fork_code, _report, _server
        # Returns in each fork, as the process of another command.
        _report, _server = SERVE_FORKS.need("_fork_server")(sys.argv[2:])
        _fork_code = _run()
        return _fork_code
    return _run()


_fork_code: int | None = None
"""With what this fork of a server ends, once its command has returned."""
_report = _server = -1
"""In a fork: the descriptor by which the server reports how it ends, and the process number of the server."""


def _end_fork() -> None:
    """The last exit handler of a fork, whose threads have ended. It completes open files, and ends the process.

    The interpreter would take all modules apart, in memory that it shares with the server: a quarter of a second of
    copying. After an exception it does.
    """
    if _fork_code is None:
        return
    import ctypes
    import gc
    import io
    import zipfile

    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, io.IOBase | zipfile.ZipFile)}
    files = [file for file in objects if type(file) in kinds]
    # From the outer to the inner: a text may be written into a gzip file, and that into a buffer.
    ends = [file.flush for file in files if isinstance(file, io.TextIOWrapper)]
    # Files written in Python have an end of their own, such as a checksum or a table of contents.
    ends += [file.close for file in files if type(file).__module__ != "_io"]
    ends += [file.flush for file in files if isinstance(file, io.BufferedWriter | io.BufferedRandom)]
    for end in ends:
        # It is closed, or its reader is gone: the interpreter would pass over it, too.
        with contextlib.suppress(Exception):
            end()
    # What libraries in C have printed.
    ctypes.CDLL(None).fflush(None)
    if os.getppid() != _server:
        # The server is gone. Without a report the fork would be taken for killed.
        with contextlib.suppress(OSError):
            os.write(_report, _fork_code.to_bytes(4, sys.byteorder, signed=True))
    os._exit(_fork_code)


def _run() -> int:
    """Run the command line; the exit code."""
    # The signals are handled before the imports below, which take a second in which a scheduler may send one.
    if sys.argv[1:2] and sys.argv[1] in _TRAINING:
        exit_early()
        # What is registered first is called last, after all threads have ended.
        atexit.register(keep_exit_code)
    from trainer_cli.commands import main

    return main()


def _search_current_folder_last() -> None:
    """Let no module in the current folder, which `python -m` searches first, hide one that this program imports."""
    package = os.path.dirname(os.path.abspath(__file__))
    # With -P, Python has not put the current folder in front.
    if not sys.flags.safe_path and sys.path[:1] != [os.path.dirname(package)]:
        sys.path.append(sys.path.pop(0))


if __name__ == "__main__":
    _search_current_folder_last()
    sys.exit(main())
