"""Ranks that have other data or other source than rank 0 are named before the training begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thread_ranks import on_ranks

from trainer_cli.data.adapt import as_loader
from trainer_cli.errors import UserError
from trainer_cli.origin.compare import DataAndSource, other_source

SAMPLES = {"train": {"0": "a 1.0 0.5"}, "val": {"3": "b"}}
SOURCE = {"model.py": "1", "data.py": "2"}
LENGTH = "the ranks do not have the same number of samples in train: 203 on rank 0, "
OTHERS: dict[str, tuple[list[int], list[Any], list[Any], str | None]] = {
    "the same": ([203] * 3, [SAMPLES] * 3, [SOURCE] * 3, None),
    "the last digits": ([203] * 3, [SAMPLES, {"train": {"0": "a 1.00001 0.5"}}, {}], [SOURCE] * 3, None),
    "a module that only rank 0 imports": ([203] * 3, [SAMPLES] * 3, [SOURCE, {"data.py": "2"}, {}], None),
    "lengths": (
        [203, 203, 198],
        [SAMPLES] * 3,
        [SOURCE] * 3,
        LENGTH + "198 on rank 2 (data). Give all machines the same data.",
    ),
    "lengths of all": ([203, 198, 199], [{}] * 3, [SOURCE] * 3, LENGTH + "198 on rank 1, 199 on rank 2"),
    "samples": (
        [203] * 3,
        [SAMPLES, SAMPLES, {**SAMPLES, "val": {"3": "c"}}],
        [SOURCE] * 3,
        "the data of rank 0 is not that of rank 2 (sample 3 of val)",
    ),
    "source": (
        [203] * 3,
        [SAMPLES] * 3,
        [SOURCE, {**SOURCE, "data.py": "3"}, {"data.py": "4", "model.py": "5"}],
        "the source of rank 0 is not that of rank 1 (data.py), rank 2 (data.py, model.py)",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_ranks_with_other_data_or_source_are_named(what: str) -> None:
    lengths, samples, source, message = OTHERS[what]

    def check(group: Any) -> None:
        loaders = {"train": as_loader(range(lengths[group.rank]), shuffle=True, seed=0)}
        DataAndSource(samples[group.rank], source[group.rank]).check_same(group, loaders)

    for error in on_ranks(3, check):
        if message is None:
            assert error is None
        else:
            assert isinstance(error, UserError)
            assert str(error).startswith(message)


def test_ranks_with_parts_of_the_data_may_have_other_lengths() -> None:
    def check(group: Any) -> None:
        loader = SimpleNamespace(per_rank=True, length=group.rank, fingerprint=str(group.rank))
        DataAndSource({}, {}).check_same(group, {"train": loader})

    assert on_ranks(2, check) == [None, None]


def test_source_is_compared_by_content_and_files_that_are_gone_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x = 1\n")
    digest = "6e45dd63b9bd3a0b"
    assert other_source({"a.py": "0" * 16, "b/c.py": digest}, tmp_path) == {"a.py": "changed", "b/c.py": "not there"}
