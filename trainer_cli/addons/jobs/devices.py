"""GPUs for the jobs of a sweep: which there are, and which are free.

A device is an entry of CUDA_VISIBLE_DEVICES: a number, or the UUID of a GPU or of a part of one (MIG). A job holds a
lock file for each of its devices, in a folder of the user and the machine, so that two sweeps share the devices. The
sweep takes the locks before it starts the job, and each process of the job takes them too: a device is free again when
all of these have ended. The kernel releases the locks of a process that is killed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from trainer_cli.errors import UserError
from trainer_cli.files import locked_file, open_private
from trainer_cli.fit_parts import JobLimits
from trainer_cli.terminal import format_count
from trainer_cli.user_cache import folder_of_devices

log = logging.getLogger(__name__)

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
ALL_DEVICES = "all"
_DRIVER_TIMEOUT_S = 60.0
"""While no process uses the GPUs, the driver initialises all of them first."""
_LISTED = re.compile(r"^\s*(GPU|MIG).*?(\d+): .*\(UUID: (\S+)\)", re.M)
"""A line of `nvidia-smi -L`: a GPU, or below it a part of it."""


class Taken(NamedTuple):
    """The devices of a job."""

    names: str = ""
    """The value of CUDA_VISIBLE_DEVICES; empty: the job sees all devices."""
    locks: Sequence[Path] = ()

    def variables(self) -> dict[str, str]:
        """The environment variables of the job's processes."""
        if not self.names:
            return {}
        # Numbers are those of nvidia-smi, unless the user has set what they are numbers of.
        order = {} if {VISIBLE, ORDER} & os.environ.keys() else {ORDER: "PCI_BUS_ID"}
        return {VISIBLE: self.names, **order}


class Devices:
    """Gives jobs devices that no other job has.

    Args:
        uuids: entry of CUDA_VISIBLE_DEVICES -> UUID of the device, or the entry itself where that is not known.
        per_device: number of jobs that may have the same device.
    """

    def __init__(self, uuids: Mapping[str, str], per_device: int = 1) -> None:
        self.per_device = per_device
        self._uuids = uuids
        self._folder = folder_of_devices()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._taken: dict[str, tuple[Taken, ExitStack]] = {}

    def __len__(self) -> int:
        return len(self._uuids)

    def __str__(self) -> str:
        return ", ".join(self._uuids)

    def take(self, job: str, count: int) -> Taken | None:
        """Take `count` devices for a job; None if fewer are free."""
        locks: dict[str, Path] = {}
        with ExitStack() as held:
            # Each device gets a first job before one gets a second.
            for slot in range(self.per_device):
                for name, uuid in self._uuids.items():
                    file = self._folder / f"{uuid.replace('/', '-')}.{slot}"
                    if name not in locks and len(locks) < count and (lock := _lock(file)) is not None:
                        locks[name] = file
                        held.push(lock)
            if len(locks) < count:
                return None
            taken = Taken(",".join(locks), list(locks.values()))
            self._taken[job] = taken, held.pop_all()
        return taken

    def names(self, job: str) -> str:
        """The devices of a job; empty if it has none."""
        return self._taken[job][0].names if job in self._taken else ""

    def release(self, job: str) -> None:
        """Give the devices of a job back, which its processes may hold still."""
        if job in self._taken:
            self._taken.pop(job)[1].close()


def hold(locks: Iterable[Path]) -> None:
    """Hold the devices of this process's job until the end of the process."""
    for file in locks:
        fcntl.flock(open_private(file, os.O_RDWR | os.O_CREAT), fcntl.LOCK_SH)


def _lock(file: Path) -> ExitStack | None:
    """Lock a file that no other job has."""
    with suppress(BlockingIOError), ExitStack() as stack:
        descriptor = stack.enter_context(locked_file(file, os.O_RDWR | os.O_CREAT, wait=False))
        # Shared from now on, with the processes of the job. Another sweep may lock it in between: then that one has it.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return stack.pop_all()
    return None


def choose_devices(wanted: str | None, per_device: int, *, settings: set[str], processes: int) -> Devices | None:
    """The devices for a sweep; None if its jobs are given none.

    Args:
        wanted: the value of `--devices`; None: all, if there are several and the configs let the jobs use them.
        settings: the values of `device` in the configs.
        processes: the most processes of a job.

    Raises:
        UserError: there are no such devices, or too few for a job, or a config chooses one itself.
    """
    if wanted is None and not settings <= {"auto", "cuda"}:
        return None
    if numbered := next((setting for setting in sorted(settings) if ":" in setting), None):
        cure = "Leave one of them out; with --devices each run sees its own device as cuda."
        raise UserError(f"device={numbered} and --devices both choose the GPU", where="device", cure=cure)
    present = list_devices(os.environ.get(VISIBLE))
    if wanted is None and len(present) < 2:
        return None
    chosen = _choose(ALL_DEVICES if wanted is None else wanted, present)
    if len(chosen) < processes:
        raise UserError(
            f"a run of {processes} processes needs as many devices, but is given {', '.join(chosen)}",
            where="parallel.processes_per_node",
            cure=f"There are: {', '.join(present)}.",
        )
    return Devices(chosen, per_device)


def share_devices(users: Collection[tuple[str, int]], limits: JobLimits) -> tuple[Devices | None, int]:
    """The devices for some jobs, if each is given its own, and how many jobs run at a time.

    Args:
        users: the `device` of each config, and the number of its processes.
    """
    at_once, wanted, per_device = limits
    if wanted is None and per_device is not None:
        wanted = ALL_DEVICES
    elif wanted is None and at_once in (None, 1):
        # A single job may use all devices.
        return None, 1
    processes = [count for _, count in users]
    settings = {device for device, _ in users}
    per_device = 1 if per_device is None else per_device
    devices = choose_devices(wanted, per_device, settings=settings, processes=max(processes))
    if devices is None:
        return None, at_once or 1
    most = len(devices) * devices.per_device // min(processes)
    if at_once is not None and at_once > most:
        log.info(
            "%s at a time, not %d: %d on each of the devices %s; --jobs-per-device sets how many",
            format_count(most, "job"),
            at_once,
            devices.per_device,
            devices,
        )
    return devices, min(at_once or most, most)


def _choose(wanted: str, present: Mapping[str, str]) -> dict[str, str]:
    """Those of the devices that `--devices` names, by their entries or UUIDs."""
    if not present:
        cure = "nvidia-smi lists none here; CUDA_VISIBLE_DEVICES=0,1 before the command names them."
        raise UserError("--devices: this machine has no GPU that can be seen", cure=cure)
    if wanted == ALL_DEVICES:
        return dict(present)
    known = {**{uuid: uuid for uuid in present.values()}, **present}
    names = wanted.split(",")
    for name in names:
        if name not in known:
            mistake = f"--devices is {wanted}, but there is no device {name!r}"
            raise UserError(mistake, cure=f"There are: {', '.join(present)}.")
    return {name: known[name] for name in names}


def list_devices(visible: str | None) -> dict[str, str]:
    """Each device that processes may use, as an entry of CUDA_VISIBLE_DEVICES, with its UUID, or itself where the
    driver does not tell.

    Args:
        visible: the value of CUDA_VISIBLE_DEVICES.
    """
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    if names is not None and names[0] in ("", "-1"):
        return {}
    try:
        text = subprocess.run(
            ["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        text = ""
    uuids: dict[str, str] = {}
    gpu = ""
    for kind, number, uuid in _LISTED.findall(text):
        if kind == "GPU":
            gpu = number
        else:
            # CUDA uses the parts of a divided GPU alone, by their UUIDs.
            uuids.pop(gpu, None)
        uuids[number if kind == "GPU" else uuid] = uuid
    if names is None:
        return uuids
    return {
        name: next((uuid for number, uuid in uuids.items() if name == number or uuid.startswith(name)), name)
        for name in names
    }
