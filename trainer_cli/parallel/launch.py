"""Start the processes of one machine by torch's elastic agent, as torchrun does."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
"""Signals that are forwarded to the processes, which then save and stop."""
_SAVING_S = 24 * 3600
"""How long stopping processes may take. The default, half a minute, would kill them during a save."""
_STOPPED_EARLY = 75


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `train ARGUMENTS` in this number of processes. Returns 0, or the exit code of the first that failed.

    Signals are forwarded; the exit code is then 75, the same as that of a process that saved and stopped.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    # The processes stop at the end of their stdin: a pipe to this process ends even if it is killed.
    os.dup2(os.pipe()[0], 0)
    # Each failure is reported by its process.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    # Else each process would use all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    settings: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": processes,
        "run_id": uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "logs_specs": DefaultLogsSpecs(),
        # Under nohup, SIGHUP stays ignored.
        "signals_to_handle": ",".join(
            name for name in _SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN
        ),
        "shutdown_timeout": _SAVING_S,
    }
    # Older versions of torch lack some of these settings.
    names = {field.name for field in dataclasses.fields(LaunchConfig)}
    config = LaunchConfig(**{name: value for name, value in settings.items() if name in names})
    try:
        launch_agent(config, sys.executable, ["-m", "trainer_cli", *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # Negative: the number of the signal that killed the process.
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"train: error: rank {rank} was killed by {name}", file=sys.stderr)
            return 1
        return int(failure.exitcode)
    except SignalException:
        return _STOPPED_EARLY
    return 0
