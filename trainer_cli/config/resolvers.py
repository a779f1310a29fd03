"""Register resolvers of interpolations: the functions of a project's `configs/resolvers.py`, and `${now:…}`.

    def mul(a, b):          # configs/resolvers.py
        return a * b

    lr: ${mul:${data.batch_size},0.001}

The file is always that of the current project: a recovered config uses the resolvers of the project in which it is
opened, and no others.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isroutine
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from trainer_cli.components import import_from
from trainer_cli.config.hydra_compat import register_hydras_resolvers, resolver_names
from trainer_cli.config.search_path import label
from trainer_cli.config.tree import Node
from trainer_cli.errors import Code, ConfigError
from trainer_cli.keys import list_keys
from trainer_cli.values import kind_of

FILE = "resolvers.py"
TIME_VARIABLE = "TRAIN_MOMENT"
"""Environment variable with the time at which the command began, for the processes that it starts."""
_MODULE = "_resolvers_of_the_configs"
_NOW = re.compile(r"\$\{\s*now\s*:([^{}]*)\}")
_registered: dict[str, Callable[..., Any]] = {}
"""Resolvers of the file that was read last."""
_read: list[Any] = []
"""Path and content of that file."""


def register_resolvers(dirs: Sequence[Path], root: Path) -> None:
    """Make Hydra's resolvers known, and the functions of the first `resolvers.py` in these folders of configs.

    Raises:
        ConfigError: the file cannot be executed, or defines a name that is a resolver already.
    """
    register_hydras_resolvers()
    file = next((folder / FILE for folder in dirs if (folder / FILE).is_file()), None)
    content = [file, file.read_bytes()] if file is not None else []
    # Registration is global in OmegaConf: a process that composes twice registers each file once.
    if content == _read:
        return
    for name in _registered:
        OmegaConf.clear_resolver(name)
    _registered.clear()
    _read[:] = []
    if file is None:
        return
    import_from(root)
    name = label(file, root)
    for function, value in _functions(file, name):
        if function in resolver_names():
            raise _resolver_error(
                f"{name} defines {function!r}, which is a resolver already", name, "Give it another name."
            )
        OmegaConf.register_new_resolver(function, value)
        _registered[function] = value
    _read[:] = content


def _functions(file: Path, name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Execute a file, called `name` in messages. Yields the names and functions that it defines itself.

    Raises:
        ConfigError: it fails, or registers resolvers of its own.
    """
    spec = spec_from_file_location(_MODULE, file)
    assert spec is not None
    module = module_from_spec(spec)
    names_before = resolver_names()
    sys.modules[_MODULE] = module  # Dataclasses and pickle look up a module by name.
    try:
        # From its text: a cached bytecode file with the same size and time may be of an older text.
        exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        line = error.lineno if isinstance(error, SyntaxError) else (frames[-1].lineno if frames else None)
        message = f"{name} fails: {type(error).__name__}: {error}"
        raise _resolver_error(message, f"{name}:{line}" if line else name) from error
    finally:
        added = sorted(resolver_names() - names_before)
        for resolver in added:
            OmegaConf.clear_resolver(resolver)
    if added:
        # It could register any function, such as eval, which a recovered config could then call.
        message = f"{name} registers {', '.join(added)} by OmegaConf.register_new_resolver"
        raise _resolver_error(message, name, f"Define a function instead: def {added[0]}(…).")
    # Its own functions: an imported one, such as os.system, must not become a resolver.
    for function, value in vars(module).items():
        if not function.startswith("_") and isroutine(value) and value.__module__ == _MODULE:
            yield function, value


def _resolver_error(message: str, where: str, hint: str | None = None) -> ConfigError:
    """An error in a `resolvers.py`."""
    return ConfigError(message, source=where, code=Code.unresolved, hint=hint)


@contextmanager
def share_time() -> Iterator[None]:
    """Within it, every composition takes `${now:…}` from one time, also in processes that are started."""
    outer = os.environ.get(TIME_VARIABLE)
    # In the environment, so that ranks and restarts that this process starts use the same time.
    os.environ.setdefault(TIME_VARIABLE, datetime.now().isoformat())
    try:
        yield
    finally:
        if outer is None:
            del os.environ[TIME_VARIABLE]


def substitute_now(root: Node) -> tuple[list[str], list[ConfigError]]:
    """Replace `${now:FORMAT}` by the time. Returns the keys that contain it, and the mistakes.

    The value is written to the run's config, so that a run and its resumes have the same one.
    """
    resolved = os.environ.get(TIME_VARIABLE)
    time = datetime.fromisoformat(resolved) if resolved else datetime.now()
    keys: list[str] = []
    mistakes: list[ConfigError] = []
    kinds = {entry.path: kind_of(entry.kind) for entry in list_keys()}
    for path, node in root.walk():
        if not node.is_interpolation or "now" not in node.value:
            continue
        key = ".".join(path)
        resolved = _NOW.sub(lambda match: time.strftime(match[1].strip().strip("'\"")), node.value)
        if re.search(r"\$\{\s*now\s*:", resolved):
            message, hint = (
                f"{key}: the format in {node.value} is an interpolation itself",
                "Write it out, such as ${now:%Y-%m-%d}.",
            )
            mistakes.append(
                ConfigError(message, location=key, source=node.origin.source, code=Code.unresolved, hint=hint)
            )
        elif resolved != node.value:
            keys.append(key)
        # A year alone, for a key that takes numbers and no strings.
        kind = kinds.get(path)
        takes_number = kind is not None and not kind.names.isdisjoint(("int", "float")) and "str" not in kind.names
        is_number = resolved != node.value and takes_number and resolved.isdecimal()
        node.value = int(resolved) if is_number else resolved
    return keys, mistakes
