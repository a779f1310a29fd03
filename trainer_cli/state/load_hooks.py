"""What the modules of a model make of a state by their own hooks of `load_state_dict`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_EXTRA = "_extra_state"


@dataclass(slots=True)
class Translation:
    """A state under the names of the present modules, and what `load_state_dict` says of it."""

    values: dict[str, Any] = field(default_factory=dict)
    excused: frozenset[str] = frozenset()
    """Keys of the model that the state lacks, and of the state that the model lacks, without an error of a strict
    load."""
    errors: list[str] = field(default_factory=list)


def make_metadata(origins: Mapping[str, str], versions: Mapping[str, int] | None) -> dict[str, dict[str, int]]:
    """What torch writes into `_metadata` of a state dict: for each path of a module its version.

    Args:
        origins: names of tensors -> those that they had in the saved model.
        versions: paths of modules in the saved model -> versions other than 1; None: they are not known.
    """
    metadata: dict[str, dict[str, int]] = {}
    if versions is None:
        return metadata
    for path, origin in origins.items():
        # From the tensor up to the root of either model.
        while path and origin:
            path, origin = path.rpartition(".")[0], origin.rpartition(".")[0]
            if path in metadata:
                break
            metadata[path] = {"version": versions.get(origin, 1)}
    return metadata


def make_state_dict(values: Mapping[str, Any], metadata: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """A state dict that has the versions of its modules where torch looks for them."""
    state = OrderedDict(values)
    vars(state).update(_metadata=metadata)
    return state


def translate(model: nn.Module, state: Mapping[str, Any], metadata: Mapping[str, Mapping[str, int]]) -> Translation:
    """The state as the modules see it when it is loaded; no tensor of the model is changed.

    Modules translate what older versions of them have saved in pre-hooks, and in overrides of `_load_from_state_dict`
    and `load_state_dict`: torch's weight norm, BatchNorm without a counter, a user's own.
    """
    result = Translation()
    with _without_copies(result.values) as compared:
        try:
            differing: Any = model.load_state_dict(make_state_dict(state, metadata), strict=False)
        except RuntimeError as error:
            result.errors.append(" ".join(str(error).split()))
            differing = None
    if differing is not None:
        # The hooks that run last may take names out of these lists, so that a strict load needs no such names.
        result.excused = frozenset(compared).difference(differing.missing_keys, differing.unexpected_keys)
    return result


@contextmanager
def _without_copies(values: dict[str, Any]) -> Iterator[list[str]]:
    """Within it modules run their hooks when they are loaded and compare names, but copy nothing.

    Args:
        values: gets what would be copied, and what is of no module.

    Yields the keys that only the model or only the state has.
    """
    compared: list[str] = []

    def compare(
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        for hook in module._load_state_dict_pre_hooks.values():
            hook(state, prefix, metadata, strict, missing, unexpected, errors)
        names = {
            name
            for name, value in (*module._parameters.items(), *module._buffers.items())
            if value is not None and name not in module._non_persistent_buffers_set
        }
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            names.add(_EXTRA)
        absent = [prefix + name for name in names if prefix + name not in state]
        children = {name for name, child in module._modules.items() if child is not None}
        extra = []
        for key in [key for key in state if key.startswith(prefix)]:
            name, _, rest = key.removeprefix(prefix).partition(".")
            # A child takes its part of the state when its turn comes.
            if not rest or name not in children:
                values[key] = state[key]
                extra += [key] if rest or name not in names else []
        missing += absent
        unexpected += extra
        compared.extend([*absent, *extra])

    copying = nn.Module._load_from_state_dict
    # Overrides translate the state and then call this method, which copies.
    nn.Module._load_from_state_dict = compare  # type: ignore[method-assign,assignment]
    try:
        yield compared
    finally:
        nn.Module._load_from_state_dict = copying  # type: ignore[method-assign]
