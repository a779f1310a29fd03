"""A plan sees an evaluation that a stop has put off, in the files of every format and of several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import ThreadGroup, on_ranks

from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.running.planning import has_pending_evaluation
from trainer_cli.schema.checkpoint_config import CheckpointFormat

RANKS = [(format, ranks) for format in CheckpointFormat for ranks in (1, 2) if ranks == 1 or not format.one_process]


def save(path: Path, format: CheckpointFormat, world_size: int, record: Any) -> None:
    def save_rank(group: ThreadGroup) -> None:
        checkpointer = make_sync_checkpointer(format=format)
        checkpointer.join(group)
        loop = {"meter": {"sum": torch.ones(3)}, "owed_record": record}
        checkpointer.save({"model": {"weight": torch.ones(4)}, "loop": loop, "progress": {"step": 45}}, path)

    assert on_ranks(world_size, save_rank) == [None] * world_size


@pytest.mark.parametrize("record", [{"train/loss": float("nan")}, {}, None], ids=["a record", "an empty one", "none"])
@pytest.mark.parametrize(("format", "ranks"), RANKS)
def test_a_pending_evaluation_is_seen_in_every_format(
    tmp_path: Path, format: CheckpointFormat, ranks: int, record: Any
) -> None:
    save(tmp_path / "step45", format, ranks, record)
    catalog = Catalog.of(tmp_path)
    assert has_pending_evaluation(catalog, catalog.entry("step45")) is (record is not None)


@pytest.mark.parametrize(("format", "ranks"), [case for case in RANKS if case[0].has_tensor_files])
def test_no_file_of_tensors_is_read_for_it(tmp_path: Path, format: CheckpointFormat, ranks: int) -> None:
    save(tmp_path / "step45", format, ranks, {})
    for file in (tmp_path / "step45").glob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    catalog = Catalog.of(tmp_path)
    assert has_pending_evaluation(catalog, catalog.entry("step45"))
