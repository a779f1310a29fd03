"""The process behind `forks.Forks`: imports everything, then becomes each command that it is asked for.

It says `ready`, then takes a line of JSON for each command, and answers with a line that is its exit code.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import numpy

_MODULES = (
    "numpy.random", "rich.console", "rich.table", "safetensors.torch", "tomllib", "torch.utils.data",
    "torch.utils.tensorboard", "tensorboard.plugins.hparams.summary_v2", "tensorboard.plugins.mesh.metadata",
    "tensorboard.plugins.graph.metadata", "tensorboard.backend.event_processing.event_file_loader",
    "trainer_cli.callbacks.checkpointer", "trainer_cli.checkpoint.export", "trainer_cli.commands.ckpt",
    "trainer_cli.commands.ckpt_inspect", "trainer_cli.commands.ckpt_remove", "trainer_cli.commands.fit",
    "trainer_cli.runs.validate", "trainer_cli.config.sweep", "trainer_cli.data.datasets",
    "trainer_cli.loggers.console", "trainer_cli.loggers.tensorboard", "trainer_cli.loggers.tensorboard_files",
    "trainer_cli.models.mlp", "trainer_cli.parallel.strategy", "trainer_cli.runs.build", "trainer_cli.runs.export",
    "trainer_cli.runs.fit", "trainer_cli.runs.plan", "trainer_cli.runs.validate", "trainer_cli.trainer.trainer",
)  # fmt: skip
"""What the commands import."""


def serve() -> None:
    """Answer until stdin ends."""
    import torch

    for module in _MODULES:
        import_module(module)

    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        for module in asked["imports"]:
            import_module(module)
        composed = _composed(tuple(asked["argv"][1:])) if asked["disk"] is not None else None
        pid = os.fork()
        if pid == 0:
            _become(asked, composed)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


@cache
def _composed(overrides: tuple[str, ...]) -> Any:
    """The config of many equal commands, composed once: it would take most of their time."""
    from trainer_cli.runs.compose_fit import compose_fit

    return compose_fit(overrides)


def _become(asked: Mapping[str, Any], composed: Any) -> None:
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{asked['out']}/{name}", os.O_RDWR | os.O_CREAT), number)
    os.chdir(asked["cwd"])
    os.environ.update(asked["env"])
    numpy.random.seed()  # As a new process does.
    sys.argv = ["train", *asked["argv"]]
    disk = None if asked["disk"] is None else _put_in(asked["disk"])
    code = 70
    try:
        from trainer_cli.commands.main import main

        if composed is not None:
            import trainer_cli.runs.fit

            trainer_cli.runs.fit.compose_fit = lambda *_, **__: composed
        code = main(asked["argv"])
        if disk is not None:
            with open(f"{asked['out']}/operations", "w", encoding="utf-8") as file:
                file.writelines(f"{operation}\n" for operation in disk.operations)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _put_in(arguments: Mapping[str, Any]) -> Any:
    """Have one faulty disk under every storage of checkpoints in this process."""
    from trainer_cli.checkpoint.storage import local
    from trainer_cli.testing.faults import Fault, FaultyDisk

    arguments = dict(arguments)
    if "fault" in arguments:
        arguments["fault"] = Fault(arguments["fault"])
    if arguments.pop("one_thread_at_a_time", False):
        _take_turns()
    disk = FaultyDisk(**arguments)
    local.Disk = lambda: disk  # type: ignore[assignment, misc]

    class Marks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("committed") and disk.at is None:
                disk.operations.append(record.getMessage())

    logging.getLogger("trainer_cli").addHandler(Marks())
    return disk


def _take_turns() -> None:
    """Have the training wait for each job of the writer thread, so that every run asks the same of its disk in the
    same order."""
    from concurrent.futures import wait

    from trainer_cli.checkpoint.writer_thread import WriterThread

    submit = WriterThread.submit

    def submit_and_wait(self: WriterThread, job: Any) -> Any:
        done = submit(self, job)
        wait([done])
        return done

    WriterThread.submit = submit_and_wait  # type: ignore[method-assign]


if __name__ == "__main__":
    serve()
