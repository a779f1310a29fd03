"""Look through a pickle before it is loaded: which classes it names, and whether time and memory are bounded."""

from __future__ import annotations

import pickletools
from collections.abc import Iterable
from encodings import normalize_encoding
from typing import Any, Protocol, cast

_MOST_OPCODES = 10_000_000
"""Each may make an object of about 100 bytes."""
_LARGEST_TUPLE = 2**20
"""Work of hashing it, in elements; each level of nesting doubles the work of those below, so none is deeper than 20."""
_MOST_WORK = 50_000_000
"""Sum of the work of hashing every object that is put into a container or given to a call."""
_MARK = 0
_TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_SLOW_CODECS = frozenset({"punycode", "idna"})
"""Codecs that take time with the square of a text's length."""


class Stream(Protocol):
    """A file, or a map of one in memory."""

    def read(self, n: int, /) -> bytes: ...

    def readline(self) -> bytes: ...

    def tell(self) -> int: ...


class Ignored:
    """Stands for an object that holds no weights: takes what its class takes, and keeps nothing of it."""

    __slots__ = ()

    def __new__(cls, *args: Any) -> Ignored:
        return object.__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def names_in(pickle: Stream) -> set[str]:
    """The classes and functions that one pickle names, as `module name`; the stream then stands behind it.

    A tuple can hold another one several times, that one a third, and so on: a hash of the first then visits the last
    exponentially often, and recurses in C without a limit. So the work of hashing is added up from the opcodes alone.

    Raises:
        ValueError: it is malformed, or takes too much time or memory to load.
    """
    names: set[str] = set()
    try:
        _follow(pickle, names)
    except LookupError:
        raise ValueError("its pickle is malformed: it takes an object that is not there") from None
    except (ValueError, OverflowError) as error:
        raise ValueError(f"its pickle is malformed or too large: {error}") from None
    if "_codecs encode" not in names:
        names.difference_update(f"_codecs {codec}" for codec in _SLOW_CODECS)
    return names


def _follow(pickle: Stream, names: set[str]) -> None:
    stack: list[int] = []  # The work of hashing each object; 0 is a mark.
    memo: dict[int, int] = {}
    work = 0
    opcodes = pickletools.genops(cast(Any, pickle))
    for count, (opcode, arg, _) in enumerate(cast(Iterable[tuple[pickletools.OpcodeInfo, Any, Any]], opcodes)):
        name = opcode.name
        if count > _MOST_OPCODES or work > _MOST_WORK:
            raise ValueError("it holds too many objects")
        if name == "MARK":
            stack.append(_MARK)
        elif name in _PUTS:
            memo[len(memo) if arg is None else arg] = stack[-1]
        elif name in _GETS:
            stack.append(memo[arg])
        elif name == "DUP":
            stack.append(stack[-1])
        elif not opcode.stack_before:
            if name == "GLOBAL":
                names.add(arg)
            elif isinstance(arg, str) and (codec := _slow_codec(arg)):
                names.add(f"_codecs {codec}")
            stack += [1] * len(opcode.stack_after)
        else:
            taken = _taken(stack, opcode)
            if name == "INST":
                names.add(arg)
            if name in _TUPLES:
                size = 1 + sum(2 * one if one > 1 else 1 for one in taken)
                if size > _LARGEST_TUPLE:
                    raise ValueError("it nests tuples too deep")
                stack.append(size)
            else:
                work += sum(taken)
                stack += [1] * len(opcode.stack_after)


def _slow_codec(text: str) -> str | None:
    """The slow codec that a text names; `codecs` takes no notice of letter case, and of punctuation around it."""
    text = text.lower()
    return next((one for one in _SLOW_CODECS if one in text and normalize_encoding(text) == one), None)


def _taken(stack: list[int], opcode: pickletools.OpcodeInfo) -> list[int]:
    """Remove from the stack what an opcode takes, and return it."""
    before = opcode.stack_before
    taken: list[int] = []
    plain = len(before)
    if pickletools.markobject in before:
        plain = before.index(pickletools.markobject)
        while (one := stack.pop()) != _MARK:
            taken.append(one)
    for _ in range(plain):
        taken.append(stack.pop())
        if taken[-1] == _MARK:
            raise ValueError("it takes an object that is not there")
    return taken
