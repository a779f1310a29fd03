"""Token ids in files of any size: windows of one length, read when they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_cli.addons.text.text import IGNORED, collate_rows
from trainer_cli.addons.text.token_file import DTYPES, TokenFile, TokenReader, Tokens, inspect, list_files, sample_parts
from trainer_cli.errors import UserError
from trainer_cli.terminal import format_count
from trainer_cli.values import check_choice, check_whole

Span = tuple[TokenFile, int, int]
"""(file, start, stop): tokens of a file that are used."""


class TokenFiles:
    """Token ids in `.bin` and `.npy` files, cut into windows of `context` tokens. Files of any size need no memory.

    A `.bin` file has tokens of type `dtype` alone, as nanoGPT writes it, or the header of llm.c before them. A `.npy`
    file is one array of whole numbers as `np.save` writes it, or tokens of type `dtype` alone, as OLMo-core writes it.

    Windows lie side by side and none crosses from one file to the next, so each token is a target once in an epoch;
    the tokens after the last whole window of a file are left out. Ids are checked against `vocab_size` in a few parts
    of each file at the start, and in each window that is read, on the CPU.

    Args:
        path: a file, a pattern (`*`, `**`), a folder, or a list of these.
        vocab_size: number of different tokens of the tokenizer.
        dtype: `uint16` or `uint32`, of files that do not say it.
        end_token: id with which a document ends; null: windows have no boundaries. With it, samples are packed rows
            as those of `trainer_cli.Packing`: no token attends to an earlier document, and none is predicted from one.
        val_path: files to hold out, like `path`; null: the last `val_fraction` of all tokens.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        vocab_size: int,
        context: int = 1024,
        dtype: str = "uint16",
        end_token: int | None = None,
        val_path: str | Sequence[str] | None = None,
        val_fraction: float = 0.01,
    ) -> None:
        _check_numbers(vocab_size=vocab_size, context=context, val_fraction=val_fraction, end_token=end_token)
        check_choice("data.dtype", dtype, DTYPES)
        self.vocab_size, self.context = vocab_size, context
        paths = list_files(path, "data.path")
        held_out = [] if val_path is None else list_files(val_path, "data.val_path")
        if shared := {file.resolve() for file in paths} & {file.resolve() for file in held_out}:
            raise UserError(
                f"{str(min(shared))!r} is in data.path and in data.val_path",
                where="data.val_path",
                cure="A file that is held out must not be trained on: change one of the two.",
            )
        reader = TokenReader()
        files = _inspect_files(paths, "data.path", dtype, reader, context=context, vocab_size=vocab_size)
        total = sum(file.count for file in files)
        train, val = _split(files, total if held_out else total - round(total * val_fraction))
        if held_out:
            where = "data.val_path"
            val_files = _inspect_files(held_out, where, dtype, reader, context=context, vocab_size=vocab_size)
            val = [(file, 0, file.count) for file in val_files]

        def make_windows(spans: Sequence[Span]) -> TokenWindows:
            return TokenWindows(spans, reader, context=context, vocab_size=vocab_size, end_token=end_token)

        self.train = make_windows(train)
        self.val = make_windows(val) if held_out or val_fraction else None
        if len(self.train) == 0 or (self.val is not None and len(self.val) == 0):
            raise UserError(
                f"{format_count(total, 'token')}, {val_fraction:g} of them held out, are too few for windows of "
                f"{context:,}",
                where="data",
                cure="Give more tokens, or change data.context, data.val_fraction or data.val_path.",
            )


class TokenWindows:
    """Windows of `context` tokens of `spans`, side by side.

    A sample is (tokens, next tokens), both (context,). With `end_token` it is a packed row; see
    `trainer_cli.addons.text.text.PackedRows`.
    """

    deterministic = True

    def __init__(
        self, spans: Sequence[Span], reader: TokenReader, *, context: int, vocab_size: int, end_token: int | None
    ) -> None:
        self._spans, self._reader = spans, reader
        self._context, self._vocab_size, self._end_token = context, vocab_size, end_token
        # A window needs the token after it, which is also the first one of the next window.
        windows = [max(0, stop - start - 1) // context for _, start, stop in spans]
        self._ends = np.cumsum(windows, dtype=np.int64)
        facts = [(file.path.name, file.size, file.digest, start, stop) for file, start, stop in spans]
        # Names without folders, so that the data may be moved or read on another machine.
        self.fingerprint = blake2b(repr((context, end_token, facts)).encode(), digest_size=16).hexdigest()
        if end_token is not None:
            self.collate: Callable[[Sequence[Any]], Any] = collate_rows

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        # Targets of cross_entropy must have 64 bits.
        windows = np.empty((len(indices), self._context + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            file, start = self._find(index)
            windows[row] = self._reader.read(file, start, self._context + 1)
        # One comparison for all, on the CPU: on a GPU a wrong id ends the process without a word about its file.
        if windows.min(initial=0) < 0 or windows.max(initial=0) >= self._vocab_size:
            for row, index in enumerate(indices):
                check_ids(windows[row], *self._find(index), self._vocab_size)
        if self._end_token is None:
            tensor = torch.from_numpy(windows)
            return list(zip(tensor[:, :-1].unbind(), tensor[:, 1:].unbind(), strict=True))
        return [mark_documents(window, self._end_token) for window in windows]

    def _find(self, index: int) -> tuple[TokenFile, int]:
        """The file of a window, and the position of its first token."""
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not one of {format_count(len(self), 'window')}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        file, start, _ = self._spans[number]
        before = int(self._ends[number - 1]) if number else 0
        return file, start + (index - before) * self._context


def mark_documents(window: Tokens, end_token: int) -> dict[str, Any]:
    """A window of n + 1 tokens as a packed row of n, in which a document ends with each `end_token`."""
    tokens, following = torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])
    # Repeated end tokens are one border, so that a window of them alone has targets, and so a loss.
    borders = (tokens == end_token) & (following != end_token)
    starts = torch.cat([torch.zeros(1, dtype=torch.bool), borders[:-1]])
    places = torch.arange(len(tokens))
    return {
        "tokens": tokens,
        "targets": torch.where(borders, IGNORED, following),
        "segments": starts.cumsum(0) + 1,
        "positions": places - torch.where(starts, places, 0).cummax(0).values,
        "count": len(tokens) - int(borders.sum()),
    }


def check_ids(tokens: Tokens, file: TokenFile, start: int, vocab_size: int) -> None:
    """Raise UserError if one of the tokens, which begin at `start`, is not in the vocabulary."""
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(wrong):
        raise UserError(
            f"token {start + wrong[0]:,} of {str(file.path)!r} is {tokens[wrong[0]]}, and data.vocab_size is "
            f"{vocab_size:,}",
            where="data.vocab_size",
            cure="Give the size of the tokenizer that wrote the file, or the data.dtype that it was written with.",
        )


def _inspect_files(
    paths: Sequence[Path], where: str, dtype: str, reader: TokenReader, *, context: int, vocab_size: int
) -> list[TokenFile]:
    """The files with their digests. Raises UserError if one is too short, or has a wrong id in a sampled part."""
    files = []
    for path in paths:
        file = inspect(path, dtype, where)
        if file.count <= context:
            raise UserError(
                f"{str(path)!r} has {format_count(file.count, 'token')}, too few for a window of {context:,} and the "
                "next token",
                where=where,
                cure="Leave the file out, join it with another one, or change data.context.",
            )
        parts, digest = sample_parts(file, reader, len(paths))
        for start, tokens in parts:
            check_ids(tokens, file, start, vocab_size)
        _check_width(file, [tokens for _, tokens in parts], where)
        files.append(replace(file, digest=digest))
    return files


def _check_width(file: TokenFile, parts: Sequence[Tokens], where: str) -> None:
    """Raise UserError if 16 bits are read of tokens of 32: every second token would be 0, and no other check fails."""
    may_be_wider = file.dtype.itemsize == 2 and file.offset == 0
    if may_be_wider and any(tokens.any() for tokens in parts) and not any(tokens[1::2].any() for tokens in parts):
        raise UserError(
            f"every second token of {str(file.path)!r} is 0, as if its tokens had 32 bits",
            where=where,
            cure="Use data.dtype=uint32.",
        )


def _split(files: Sequence[TokenFile], size: int) -> tuple[list[Span], list[Span]]:
    """The spans of the first `size` tokens of the files, and those of all others."""
    head, tail, position = [], [], 0
    for file in files:
        cut = min(max(size - position, 0), file.count)
        position += file.count
        if cut > 0:
            head.append((file, 0, cut))
        if cut < file.count:
            tail.append((file, cut, file.count))
    return head, tail


def _check_numbers(*, vocab_size: int, context: int, end_token: int | None, val_fraction: float) -> None:
    """Raise UserError for a number that is not within its bounds."""
    check_whole("data.vocab_size", vocab_size, 1)
    check_whole("data.context", context, 1 if end_token is None else 2)
    if end_token is not None:
        check_whole("data.end_token", end_token, 0)
        if end_token >= vocab_size:
            message = f"data.end_token is {end_token}, and data.vocab_size is {vocab_size:,}"
            raise UserError(message, where="data.end_token")
    if not isinstance(val_fraction, int | float) or not 0 <= val_fraction < 1:
        raise UserError(
            f"data.val_fraction is {val_fraction!r}, but it must be at least 0 and below 1", where="data.val_fraction"
        )
