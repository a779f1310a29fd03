"""Packed rows: every target once, nothing across borders, and the same losses as the sequences alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from trainer_cli.addons.text.gpt import GPT
from trainer_cli.addons.text.text import IGNORED, Documents, PackedRows, Packing, Sequences, best_fit
from trainer_cli.data.loader import Loader
from trainer_cli.errors import UserError


def sequences(*lengths: int) -> Sequences:
    tokens = torch.randint(11, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return Sequences(tokens, np.array(lengths))


def pairs(rows: PackedRows) -> Counter[tuple[int, ...]]:
    """How often each (token, target, position) occurs."""
    found: Counter[tuple[int, ...]] = Counter()
    for row in (rows[index] for index in range(len(rows))):
        real = row["targets"] != IGNORED
        assert int(real.sum()) == row["count"] == int((row["segments"] > 0).sum())
        assert not row["tokens"][~real].any()
        found.update(zip(*(row[name][real].tolist() for name in ("tokens", "targets", "positions")), strict=True))
    return found


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda sizes: max(sizes) > 1), st.integers(1, 16))
def test_every_target_is_there_once_and_none_lies_across_a_border(sizes: list[int], length: int) -> None:
    data = sequences(*sizes)
    rows = PackedRows(data, length)
    wanted = Counter(
        (int(one[place]), int(one[place + 1]), place % length)
        for one in (data[index] for index in range(len(data)))
        for place in range(len(one) - 1)
    )
    assert pairs(rows) == wanted
    assert rows.targets == wanted.total() == sum(max(0, size - 1) for size in sizes)


def test_a_row_holds_tokens_targets_segments_and_positions() -> None:
    row = PackedRows(Sequences(torch.tensor([1, 2, 3, 4, 5, 6, 7]), np.array([4, 3])), 6)[0]
    assert {name: value.tolist() for name, value in row.items() if name != "count"} == {
        "tokens": [1, 2, 3, 5, 6, 0],
        "targets": [2, 3, 4, 6, 7, IGNORED],
        "segments": [1, 1, 1, 2, 2, 0],
        "positions": [0, 1, 2, 0, 1, 0],
    }
    assert row["count"] == 5


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_rows_are_composed_as_best_fit_decreasing_does_it(sizes: list[int]) -> None:
    room = 20
    spaces: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [(space, number) for number, space in enumerate(spaces) if space >= size]
        if fits:
            spaces[min(fits)[1]] -= size
        else:
            spaces.append(room - size)
    row = best_fit(np.array(sizes), room)
    filled = np.bincount(row, weights=sizes)
    assert sorted(room - filled) == sorted(spaces)


def test_rows_are_full_and_the_same_each_time() -> None:
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(5, 1, 100_000).astype(np.int64), 1, 512)
    row = best_fit(sizes, 512)
    assert sizes.sum() / (512 * (row.max() + 1)) > 0.999
    assert (row == best_fit(sizes, 512)).all()


def test_a_packed_row_gives_the_losses_of_its_sequences_alone() -> None:
    data = sequences(9, 5, 5, 4, 12, 2)
    rows = PackedRows(data, 16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(vocab_size=11, context=16, layers=2, heads=2, width=16).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    batch = next(Loader(rows, len(rows), shuffle=True, seed=0).iterate(0))
    assert batch["segments"].max() > 1
    outputs = model(batch)
    alone = [model((one[None, :-1], one[None, 1:])) for one in (data[index] for index in range(len(data)))]
    tokens = sum(int(one["tokens"]) for one in alone)
    losses = sum(one["loss"] * one["tokens"] for one in alone)
    right = sum(one["accuracy"] * one["tokens"] for one in alone)
    assert (outputs["tokens"], outputs["weight"]) == (tokens, tokens) == (31, 31)
    torch.testing.assert_close(outputs["loss"] * tokens, losses)
    torch.testing.assert_close(outputs["accuracy"] * tokens, right)
    # And target by target.
    scores = model.logits(batch["tokens"], batch["segments"], batch["positions"])
    packed = functional.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    real = batch["targets"].flatten() != IGNORED
    single = torch.cat(
        [
            functional.cross_entropy(model.logits(one[None, :-1])[0], one[1:], reduction="none")
            for one in (data[index] for index in range(len(data)))
        ]
    )
    torch.testing.assert_close(packed[real].sort().values, single.sort().values)


def test_a_gpt_counts_the_targets_of_rows_that_do_not_tell() -> None:
    row = PackedRows(sequences(4, 3), 8)[0]
    batch = {name: value[None] for name, value in row.items() if name != "count"}
    model = GPT(vocab_size=11, context=8, layers=1, heads=1, width=8)
    assert model(batch)["tokens"] == 5


def test_lengths_are_learnt_by_reading_once_where_nobody_reports_them() -> None:
    data = [[1, 2, 3], [4], [5, 6]]
    rows = PackedRows(data, 4)
    assert rows.targets == 3
    assert rows[0]["tokens"].tolist() == [1, 2, 5, 0]


def test_a_sequence_that_changes_its_length_is_an_error() -> None:
    data = [[1, 2, 3], [4, 5]]
    rows = PackedRows(data, 4)
    data[0].append(9)
    with pytest.raises(ValueError, match="sequence 0 has 4 tokens, but rows were composed for 3"):
        rows[0]


def test_packing_takes_every_part_and_attribute_of_its_source() -> None:
    source = SimpleNamespace(
        train=sequences(5, 6), val={"a": sequences(4, 4), "b": sequences(3)}, vocab_size=11, characters=None
    )
    packing = Packing(source, 8)
    assert (packing.vocab_size, packing.context) == (11, 8)
    assert packing.val.keys() == {"a", "b"}
    assert not hasattr(packing, "nothing")
    other = Packing(SimpleNamespace(train=sequences(5, 7), val=None), 8)
    longer = Packing(source, 9)
    assert len({one.train.fingerprint for one in (packing, other, longer)}) == 3
    assert other.val is None


@pytest.mark.parametrize(
    ("source", "length", "message"),
    [
        (SimpleNamespace(train=[[1, 2]]), 0, "data.length is 0"),
        (SimpleNamespace(train=[[1, 2]]), True, "data.length is True"),
        (SimpleNamespace(train=[[1], []]), 4, "nothing to predict"),
        (SimpleNamespace(train=[[0.5, 1.5]]), 4, "expected a sequence of whole numbers"),
        (SimpleNamespace(train=[[[1], [2]]]), 4, "expected a sequence of whole numbers"),
        (SimpleNamespace(), 4, "not a dataset with a length"),
    ],
)
def test_what_cannot_be_packed_is_refused(source: Any, length: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Packing(source, length)


TEXT = "one\ntwo\n\nthree\n \n\n  four\nfive\n"


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ("line", ["one\n", "two\n", "three\n", "  four\n", "five\n"]),
        ("paragraph", ["one\ntwo\n", "three\n", "  four\nfive\n"]),
        ("file", [TEXT]),
    ],
)
@pytest.mark.parametrize("unit", ["bytes", "characters"])
def test_a_text_is_cut_into_documents(document: str, found: list[str], unit: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("sechs\nß")
    data = Documents(str(tmp_path), unit=unit, document=document, val_fraction=0.1 if document == "line" else 0.3)
    parts = [part[index].tolist() for part in (data.train, data.val) for index in range(len(part))]
    if unit == "bytes":
        said = [bytes(tokens).decode() for tokens in parts]
    else:
        assert data.characters is not None
        said = ["".join(data.characters[token] for token in tokens) for tokens in parts]
    assert said == found + (["sechs\n", "ß"] if document == "line" else ["sechs\nß"])
    assert len(data.val) == 1
    assert data.train.lengths.tolist() == [len(tokens) for tokens in parts[:-1]]


def test_documents_of_the_standard_library_need_no_file() -> None:
    data = Documents()
    assert len(data.train) > 1000
    assert data.vocab_size == 256


def test_mistakes_about_documents_are_the_users(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(UserError, match="must be one of line, paragraph, file"):
        Documents(document="page")
    with pytest.raises(UserError, match="must be one of bytes, characters"):
        Documents(unit="words")
    with pytest.raises(UserError, match="leave nothing to train on"):
        Documents(str(tmp_path / "a.txt"))
    with pytest.raises(IndexError, match="is not one of"):
        Documents().train[10**7]
