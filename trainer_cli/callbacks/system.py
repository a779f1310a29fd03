"""What a training takes of its machine: processor, memory, disk and GPUs, read by a thread of their own."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer_cli.callbacks.nvml import Nvml
from trainer_cli.errors import ConfigError
from trainer_cli.files import AppendedFile, as_path
from trainer_cli.memory import machine_bytes, resident_bytes
from trainer_cli.strict_json import strict_json
from trainer_cli.trainer import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer, TrainingLoop

log = logging.getLogger(__name__)

SYSTEM_FILE = "system.jsonl"
_SHORTEST_S = 0.1
_JOIN_S = 1.0
"""A file system or a driver that hangs must not hold the end of a run."""


class SystemMonitor(Callback):
    """Appends a line to `system.jsonl` of the run directory every `interval_s` seconds, from a thread: of the machine
    `cpu_percent`, `memory_free_bytes`, and `disk_free_bytes` of the run directory's file system; of this process
    `process_cpu_percent` (100 is one core), `process_memory_bytes`, `process_read_bytes_per_s` and
    `process_write_bytes_per_s`; and of each NVIDIA GPU in use `gpuN_percent`, `gpuN_memory_bytes`, `gpuN_power_w` and
    `gpuN_temperature_c`. What the system does not tell is left out.

    The first process of a run reads its own machine. Lines follow the clock: a resume drops none of them, and a fit
    that is shorter than the interval writes none.

    Args:
        interval_s: seconds from one line to the next.
        path: the file, relative to the run directory.
    """

    measures_only = True
    writes = ("path",)

    def __init__(self, interval_s: float = 10.0, path: str = SYSTEM_FILE) -> None:
        if not _SHORTEST_S <= interval_s < float("inf"):
            raise ConfigError(
                f"interval_s is {interval_s}, but it must be at least {_SHORTEST_S}", location="interval_s"
            )
        self.interval_s, self.path = interval_s, str(as_path(path, "SystemMonitor.path", local=True))

    def on_enter_fit(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """On rank 0, start the thread that writes the lines; it ends with the fit."""
        if not trainer.strategy.group.is_main:
            return
        stopped = threading.Event()
        # A daemon: one that hangs must not keep the process alive.
        thread = threading.Thread(target=self._run, args=(trainer, stopped), name="system-monitor", daemon=True)
        thread.start()
        # On the way out the last entered goes first: the thread is asked to stop before it is waited for.
        stack.callback(thread.join, _JOIN_S)
        stack.callback(stopped.set)

    def _run(self, trainer: Trainer, stopped: threading.Event) -> None:
        """Write a line each interval until `stopped` is set; errors of the disk are ignored."""
        file = Path(trainer.run_dir or "", self.path)
        with suppress(OSError), ExitStack() as stack:
            usage = Usage(file.parent)
            nvml: Nvml | None = None
            appended: AppendedFile | None = None
            while not stopped.wait(self.interval_s):
                # A disk without space may have some again later; a line that fails leaves nothing behind.
                with suppress(OSError):
                    if appended is None:
                        appended = _opened(file)
                        stack.callback(appended.close)
                        # Looked up at the first line, when the fit has long chosen its device.
                        nvml = open_nvml(trainer)
                    progress = trainer.progress
                    facts = {
                        "step": progress.step,
                        "epoch": trainer.loop.epochs_at(progress),
                        "time": round(time.time(), 3),
                    }
                    values = {**dict(usage.read()), **dict(nvml.read() if nvml is not None else ())}
                    appended.append(f"{strict_json({**facts, **values})}\n".encode())


def _opened(file: Path) -> AppendedFile:
    """The file, opened to append whole lines: a last line that a crash has torn is ended."""
    with ExitStack() as stack:
        appended = AppendedFile(file)
        stack.callback(appended.close)
        with open(file, "rb") as content:
            if content.seek(0, os.SEEK_END) and content.seek(-1, os.SEEK_END) and content.read() != b"\n":
                appended.append(b"\n")
        stack.pop_all()
    return appended


def open_nvml(trainer: Trainer) -> Nvml | None:
    """The GPUs that the processes of this machine use; None without NVIDIA's driver."""
    if trainer.device.type != "cuda":
        return None
    used = range(torch.cuda.device_count()) if trainer.strategy.world_size > 1 else [torch.cuda.current_device()]
    try:
        return Nvml({index: str(torch.cuda.get_device_properties(index).uuid) for index in used})
    except OSError as error:
        log.debug("the GPUs are not monitored: %s", error)
        return None


class Usage:
    """Reads counters of the machine and of this process, and rates since the reading before.

    Args:
        folder: on the file system whose free space is read.
        proc: the folder of Linux's counters; without it there are fewer quantities.
    """

    def __init__(self, folder: Path, proc: Path = Path("/proc")) -> None:
        self._folder, self._proc = folder, proc
        self._last = dict(self._counters())

    def read(self) -> Iterator[tuple[str, float]]:
        """Name and value of each quantity."""
        counters, last = dict(self._counters()), self._last
        self._last = counters

        def rise(name: str, per: str, factor: float = 1.0) -> float | None:
            """The rise of a counter since the last reading, per unit of another one; None if unknown."""
            if name not in counters or name not in last or counters[per] <= last[per]:
                return None
            return round((counters[name] - last[name]) / (counters[per] - last[per]) * factor, 3)

        rates = {
            "cpu_percent": rise("busy", "ticks", 100) if "ticks" in counters and "ticks" in last else None,
            "process_cpu_percent": rise("process_s", "clock_s", 100),
            "process_read_bytes_per_s": rise("read_bytes", "clock_s"),
            "process_write_bytes_per_s": rise("write_bytes", "clock_s"),
        }
        yield from ((name, rate) for name, rate in rates.items() if rate is not None)
        if (memory_bytes := resident_bytes(self._proc)) is not None:
            yield "process_memory_bytes", memory_bytes
        if (free_bytes := machine_bytes(self._proc)) is not None:
            yield "memory_free_bytes", free_bytes
        with suppress(OSError):
            yield "disk_free_bytes", shutil.disk_usage(self._folder).free

    def _counters(self) -> Iterator[tuple[str, float]]:
        """Counters that only rise."""
        yield "clock_s", time.monotonic()
        yield "process_s", time.process_time()
        with suppress(OSError, ValueError, IndexError):
            # user nice system idle iowait irq softirq steal; guests are counted in the first two.
            ticks = [int(text) for text in self._text("stat").split("\n", 1)[0].split()[1:9]]
            yield "ticks", sum(ticks)
            yield "busy", sum(ticks) - ticks[3] - ticks[4]
        with suppress(OSError, ValueError, KeyError):
            transferred = self._table("self/io")
            yield "read_bytes", transferred["read_bytes"]
            yield "write_bytes", transferred["write_bytes"]

    def _text(self, name: str) -> str:
        return (self._proc / name).read_text()

    def _table(self, name: str) -> dict[str, int]:
        """Lines `name: number unit`."""
        rows = (line.partition(":") for line in self._text(name).splitlines())
        return {key: int(value.split()[0]) for key, _, value in rows if value.split()[:1]}
