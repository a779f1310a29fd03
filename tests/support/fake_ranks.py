"""This process in the role of one rank after another: torch's process group that exchanges nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer_cli.checkpoint.save import CheckpointMetadata, RankFiles, commit, write
from trainer_cli.checkpoint.snapshot import Snapshot
from trainer_cli.format.base import Format
from trainer_cli.format.sharded import ShardedFormat
from trainer_cli.manifest import Manifest
from trainer_cli.schema.checkpoint_config import Compression
from trainer_cli.storage.local import LocalStorage


@contextmanager
def rank_of(rank: int, shape: Sequence[int]) -> Iterator[DeviceMesh]:
    """Be this rank of a mesh of this shape."""
    world_size = torch.Size(shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", tuple(shape))
    finally:
        dist.destroy_process_group()


def parted(whole: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> Any:
    """The rank's DTensor of a tensor that every rank knows."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def form_of(rank: int, world_size: int, format: str = "tensors") -> Format:
    """The format of one rank: `archive` is compressed."""
    sharded = ShardedFormat(rank, world_size)
    if format != "archive":
        return sharded
    made: Format = pytest.importorskip("trainer_cli.addons.formats.archive").ArchiveFormat(Compression.gz, sharded)
    return made


def save_as(
    root: Path,
    shape: Sequence[int],
    tree: Callable[[DeviceMesh, int], Any],
    name: str = "step1",
    format: str = "tensors",
) -> Manifest:
    """Save the trees of all ranks of a mesh as one checkpoint, one rank after another."""
    storage, ranks = LocalStorage(root), list[RankFiles]()
    world_size = torch.Size(shape).numel()
    with storage.writing(name) as folder:
        for rank in range(world_size):
            with rank_of(rank, shape) as mesh:
                layout = form_of(rank, world_size, format).plan(tree(mesh, rank))
                place = storage.joining(folder.hidden_name) if rank else folder
                ranks.append(write(place, Snapshot(layout, []), {}))
        return commit(folder, ranks, CheckpointMetadata(step=1, world_size=world_size), name=name, format=format)
