"""What a config that was found on disk may reach: the directory of its run, and flags of `torch.backends`.

`components/targets.py` decides which components such a config may name; this module checks the arguments that they
get. A value that the user gives, on the command line or by a choice from the project's own configs, is not bounded.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer_cli.callbacks import ScopedFlags
from trainer_cli.catalog import Catalog
from trainer_cli.components import Trust
from trainer_cli.errors import ConfigError, TrainError
from trainer_cli.files import as_path, is_url
from trainer_cli.signatures import CheckedArguments

log = logging.getLogger(__name__)

_FLAGS = "torch.backends"


def check_reach(component: Any, where: str, trust: Trust, run_dir: Path | None) -> None:
    """Refuse a component of a recovered config that would write outside the run's directory, or set other flags.

    Args:
        where: its key path.
        run_dir: the directory of the run; None: the component writes nothing there.

    Raises:
        ConfigError: with the argument that reaches further.
    """
    if trust.unrestricted or not isinstance(component, CheckedArguments):
        return
    for argument, value in _find_reach(component, run_dir):
        _refuse(f"{where}.{argument}", value, trust)


def check_partial(target: Any, where: str, trust: Trust) -> None:
    """Refuse `_partial_` of a component whose arguments `check_reach` would check: they may be given later.

    Raises:
        ConfigError: the config is recovered.
    """
    if trust.unrestricted or not (inspect.isclass(target) and issubclass(target, CheckedArguments)):
        return
    if target.writes or issubclass(target, ScopedFlags):
        message = f"_partial_ of {target.__name__} is refused, since the config comes from disk"
        raise ConfigError(message, location=where)


def _find_reach(component: CheckedArguments, run_dir: Path | None) -> Iterator[tuple[str, str]]:
    """The arguments of a component that lead out of the run, with their values."""
    # Components write during a fit, which has a directory.
    for name in component.writes:
        path = getattr(component, name)
        if run_dir is not None and path is not None and is_outside(path, run_dir):
            yield name, str(path)
    if isinstance(component, ScopedFlags):
        for section in ("fit", "train", "validate"):
            for flag, value in getattr(component, section).items():
                is_public_flag = flag.startswith(f"{_FLAGS}.") and "._" not in flag
                if not is_public_flag:
                    yield f"{section}.{flag}", str(value)


def check_folder(key: str, folder: str | Path | None, trust: Trust, run_dir: Path, run_id: str | None = None) -> None:
    """Refuse a folder of a recovered config that is neither in the run's directory, nor holds checkpoints of the run.

    Raises:
        ConfigError: naming the key.
    """
    if not trust.unrestricted and folder is not None and not is_of_run(folder, run_dir, run_id):
        _refuse(key, str(folder), trust)


def own_folder(key: str, folder: str | None, trust: Trust, run_dir: Path | None) -> str | None:
    """The folder for results of an evaluation; None for the default one.

    A folder outside of the run that a recovered config names is not used, with a warning.
    """
    if folder is None or not trust.bounds(key) or (run_dir is not None and is_of_run(folder, run_dir)):
        return folder
    log.warning("%s=%s is of a config on disk, and not used: if it is meant, give it on the command line", key, folder)
    return None


def is_of_run(folder: str | Path, run_dir: Path, run_id: str | None = None) -> bool:
    """Whether a folder is in the run's directory, or holds checkpoints of the run."""
    path = as_path(folder)
    if not is_url(path) and not is_outside(path.absolute(), run_dir):
        return True
    try:
        return run_id is not None and bool(Catalog.of(path).valid(run_id))
    except (OSError, TrainError):
        return False


def is_outside(path: str | Path, run_dir: Path) -> bool:
    """Whether a path, relative to the run's directory, leads out of it: by itself, or by a link."""
    if str(path).startswith(("http://", "https://")):
        return False  # A server, to which a logger sends what is logged.
    if is_url(path):
        return True
    folder = os.path.realpath(run_dir)
    real_path = os.path.realpath(os.path.join(folder, path))
    # With a separator, as /runs/ab begins with /runs/a and is not inside it; the directory itself is inside.
    return not (real_path + os.sep).startswith(folder + os.sep)


def _refuse(key: str, value: str, trust: Trust) -> None:
    """Raise ConfigError for a value that reaches beyond the run, unless the user has given it."""
    if trust.bounds(key):
        raise ConfigError(
            f"{key} is {value!r}, which reaches beyond the run, and the config comes from disk",
            location=key,
            hint=f"If it is meant, give it on the command line: '{key}={value}'.",
        )
