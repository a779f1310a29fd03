"""Ways to save while a training goes on: each takes a state and reports when it is staged, and when written."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import disk
import own_checkpointers
from state import size_bytes
from timing import Skipped, require


@dataclass(slots=True)
class Handed:
    """A save under way. The state survives a power cut once `written` is done."""

    written: Future[Any]
    staged: Callable[[], object] = lambda: None
    """Waits until the state may change."""


Saver = Callable[[Any, Path], Handed]


def done() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None)
    return future


def nothing() -> Saver:
    """No save at all: what the procedure itself reports."""
    return lambda state, path: Handed(done())


def torch_save() -> Saver:
    def save(state: Any, path: Path) -> Handed:
        torch.save(state, path)
        disk.sync(path)
        return Handed(done())

    return save


def raw() -> Saver:
    """The limit: as many bytes that lie ready, past the page cache, while nothing else goes on."""
    ready: list[disk.Image] = []

    def save(state: Any, path: Path) -> Handed:
        if not ready:
            ready.append(disk.Image(size_bytes(state)))
        try:
            ready[0].write(path, direct=True)
        except OSError as error:
            raise Skipped(f"the file system refuses direct writes: {error}") from None
        return Handed(done())

    return save


def dcp(kind: str) -> Saver:
    """torch.distributed.checkpoint, asynchronous: by a thread, or by a process of its own."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    warnings.filterwarnings("ignore", module="torch")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo")
    by = AsyncCheckpointerType.PROCESS if kind == "process" else AsyncCheckpointerType.THREAD
    # The buffers are kept from save to save, the plan too: the best that it can do.
    stager = DefaultStager(StagingOptions(False, False, False, False)) if kind == "thread" else None
    planner = DefaultSavePlanner(enable_plan_caching=True)

    def save(state: Any, path: Path) -> Handed:
        answer: Any = async_save(
            state, checkpoint_id=path, async_checkpointer_type=by, async_stager=stager, planner=planner
        )
        staged = getattr(answer, "staging_completion", None)
        written = getattr(answer, "upload_completion", answer)
        return Handed(written) if staged is None else Handed(written, staged.result)

    return save


def experimental() -> Saver:
    """torch's experimental checkpointer, which may be gone in the next version."""
    try:
        from torch.distributed.checkpoint._experimental.builder import make_async_checkpointer
        from torch.distributed.checkpoint._experimental.config import CheckpointerConfig
        from torch.distributed.checkpoint._experimental.staging import CheckpointStagerConfig
    except ImportError:
        raise Skipped("this torch has no experimental checkpointer") from None
    # Pinned memory and copies that do not block are for accelerators; without one they are refused.
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    keeper = make_async_checkpointer(CheckpointerConfig(staging_config=staging))

    def save(state: Any, path: Path) -> Handed:
        answer = keeper.save(str(path), state)
        assert answer is not None
        staged, written = answer
        return Handed(written, staged.result)

    return save


def torch_checkpointing(kind: str) -> Saver:
    """Meta's torch_checkpointing as its documentation has it for a CPU: no pinned memory, which is the default there,
    and no direct I/O, with which every save ends in EINVAL on ext4 (0.1.1). It calls no fsync."""
    require("torch_checkpointing", "torch-checkpointing")
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    configs = CheckpointManager.Config
    config = configs.with_async_save() if kind == "async" else configs.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = config.build()

    def staged() -> None:
        with manager.lock():
            pass

    def save(state: Any, path: Path) -> Handed:
        written = manager.save(str(path), state)
        return Handed(done() if written is None else written, staged)

    return save


def train_sync() -> Saver:
    keeper = own_checkpointers.sync_checkpointer()

    def save(state: Any, path: Path) -> Handed:
        keeper.save(state, path)
        return Handed(done())

    return save


def train_async() -> Saver:
    keeper = own_checkpointers.async_checkpointer()

    def save(state: Any, path: Path) -> Handed:
        # As the Trainer's callback does: the finiteness of the weights is examined, too.
        return Handed(keeper.save(state, path, trained=state["model"].values()).written)

    return save


NONE, TORCH, RAW = "no save", "torch.save + fsync", "raw direct write"
DCP, META, TRAIN_SYNC, TRAIN = "DCP async, thread", "torch_checkpointing, async", "train, sync", "train, async"
SAVERS: Mapping[str, Callable[[], Saver]] = {
    NONE: nothing,
    TORCH: torch_save,
    RAW: raw,
    DCP: lambda: dcp("thread"),
    "DCP async, process": lambda: dcp("process"),
    "torch's experimental, async": experimental,
    META: lambda: torch_checkpointing("async"),
    TRAIN_SYNC: train_sync,
    TRAIN: train_async,
}
