"""The same faults for `train` and for other savers, each in the environment that scripts/bench makes for them."""

from __future__ import annotations

import atexit
import json
import os
import queue
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import peers_environment
from campaign import ROOT, SCRIPTS
from campaign.fault_class import FaultClass, Size, Trials
from campaign.verdict import Outcome, Verdict

CONTENDERS = {
    "train": "trainer-cli",
    "torch.save": "torch",
    "torch.save, then rename": "torch",
    "safetensors": "safetensors",
    "DCP": "torch",
    "DCP, async": "torch",
    "torch_checkpointing": "torch-checkpointing",
    "Lightning": "lightning",
    "HF Trainer": "transformers",
}
"""Names of `peers/peer_savers.py`, each with its distribution."""
LIMIT_S = 600.0
"""Until the workers have imported everything and trained once."""
_AT_ONCE = 2


class Worker:
    """A process that runs one trial at a time of one contender."""

    def __init__(self, contender: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="faults-peer-", ignore_cleanup_errors=True)
        self._errors = open(Path(self._folder.name, "errors"), "w+")  # noqa: SIM115 - until `close`
        # A mount namespace of its own: what it mounts goes with it.
        namespace = [] if why_not_mounted(_TMPFS) else ["unshare", "--mount"]
        self._process = subprocess.Popen(
            [*namespace, str(peers_environment.install()), "-m", "campaign.peers.worker", contender, self._folder.name],
            cwd=SCRIPTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{SCRIPTS}"},
        )  # fmt: skip

    def wait_until_ready(self, until: float) -> None:
        """Wait until it has imported everything and trained once; RuntimeError if that takes too long or fails."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise RuntimeError(f"the worker was not ready within {LIMIT_S:.0f} s")
        self._answer()

    def run(self, fault: str, number: int) -> Outcome:
        """One trial, by name of its fault."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([fault, number]) + "\n")
        self._process.stdin.flush()
        verdict, detail, announced = self._answer()
        return Outcome(Verdict(verdict), detail, announced)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"the worker has ended: {self._errors.read()[-2000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End the process, and delete what it has written."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()
        self._folder.cleanup()


@cache
def start_workers(contender: str) -> list[Worker] | str:
    """The processes of a contender, or why they do not start; kept for all its faults, as each takes seconds to start.

    They are closed when this process ends.
    """
    until = time.monotonic() + LIMIT_S
    workers = [Worker(contender) for _ in range(_AT_ONCE)]
    for worker in workers:
        atexit.register(worker.close)
    try:
        for worker in workers:
            worker.wait_until_ready(until)
    except RuntimeError as error:
        for worker in workers:
            atexit.unregister(worker.close)
            worker.close()
        return str(error)
    return workers


@contextmanager
def _prepare(contender: str, fault: str, folder: Path, count: int, size: Size) -> Iterator[Trials]:
    workers = start_workers(contender)
    if isinstance(workers, str):
        raise RuntimeError(workers)
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(number: int) -> Outcome:
        worker = idle.get()
        try:
            return worker.run(fault, number)
        finally:
            idle.put(worker)

    yield Trials(count, run, together=_AT_ONCE)


_EXT4 = "truncate -s 16M image && mkfs.ext4 -qF image && mount -o loop image mnt"
_TMPFS = "mount -t tmpfs none mnt"


@cache
def why_not_mounted(mount: str) -> str | None:
    """Why a shell command cannot mount a file system here, or None."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mnt").mkdir()
        command = ["unshare", "--mount", "sh", "-c", mount]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        except FileNotFoundError:
            return "there is no unshare"
    return f"cannot mount: {done.stderr.strip()[-200:]}" if done.returncode else None


def versions() -> dict[str, str]:
    """Contender -> its distribution and version in their environment; absent where it is not installed."""
    folders = peers_environment.FOLDER.glob("lib/*/site-packages")
    installed = {
        distribution.name.lower().replace("_", "-"): distribution.version
        for distribution in distributions(path=[str(path) for path in folders])
    }
    return {
        contender: f"{distribution} {installed[distribution]}"
        for contender, distribution in CONTENDERS.items()
        if distribution in installed
    }


def _why_skipped(contender: str, fault_reason: Callable[[], str | None]) -> str | None:
    if contender not in versions():
        return f"{CONTENDERS[contender]} is not installed"
    if (reason := fault_reason()) is not None:
        return reason
    workers = start_workers(contender)
    return workers if isinstance(workers, str) else None


def _make_class(
    contender: str,
    fault: str,
    title: str,
    what: str,
    promises: str,
    count: int,
    skipped: Callable[[], str | None] = lambda: None,
) -> FaultClass:
    return FaultClass(
        key=f"{fault}_{''.join(letter if letter.isalnum() else '_' for letter in contender.lower())}",
        title=title,
        what=what,
        promises=promises,
        counts={Size.quick: 2, Size.full: count, Size.nightly: 5 * count},
        prepare=partial(_prepare, contender, fault),
        skipped=partial(_why_skipped, contender, skipped),
        # The processes begin with the first fault.
        share=count + (30 if fault == "stop" else 0),
        contender=contender,
    )


CLASSES = tuple(
    fault_class
    for contender in CONTENDERS
    for fault_class in (
        _make_class(
            contender, "stop", "No fault",
            "The process ends after a save, and the same call goes on; so every contender can be resumed exactly.",
            "L4", 2,
        ),
        _make_class(
            contender, "kills", "Kill -9",
            "Killed at a random moment of a training of 48 steps with a save every 4; in every other trial soon after "
            "the save of a random step was announced.",
            "L1 L2 L4", 20,
        ),
        _make_class(
            contender, "cuts", "Power cut",
            "On an ext4 file system of its own, which is shut down without writing its journal just after a save was "
            "announced; in every other trial after an unrelated file was fsynced.",
            "L1 L2 L4", 20, partial(why_not_mounted, _EXT4),
        ),
        _make_class(
            contender, "flips", "Flipped bit", "One random bit of the newest checkpoint is flipped.", "L2 L5", 20,
        ),
        _make_class(
            contender, "truncations", "Truncated file",
            "A file of the newest checkpoint, chosen by its size, is cut at a random byte.", "L2 L5", 10,
        ),
        _make_class(
            contender, "full", "Full disk",
            "A tmpfs that is full at a random moment; once the training has ended, space is made, and the same call "
            "goes on.",
            "L1 L2 L4", 6, partial(why_not_mounted, _TMPFS),
        ),
    )
)  # fmt: skip
