"""Text: read, divided and numbered in its own memory; windows of it, and packed rows."""

from __future__ import annotations

import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional

from trainer_cli.addons.text.gpt import GPT
from trainer_cli.addons.text.read_text import count_characters, find_documents, keep_documents, read_text, tokenize
from trainer_cli.addons.text.text import IGNORED, Documents, PackedRows, Packing, Sequences, Text, best_fit
from trainer_cli.data.loader import Loader
from trainer_cli.errors import UserError

WORDS = "the quick brown fox jumps over the lazy dog; " * 10


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(WORDS)
    return path


def test_training_has_a_window_at_every_position(file: Path) -> None:
    text = Text(str(file), context=8)
    content = WORDS.encode()[:405]
    assert len(text.train) == len(content) - 8
    for index in (0, 1, 17, len(text.train) - 1):
        tokens, following = text.train[index]
        assert bytes(tokens.tolist()) == content[index : index + 8]
        assert bytes(following.tolist()) == content[index + 1 : index + 9]
        assert tokens.dtype == following.dtype == torch.int64


def test_evaluation_sees_each_held_out_token_once(file: Path) -> None:
    text = Text(str(file), context=8)
    tail = WORDS.encode()[405:]
    seen = b"".join(bytes(text.val[index][1].tolist()) for index in range(len(text.val)))
    assert len(text.val) == 5
    assert seen == tail[1:41]
    with pytest.raises(IndexError):
        text.val[5]


def test_windows_by_list_are_the_windows_one_by_one(file: Path) -> None:
    train = Text(str(file), context=8).train
    indices = [0, 396, 5, 5]
    for (tokens, following), index in zip(train.__getitems__(indices), indices, strict=True):
        assert torch.equal(tokens, train[index][0])
        assert torch.equal(following, train[index][1])


def test_batches_are_what_a_language_model_takes(file: Path) -> None:
    loader = Loader(Text(str(file), context=8).train, 12, shuffle=True, seed=0)
    tokens, following = next(loader.iterate(0))
    assert tokens.shape == following.shape == (12, 8)
    assert torch.equal(tokens[:, 1:], following[:, :-1])


def test_characters_are_numbered_by_the_text(tmp_path: Path) -> None:
    path = tmp_path / "greek.txt"
    path.write_text("αβγ δε\n" * 20)
    text = Text(str(path), unit="characters", context=4)
    assert text.characters == "\n αβγδε"
    assert text.vocab_size == 7
    assert "".join(text.characters[token] for token in text.train[0][0]) == "αβγ "
    assert Text(str(path), unit="bytes", context=4).vocab_size == 256


def test_lists_and_folders_are_read_in_order(tmp_path: Path) -> None:
    for name, letter in (("b/z.txt", "z"), ("a.txt", "a"), ("b/c.txt", "c")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(letter * 50)
    folder = Text(str(tmp_path), unit="characters", context=4, val_fraction=0.2)
    assert folder.characters == "acz"
    assert folder.train[0][0].tolist() == [0] * 4
    files = [str(tmp_path / "b/z.txt"), str(tmp_path / "a.txt")]
    assert Text(files, unit="bytes", context=4).train[0][0].tolist() == [ord("z")] * 4


def test_the_default_is_the_standard_library_and_the_same_each_time() -> None:
    text = Text()
    assert 1_000_000 < len(text.train) < 2_000_000
    assert text.train.fingerprint == Text().train.fingerprint
    assert bytes(text.train[0][0].tolist()).isascii()


def test_fingerprints_tell_texts_apart(file: Path) -> None:
    before = Text(str(file), context=8)
    assert before.train.fingerprint != before.val.fingerprint
    file.write_text(WORDS.replace("fox", "ox "))
    assert Text(str(file), context=8).train.fingerprint != before.train.fingerprint


def test_mistakes_are_reported_with_a_cure(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no text at .*absent"):
        Text(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no files"):
        Text(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="empty list"):
        Text([])
    with pytest.raises(UserError, match="too short"):
        Text(str(file), context=64)
    with pytest.raises(UserError, match="one of bytes, characters"):
        Text(str(file), unit="words")
    with pytest.raises(UserError, match="at least 1"):
        Text(str(file), context=0)
    (tmp_path / "binary").write_bytes(b"\xff" * 1000)
    with pytest.raises(UserError, match=r"not UTF-8 .*data.unit=bytes"):
        Text(str(tmp_path / "binary"), unit="characters")


# Text is read, divided and numbered in its own memory, with the results of the plain way.


TEXTS = st.lists(st.text("ab \n\r\t\x0bß€", max_size=30).map(str.encode), min_size=1, max_size=3)


def plain(content: bytes, document: str) -> list[bytes]:
    """The documents of a file by splitting bytes."""
    if document == "file":
        return [content] if content else []
    if document == "line":
        pieces = content.splitlines(keepends=True)
    else:
        paragraphs = re.split(rb"\n(?:[ \t\r]*\n)+", content)
        pieces = [paragraph + b"\n" for paragraph in paragraphs[:-1]] + paragraphs[-1:]
    return [piece for piece in pieces if piece.strip()]


@settings(deadline=None, max_examples=300)
@given(TEXTS, st.sampled_from(["line", "paragraph", "file"]))
def test_documents_are_those_of_split_bytes(contents: list[bytes], document: str) -> None:
    pieces = [piece for content in contents for piece in plain(content, document)]
    content = np.frombuffer(b"".join(contents), dtype=np.uint8).copy()
    starts, stops = find_documents(content, np.cumsum(list(map(len, contents))).tolist(), document)
    assert [content[start:stop].tobytes() for start, stop in zip(starts, stops, strict=True)] == pieces
    kept = keep_documents(content, starts, stops)
    assert kept.tobytes() == b"".join(pieces)
    counts = count_characters(kept, np.cumsum(stops - starts))
    assert counts.tolist() == [len(piece.decode()) for piece in pieces]


@pytest.mark.parametrize("distinct", [200, 300, 40_000], ids=["8 bits", "16 bits", "32 bits"])
def test_characters_are_numbered_by_their_order_across_chunks(distinct: int) -> None:
    # Characters of one to three bytes, so that chunks of 256 KiB end inside of one.
    text = "".join(map(chr, range(40, 40 + distinct))) * (1_500_000 // distinct)
    tokens, characters = tokenize(np.frombuffer(text.encode(), dtype=np.uint8).copy(), "characters")
    assert characters == "".join(sorted(set(text)))
    assert (tokens.numpy().reshape(-1, distinct) == np.arange(distinct)).all()
    assert tokens.element_size() == {200: 1, 300: 2, 40_000: 4}[distinct]


def test_lines_are_counted_across_chunks() -> None:
    lines = ["ß€a\n" * 3, "b\n"] * 120_000
    sizes = [len(line.encode()) for line in lines]
    counts = count_characters(np.frombuffer("".join(lines).encode(), dtype=np.uint8), np.cumsum(sizes))
    assert counts.tolist() == list(map(len, lines))


@pytest.mark.parametrize(
    ("content", "byte"),
    [(b"ab\xff", "2"), (b"a" * (1 << 20) + b"\xff", "1,048,576"), ("a€".encode() * (1 << 18) + b"\xe2", "1,048,576")],
    ids=["at the start", "in the second chunk", "at the end"],
)
def test_the_first_byte_that_is_no_text_is_named(content: bytes, byte: str) -> None:
    with pytest.raises(UserError, match=rf"not UTF-8 \(byte {byte}\)"):
        tokenize(np.frombuffer(content, dtype=np.uint8).copy(), "characters")


@pytest.mark.parametrize("unit", ["bytes", "characters"])
@pytest.mark.parametrize("kind", [Text, Documents])
def test_a_text_takes_its_own_size_in_memory(kind: Callable[..., Any], unit: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes((b"x" * 998 + b"\n\n") * 20_000)
    (tmp_path / "b.txt").write_bytes((b"y" * 998 + b"\n\n") * 20_000)
    tracemalloc.start()
    try:
        data = kind(str(tmp_path), unit=unit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(data.train) > 10_000
    # What is added does not depend on the size: chunks, and a table of all characters.
    assert peak < 40e6 + 16e6


def test_a_file_that_does_not_end_where_it_should_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"became longer while it was read, or is not a regular file"):
        read_text("/proc/self/status")


# Packed rows: every target once, nothing across borders, and the same losses as the sequences alone.


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
