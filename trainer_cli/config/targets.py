"""What a `_target_` may name: found by its path, judged by what it turns out to be.

The user's own config may name any class or function that Hydra does not block. A recovered config (from a run
directory or a checkpoint) is data from disk: its path must begin with a trusted package before anything is
imported, and the object found must itself come from one, so that no alias leads out.
"""

from __future__ import annotations

import importlib
import inspect
import keyword
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra._internal.target_policy import _authorize_target_name, _get_resolved_target_name_for_check
from hydra.errors import InstantiationException

from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError

OURS = "trainer_cli"
COMPONENTS = tuple(f"{OURS}.{part}" for part in ("callbacks", "data", "loggers", "models", "testing", "trainer"))
TORCH_CLASSES = ("torch.nn.modules", "torch.optim")


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose targets may run. `packages` null: the config is the user's own."""

    packages: frozenset[str] | None = None

    @classmethod
    def recovered(cls, project: Path, extra: list[str]) -> Trust:
        """Trust for a config from disk: the project's own packages, and those named by `trust=`."""
        return cls(frozenset(project_packages(project)) | frozenset(extra))


def component(path: str, where: str, trust: Trust) -> Callable[..., Any]:
    """The class or function that a `_target_` names, imported only if it may be.

    Raises:
        ConfigError: not importable, no class or function, blocked, or not trusted.
    """
    check_name(path, where, trust)
    found = resolve(path, where)
    check_allowed(found, path, where, trust)
    assert callable(found)
    return found


def resolve(path: str, where: str) -> object:
    """The object at a dotted path.

    Raises:
        ConfigError: naming the first part that is not there, and the nearest that is. An error inside the
            module that is imported is passed on with a note.
    """
    parts = path.split(".") if isinstance(path, str) else []
    if len(parts) < 2 or not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise ConfigError(f"_target_ {path!r} is no dotted name", where=where, cure="Write package.module.Name.")
    found: Any = _module(parts[0], path, where)
    for depth, part in enumerate(parts[1:], start=1):
        above = ".".join(parts[:depth])
        # The module first where there is one: a package may hold a function of its module's name only later.
        try:
            found = getattr(found, part)
        except AttributeError:
            if not isinstance(found, ModuleType):
                raise _absent(path, where, f"{above} has no {part!r}", part, dir(found)) from None
            found = _submodule(found, above, part, path, where)
    return found


def check_name(path: str, where: str, trust: Trust) -> None:
    """Refuse, before any import, a path whose first part is no trusted package."""
    if trust.packages is None or not isinstance(path, str):
        return
    inside = path.startswith(tuple(f"{prefix}." for prefix in ("torch.nn", "torch.optim", OURS)))
    if not inside and path.partition(".")[0] not in trust.packages:
        raise _untrusted(path, path, where)


def check_allowed(found: object, path: str, where: str, allowed: Trust) -> None:
    """Refuse what is neither class nor function, what Hydra blocks, and what no trusted package made."""
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        kind = "a module" if isinstance(found, ModuleType) else f"of type {type(found).__name__}"
        raise ConfigError(f"_target_ {path} is {kind}, but it must be a class or a function", where=where)
    for name in (path, _get_resolved_target_name_for_check(found)):
        try:
            _authorize_target_name(name, path, "")
        except InstantiationException:
            raise ConfigError(
                f"_target_ {path} is blocked, since it can run or destroy anything", where=where
            ) from None
    if allowed.packages is None:
        return
    for owner in _owners(found):
        module = str(getattr(owner, "__module__", None) or "")
        trusted = module.partition(".")[0] in allowed.packages
        ours = _within(module, COMPONENTS)
        torchs = _within(module, TORCH_CLASSES) and inspect.isclass(owner)
        if not (trusted or ours or torchs):
            raise _untrusted(path, f"{module}.{getattr(owner, '__qualname__', path)}".lstrip("."), where)


def import_from(project: Path) -> None:
    """Put the project's root first on `sys.path`, so that its own classes import without being installed."""
    root = str(project)
    if sys.path[:1] != [root]:
        sys.path.insert(0, root)


def project_packages(project: Path) -> Iterator[str]:
    """Names of the top-level packages and modules of a project, in its root or in `src/`."""
    for root in (project, project / "src"):
        if not root.is_dir():
            continue
        for path in root.iterdir():
            name = path.stem if path.suffix == ".py" else path.name
            holds_code = path.suffix == ".py" or (path.is_dir() and next(path.glob("*.py"), None) is not None)
            if holds_code and name.isidentifier() and name not in sys.stdlib_module_names:
                yield name


def _owners(found: object) -> Iterator[object]:
    """The object, and for a method its class too: both must be trusted."""
    yield found
    owner = getattr(found, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType):
        yield owner if inspect.isclass(owner) else type(owner)


def _within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _module(name: str, path: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            error.add_note(f"while importing {name} for _target_ {path} ({where})")
            raise
        top = name.partition(".")[0]
        cure = did_you_mean(top, sys.modules) or " Install it, or mend the name."
        raise ConfigError(f"_target_ {path}: there is no package {top!r}", where=where, cure=cure.strip()) from None
    except Exception as error:
        error.add_note(f"while importing {name} for _target_ {path} ({where})")
        raise


def _submodule(module: ModuleType, above: str, part: str, path: str, where: str) -> ModuleType:
    name = f"{above}.{part}"
    if not hasattr(module, "__path__"):
        raise _absent(path, where, f"module {above} has no {part!r}", part, dir(module))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            error.add_note(f"while importing {name} for _target_ {path} ({where})")
            raise
        names = {*dir(module), *(file.stem for root in module.__path__ for file in Path(root).glob("*.py"))}
        raise _absent(path, where, f"package {above} has no {part!r}", part, names) from None
    except Exception as error:
        error.add_note(f"while importing {name} for _target_ {path} ({where})")
        raise


def _absent(path: str, where: str, what: str, part: str, names: Any) -> ConfigError:
    public = [name for name in names if not name.startswith("_")]
    return ConfigError(f"_target_ {path}: {what}", where=where, cure=did_you_mean(part, public).strip() or None)


def _untrusted(path: str, found: str, where: str) -> ConfigError:
    really = "" if found == path else f" is {found}, which"
    package = found.partition(".")[0]
    return ConfigError(
        f"_target_ {path}{really} comes from a config on disk and is not in trainer_cli's components, "
        "torch's modules, optimizers and schedulers, or this project",
        where=where,
        cure=f"If you trust the config and the package, add trust=[{package}].",
    )
