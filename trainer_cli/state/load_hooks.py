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
    """The `_metadata` that torch writes into a state dict: path of a module -> its version.

    Args:
        origins: names of tensors -> their names in the saved model.
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
    """A state dict with the versions of its modules in the attribute that torch reads."""
    state = OrderedDict(values)
    vars(state).update(_metadata=metadata)
    return state


def translate(model: nn.Module, state: Mapping[str, Any], metadata: Mapping[str, Mapping[str, int]]) -> Translation:
    """The state after the modules have translated it for loading; no tensor of the model is changed.

    Modules translate what older versions of them have saved, by pre-hooks and by overrides of `_load_from_state_dict`
    and `load_state_dict`. Examples are torch's weight norm, BatchNorm without a counter, and modules of users.
    """
    result = Translation()
    with _without_copies(result.values) as differing_keys:
        try:
            loaded: Any = model.load_state_dict(make_state_dict(state, metadata), strict=False)
        except RuntimeError as error:
            result.errors.append(" ".join(str(error).split()))
            return result
    # The hooks that run last may take keys out of torch's lists, so that a strict load does not refuse them.
    result.excused = frozenset(differing_keys).difference(loaded.missing_keys, loaded.unexpected_keys)
    return result


@contextmanager
def _without_copies(values: dict[str, Any]) -> Iterator[list[str]]:
    """Have modules, when they are loaded inside the block, run their hooks and compare names, but copy nothing.

    Yields a list that gets the keys that only the model or only the state has.

    Args:
        values: gets what would be copied, and what belongs to no module.
    """
    differing_keys: list[str] = []

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
        """Take the place of a module's own `_load_from_state_dict`: run its hooks, compare, and load nothing."""
        for hook in module._load_state_dict_pre_hooks.values():
            hook(state, prefix, metadata, strict, missing, unexpected, errors)
        # From here on as `nn.Module._load_from_state_dict`, whose place it takes.
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
            name, _, inner_name = key.removeprefix(prefix).partition(".")
            # The keys of a child are handled when the child is loaded.
            if not inner_name or name not in children:
                values[key] = state[key]
                extra += [key] if inner_name or name not in names else []
        missing += absent
        unexpected += extra
        differing_keys.extend([*absent, *extra])

    copying = nn.Module._load_from_state_dict
    # Overrides translate the state and then call this method, which copies.
    nn.Module._load_from_state_dict = compare  # type: ignore[method-assign,assignment]
    try:
        yield differing_keys
    finally:
        nn.Module._load_from_state_dict = copying  # type: ignore[method-assign]
