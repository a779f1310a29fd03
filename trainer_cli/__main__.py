"""The entry point of the command `train`, and of `python -m trainer_cli`."""

import os
import sys

from trainer_cli.runs.signals import exit_early

_TRAINING = ("fit", "_job")


def main() -> int:
    """Run the command line and return its exit code.

    Before anything else is imported, signals are made to end a training with 75. A signal that comes while Python
    itself starts, in the first hundredths of a second, still kills the process.
    """
    if sys.argv[1:2] == ["_fork_server"]:
        from trainer_cli.runs.fork_server import serve

        # Returns in each fork, as the process of another command.
        serve(int(sys.argv[2]))
    # Before the imports below, which take a second in which a scheduler may already send its signal.
    if sys.argv[1:2] and sys.argv[1] in _TRAINING:
        exit_early()
    from trainer_cli.commands.main import main

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
