"""Text is read, divided and numbered in its own memory, with the results of the plain way."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_cli.addons.text.read_text import count_characters, find_documents, keep_documents, read_text, tokenize
from trainer_cli.addons.text.text import Documents, Text
from trainer_cli.errors import UserError

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
