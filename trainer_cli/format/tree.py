"""Encode a state tree as JSON text and named tensors, and decode it exactly.

Null, booleans, numbers, strings, lists, and mappings with string keys are plain JSON. Every other value is a tag, a
mapping with the key `$`: tuples, other mappings, bytes, NaN and infinity, large integers, names of tensors and views.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import torch

from trainer_cli.format.views import View, find_views
from trainer_cli.manifest import UnsavableState
from trainer_cli.tensor_files import Leaf, TensorName

_VERSION = 1
_TAG = "$"
_DEEPEST = 64
"""Levels of a tree at most: far below the limits of recursion in Python and in other readers of JSON."""
_SMALL_INT = 2**53
_KEYS = (str, int, float, bool, type(None), bytes, tuple)


class Undecodable(ValueError):
    """The text cannot be the output of `encode`."""


_Find = Callable[[str], Any]
"""Name of a tensor -> what is put in its place."""


def encode(tree: Mapping[str, Any], *, share_views: bool = True) -> tuple[bytes, dict[str, Leaf]]:
    """The JSON text of a tree and the tensors to store by name, in the order of the tree. Tensors are not copied.

    Args:
        share_views: leave out tensors that are views of others; the text has their positions in these.

    Raises:
        UnsavableState: a value cannot be saved; the message names its owner, as `callbacks/ema/decay is a set`.
    """
    encoder = _Encoder()
    state = {}
    for key, value in tree.items():
        if type(key) is not str:
            raise UnsavableState(
                f"the state has the top-level key {key!r}, which is not a string", cure=f"Write it as {str(key)!r}."
            )
        state[key] = encoder.value(value, (key,))
    # After the whole tree: a view may come before its base.
    if share_views:
        encoder.share_views()
    # `allow_nan=False`: NaN is no JSON, and was tagged above.
    text = json.dumps({"version": _VERSION, "state": state}, allow_nan=False, separators=(",", ":"))
    return text.encode("ascii"), encoder.tensors


def decode(text: bytes, only: Collection[str] | None = None) -> Decoder:
    """Read the text of a tree, or of its top-level keys in `only`.

    Raises:
        Undecodable: the text is malformed; the message gives the reason.
    """
    try:
        # Python would read NaN and Infinity, which are no JSON.
        raw = json.loads(text.decode("ascii"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Undecodable(f"it is not JSON: {str(error)[:120]}") from None
    if not isinstance(raw, dict) or set(raw) != {"version", "state"} or not isinstance(raw["state"], dict):
        raise Undecodable("it does not hold a state")
    if raw["version"] != _VERSION:
        raise Undecodable(f"it has version {str(raw['version'])[:40]}, but this program knows {_VERSION}")
    state = raw["state"]
    return Decoder({key: value for key, value in state.items() if only is None or key in only})


class Decoder:
    """A decoded tree without its tensors. `wanted` has their names, and `tree` inserts them."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self.wanted: dict[str, bool] = {}
        """Name of each stored tensor -> whether it was a numpy array. Views are not in it, but their bases are."""
        self.views: dict[str, View] = {}
        """Name of each tensor that is a view of a stored one."""
        # A first walk without tensors collects `wanted` and `views`, and finds damage before a tensor is read.
        self._walk(lambda name: None)
        if unclear := self.wanted.keys() & self.views.keys():
            raise Undecodable(f"the tensor {min(unclear)[:80]!r} is also a view")

    def tree(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The tree, with the tensors that `wanted` names. They are not copied."""
        return self._walk((dict(tensors) | self.views_of(tensors)).__getitem__)

    def names(self) -> dict[str, Any]:
        """The tree with a `TensorName` in place of each tensor, and None in place of each array."""
        return self._walk(lambda name: None if self.wanted.get(name) else TensorName(name))

    def values(self) -> dict[str, Any]:
        """The tree with None in place of each tensor."""
        return self._walk(lambda name: None)

    def views_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that are views of those that `wanted` names."""
        by_geometry: dict[View, torch.Tensor] = {}
        views = {}
        for name, view in self.views.items():
            # Views of the same elements are one tensor, as the tied tensors that were saved.
            geometry = replace(view, name="")
            if geometry not in by_geometry:
                try:
                    by_geometry[geometry] = view.of(tensors[view.base])
                except ValueError as error:
                    raise Undecodable(str(error)) from None
            views[name] = by_geometry[geometry]
        return views

    def _walk(self, find: _Find) -> dict[str, Any]:
        """The tree with what `find` returns in place of each tensor; also fills `wanted` and `views`."""
        return {key: self._value(value, find, 1) for key, value in self._state.items()}

    def _value(self, raw: Any, find: _Find, depth: int) -> Any:
        """Decode a value of the JSON; `depth`: number of containers around it, with itself."""
        if depth > _DEEPEST:
            raise Undecodable(f"it is nested deeper than {_DEEPEST} levels")
        if isinstance(raw, list):
            return [self._value(value, find, depth + 1) for value in raw]
        if not isinstance(raw, dict):
            return raw
        if _TAG not in raw:
            return {key: self._value(value, find, depth + 1) for key, value in raw.items()}
        if set(raw) != {_TAG, "v"}:
            raise Undecodable("a tag has more than a value")
        return self._tagged(raw[_TAG], raw["v"], find, depth)

    def _tagged(self, tag: Any, raw: Any, find: _Find, depth: int) -> Any:
        """Decode the value of a tag."""
        if tag in ("tensor", "array", "scalar"):
            return self._leaf(tag, raw, find)
        if tag == "view":
            return self._view(raw, find)
        if tag in ("tuple", "size"):
            values = self._value(_check_list(raw), find, depth)
            return tuple(values) if tag == "tuple" else _decode_size(values)
        if tag in ("dict", "ordered", "counter"):
            return self._mapping(tag, _check_list(raw), find, depth)
        if tag in ("float", "int", "bytes", "str"):
            return _decode_scalar(tag, raw)
        raise Undecodable(f"it has the tag {str(tag)[:40]!r}, which does not exist")

    def _leaf(self, tag: str, name: Any, find: _Find) -> Any:
        """A tensor, an array or a numpy scalar by its name."""
        if not isinstance(name, str):
            raise Undecodable("the name of a tensor is not a string")
        self.wanted[name] = tag != "tensor"
        tensor = find(name)
        if tensor is None or tag == "tensor":
            return tensor
        try:
            array = tensor.numpy()
        except TypeError as error:
            raise Undecodable(f"{name[:80]!r} cannot be an array: {error}") from None
        # `[()]` makes a numpy scalar of an array without dimensions.
        return array if tag == "array" else array[()]

    def _view(self, raw: Any, find: _Find) -> Any:
        """A tensor that is a view of a stored one."""
        try:
            view = View.parse(raw)
        except ValueError as error:
            raise Undecodable(str(error)) from None
        if self.views.setdefault(view.name, view) != view:
            raise Undecodable(f"the view {view.name[:80]!r} is there twice")
        self.wanted.setdefault(view.base, False)
        return find(view.name)

    def _mapping(self, tag: str, raw: list[Any], find: _Find, depth: int) -> dict[Any, Any]:
        """A mapping of any kind from a list of (key, value); refuses keys that `encode` never writes."""
        mapping: dict[Any, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}[tag]()
        for pair in raw:
            if not isinstance(pair, list) or len(pair) != 2:
                raise Undecodable("a mapping is not a list of pairs")
            key, value = self._value(pair[0], find, depth + 1), self._value(pair[1], find, depth + 1)
            if type(key) not in _KEYS:
                raise Undecodable("a mapping has a key of a type that cannot be one")
            try:
                mapping[key] = value
            except TypeError:
                raise Undecodable("a mapping has a key of a type that cannot be one") from None
        if len(mapping) != len(raw):
            raise Undecodable("a mapping has the same key twice")
        return mapping


class _Encoder:
    """Collects the tensors of a tree while it is turned into JSON values."""

    def __init__(self) -> None:
        self.tensors: dict[str, Leaf] = {}
        """Tensors and arrays to store, by name."""
        self._tags: dict[str, dict[str, Any]] = {}
        """Name of a tensor -> its tag in the encoded tree."""

    def share_views(self) -> None:
        """Replace tensors that share memory by views of stored tensors."""
        bases, views = find_views({name: leaf for name, leaf in self.tensors.items() if _may_be_view(leaf)})
        for name, view in views.items():
            del self.tensors[name]
            # In place: the tree already contains this mapping.
            self._tags[name] |= _tag("view", view.to_json())
        self.tensors |= bases

    def value(self, value: Any, path: tuple[str, ...]) -> Any:
        """A value as JSON; `path`: the keys that lead to it.

        Raises:
            UnsavableState: it cannot be saved.
        """
        if len(path) > _DEEPEST:
            raise UnsavableState(
                f"{_shown(path)} is nested deeper than {_DEEPEST} levels, or holds itself",
                cure="Give it as a flat list or mapping.",
            )
        # The exact type: a subclass would be loaded as its base, so it is refused.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return _encode_text(value)
        if kind is int:
            # Some readers of JSON convert numbers to floats, which are exact up to 2**53.
            return value if abs(value) < _SMALL_INT else _tag("int", hex(value))
        if kind is float:
            return value if math.isfinite(value) else _tag("float", str(value))
        if kind is list:
            return self._items(value, path)
        if kind is dict and _is_plain_mapping(value):
            return {key: self.value(entry, (*path, key)) for key, entry in value.items()}
        if kind in (dict, OrderedDict, Counter):
            tag = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}[kind]
            pairs = [[self._key(key, path), self.value(entry, (*path, str(key)))] for key, entry in value.items()]
            return _tag(tag, pairs)
        if kind in (tuple, torch.Size):
            return _tag("tuple" if kind is tuple else "size", self._items(value, path))
        if kind is bytes:
            return _tag("bytes", base64.b64encode(value).decode("ascii"))
        return self._leaf(value, path)

    def _items(self, values: Collection[Any], path: tuple[str, ...]) -> list[Any]:
        """The elements of a list or tuple as JSON."""
        # Faster for long lists of strings, such as the words of a vocabulary.
        if set(map(type, values)) == {str}:
            return list(map(_encode_text, values))
        return [self.value(value, (*path, str(index))) for index, value in enumerate(values)]

    def _key(self, key: Any, path: tuple[str, ...]) -> Any:
        """A key of a mapping as JSON; `path`: that of the mapping."""
        if type(key) not in _KEYS or not _is_plain_key(key):
            raise UnsavableState(
                f"{_shown(path)} has the key {key!r}, a {_name_of(type(key))}, which cannot be saved",
                cure="Use strings, numbers, or tuples of them as keys.",
            )
        return self.value(key, path)

    def _leaf(self, value: Any, path: tuple[str, ...]) -> Any:
        """Store a tensor, an array or a numpy scalar, and return its tag; refuse any other value."""
        if isinstance(value, torch.Tensor):
            name = self._name(value, path)
            self._tags[name] = _tag("tensor", name)
            return self._tags[name]
        if isinstance(value, np.ndarray | np.generic):
            if type(value) is not np.ndarray and not isinstance(value, np.generic):
                raise _unsavable(value, path)
            return _tag("array" if isinstance(value, np.ndarray) else "scalar", self._name(np.asarray(value), path))
        raise _unsavable(value, path)

    def _name(self, leaf: Leaf, path: tuple[str, ...]) -> str:
        """Store a tensor under its path; keys are escaped as in a JSON pointer. Returns its unique name."""
        plain = "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)
        plain = plain.encode("utf-8", "replace").decode("utf-8")
        name, serial = plain, 1
        # Two paths can have the same text, as with the keys 1 and "1".
        while name in self.tensors or name == "__metadata__":
            serial += 1
            name = f"{plain}#{serial}"
        self.tensors[name] = leaf
        return name


def _may_be_view(leaf: Leaf) -> TypeGuard[torch.Tensor]:
    """Whether it is a plain dense tensor with elements, which are in its storage unchanged."""
    if not isinstance(leaf, torch.Tensor) or type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        return False
    # A conjugate or a negative is computed when it is read.
    return leaf.numel() > 0 and not leaf.is_conj() and not leaf.is_neg()


def _is_plain_mapping(value: dict[Any, Any]) -> bool:
    """Whether a mapping can be written as a plain JSON object."""
    # A mapping with the key of tags would be read as a tag.
    return all(type(key) is str and key != _TAG and _is_sound(key) for key in value)


def _tag(tag: str, value: Any) -> dict[str, Any]:
    """A value that JSON lacks, with the name of its kind."""
    return {_TAG: tag, "v": value}


def _encode_text(value: str) -> Any:
    """A string as JSON, tagged if it has lone surrogates."""
    if _is_sound(value):
        return value
    # JSON would join two lone surrogates into one character.
    return _tag("str", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode("ascii"))


def _is_sound(text: str) -> bool:
    """Whether a string has no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_plain_key(key: Any) -> bool:
    """Whether a key can be saved: of a plain type, and a tuple of such keys if it is one."""
    return type(key) in _KEYS and (type(key) is not tuple or all(map(_is_plain_key, key)))


def _decode_scalar(tag: str, raw: Any) -> Any:
    """The value of a tag `float`, `int`, `bytes` or `str`."""
    if not isinstance(raw, str):
        raise Undecodable(f"a tag {tag} holds no text")
    try:
        if tag == "int":
            return int(raw, 16)
        if tag == "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[raw]
        content = base64.b64decode(raw, validate=True)
        return content if tag == "bytes" else content.decode("utf-8", "surrogatepass")
    except (ValueError, KeyError):
        raise Undecodable(f"a tag {tag} holds {raw[:40]!r}") from None


def _decode_size(sizes: list[Any]) -> torch.Size:
    """The shape with these sizes; raise Undecodable if one is not a size."""
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise Undecodable("a shape holds an invalid size")
    return torch.Size(sizes)


def _check_list(raw: Any) -> list[Any]:
    """The value of a tag if it is a list. Raises Undecodable if it is not."""
    if not isinstance(raw, list):
        raise Undecodable("a tag that needs a list has none")
    return raw


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _shown(path: tuple[str, ...]) -> str:
    """A path for messages: at most eight keys, without lone surrogates."""
    shown = "/".join(path if len(path) <= 8 else (*path[:8], "…"))
    return shown.encode("utf-8", "replace").decode("utf-8")


def _name_of(kind: type) -> str:
    """The full name of a class, for a builtin one without its module."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _unsavable(value: Any, path: tuple[str, ...]) -> UnsavableState:
    """The error of a value that no checkpoint can hold."""
    return UnsavableState(
        f"{_shown(path)} is a {_name_of(type(value))}, which cannot be saved in a checkpoint",
        cure="Give it as numbers, strings, lists, tuples, mappings, bytes or tensors.",
    )
