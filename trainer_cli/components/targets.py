"""Import the class or function that a `_target_` names, if it may be used.

The user's own config may name any class or function that Hydra does not block. A recovered config (from a run
directory or a checkpoint) is data from disk, and its targets are restricted: before any import, the path must begin
with a trusted package; every module on the path must be trusted; and the object must be defined in a trusted package,
not only be imported there. Any class or function of the project may run. Of a package that `trust=` names, only
components may run (`is_component`), so that loaders, launchers and compilers are excluded.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import keyword
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Set
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import trainer_cli
from trainer_cli.addon import each_addon
from trainer_cli.components.shadows import refuse_shadows
from trainer_cli.errors import Code, ConfigError
from trainer_cli.parts import explain_missing
from trainer_cli.patterns import did_you_mean
from trainer_cli.source_view import read_import_roots

OURS = "trainer_cli"
_OWN_COMPONENTS = tuple(
    f"{OURS}.{name}" for name in ("callbacks", "data", "loggers", "models", "optim.schedulers", "optim.warmup")
)
TORCH = "torch"
TORCH_CLASSES = ("torch.nn.modules", "torch.optim")
_TORCH_BASES = {
    ("torch.nn.modules.module", "Module"),
    ("torch.optim.optimizer", "Optimizer"),
    ("torch.optim.lr_scheduler", "LRScheduler"),
}
_COMPONENT_BASES = _TORCH_BASES | {
    ("torch.utils.data.dataset", "Dataset"),
    ("torch.utils.data.sampler", "Sampler"),
    ("torch.utils.data.dataloader", "DataLoader"),
    ("trainer_cli.trainer.hooks", "Callback"),
    ("trainer_cli.trainer.train_step", "TrainStep"),
    ("trainer_cli.loggers.base", "Logger"),
}
"""(module, qualified name): compared as text, since torch is imported only if a config names it."""
_TRANSFORMS = ("torchvision.transforms",)
"""Packages all of whose classes transform samples; most have no base class."""
_COMPILERS = ("torch.distributed", "torch.fx", "torch.jit")
"""Packages whose modules launch processes or compile code."""


@cache
def _find_components() -> tuple[str, ...]:
    """The packages and modules, of this program and of add-ons, whose public classes a config from disk may name."""
    return (*_OWN_COMPONENTS, *(name for _, addon in each_addon() for name in addon.components))


@cache
def _find_passages() -> frozenset[str]:
    """The packages that lead to a component's module; their other names are not trusted."""
    parts = [name.split(".") for name in (*_find_components(), *TORCH_CLASSES)]
    return frozenset(".".join(path[:depth]) for path in parts for depth in range(1, len(path)))


@cache
def _find_bases() -> frozenset[tuple[str, str]]:
    """(module, qualified name) of the classes, of this program and of add-ons, whose subclasses are components."""
    of_addons = (base.partition(":") for _, addon in each_addon() for base in addon.bases)
    return frozenset({*_COMPONENT_BASES, *((module, name) for module, _, name in of_addons)})


class Trust(NamedTuple):
    """Which targets may run: components of `packages`, and everything in the folder `project`. Both None: any."""

    packages: frozenset[str] | None = None
    project: Path | None = None
    is_given: Callable[[str], bool] | None = None
    """Whether the user has given the value of a dotted key of a recovered config; None: of none."""

    @classmethod
    def recovered(cls, project: Path, extra: Iterable[str], is_given: Callable[[str], bool] | None = None) -> Trust:
        """Trust for a config from disk: the project's own packages, and those named by `trust=`."""
        return cls(frozenset(extra), project, is_given)

    def bounds(self, key: str) -> bool:
        """Whether the value of a dotted key is known from a config on disk alone (`running/reach.py`)."""
        return not self.unrestricted and (self.is_given is None or not self.is_given(key))

    @property
    def unrestricted(self) -> bool:
        """Whether any target may run: the config is the user's own."""
        return self.packages is None

    def names(self, path: str) -> bool:
        """Whether a path begins with a trusted package. Checked before any import, which runs code."""
        top, _, submodule = path.partition(".")
        # The text alone decides: to import a package in order to judge it would already run its code.
        if self.packages is None or top in self.packages:
            return True
        if path.startswith(tuple(f"{prefix}." for prefix in (*_find_components(), "torch.nn", "torch.optim"))):
            return True
        if top in (OURS, TORCH):
            # `trainer_cli.MLP`: resolved lazily from the public names.
            return top == OURS and "." not in submodule
        return self.project is not None and top in find_project_packages(self.project)

    def holds(self, module: str) -> bool:
        """Whether a module belongs to a trusted package or to the project."""
        return self.is_of_project(module) or module.partition(".")[0] in (self.packages or ())

    def passes(self, module: ModuleType) -> bool:
        """Whether names may be looked up in a module."""
        name = module.__name__
        # A module object may claim any name: only the one registered under it counts.
        if sys.modules.get(name) is not module:
            return self.unrestricted
        return (
            name in _find_passages() or self.holds(name) or _is_module_of(name, (*_find_components(), *TORCH_CLASSES))
        )

    def is_of_project(self, module: str) -> bool:
        """Whether a module is the project's own."""
        if self.unrestricted:
            return True
        # In a checkout of this program, the project's root holds trainer_cli, of which only components may run.
        is_own_package = module.partition(".")[0] in (OURS, TORCH)
        return self.project is not None and not is_own_package and _is_in_project(self.project, module)

    def admits(self, definition: object, module: str) -> bool:
        """Whether a class or function that is defined in a module may run."""
        if self.is_of_project(module):
            return True
        # A private or local object is no interface, whatever package it is in.
        segments = str(getattr(definition, "__qualname__", "_")).split(".")
        if any(segment.startswith(("_", "<")) for segment in segments):
            return False
        if inspect.isclass(definition) and _is_module_of(module, TORCH_CLASSES):
            return _is_subclass(definition, _TORCH_BASES)
        if inspect.isclass(definition) and _is_module_of(module, _find_components()):
            return True
        return self.holds(module) and is_component(definition, module)


def is_component(definition: object, module: str) -> bool:
    """Whether an object of a package is a component, and not a loader, launcher or compiler.

    Components are subclasses of torch's modules, optimizers, schedulers, datasets, samplers and data loaders, and of
    our callbacks, loggers and training steps; classes that assign `train`, as `data` requires; dataclasses, for
    settings; torchvision's transforms; and functions annotated to return one of these. Class methods are excluded:
    many, such as `from_pretrained`, load files.
    """
    if _is_module_of(module, _COMPILERS):
        return False
    if inspect.isclass(definition):
        is_record = "__dataclass_params__" in vars(definition)
        is_transform = _is_module_of(module, _TRANSFORMS)
        return is_record or is_transform or _is_subclass(definition, _find_bases()) or _assigns_train(definition)
    if not isinstance(definition, FunctionType) or "." in definition.__qualname__:
        return False
    try:
        # What it returns decides, as a name such as `build` says nothing about loading files.
        returned = typing.get_type_hints(definition).get("return")
    except Exception:  # An annotation may name what is imported only for type checkers.
        return False
    classes = typing.get_args(returned) or (returned,)
    return all(
        inspect.isclass(returned_class) and _is_subclass(returned_class, _find_bases()) for returned_class in classes
    )


def import_target(path: str, where: str, trust: Trust) -> Callable[..., Any]:
    """Import the class or function that a `_target_` names.

    Raises:
        ConfigError: it cannot be imported, is not a class or function, is blocked, or is not trusted.
    """
    # The name is checked before the import, which runs code, and the object after it.
    check_path(path, where)
    path = to_public_name(path)
    check_name(path, where, trust)
    target = resolve(path, where, trust)
    check_allowed(target, path, where, trust)
    assert callable(target)
    return target


def to_public_name(path: str) -> str:
    """The public name of a class or function of this package that a config names by a module, which may have moved."""
    package, _, path_in_package = path.partition(".")
    name = path_in_package.rpartition(".")[2]
    # Add-ons are looked for only if a module is named, which shipped configs never do.
    if package != OURS or name == path_in_package:
        return path
    is_public = name in trainer_cli.__all__ or explain_missing(path, "names", name) is not None
    return f"{OURS}.{name}" if is_public else path


def check_path(path: Any, where: str) -> None:
    """Refuse a path that is not a dotted name, or that Hydra blocks."""
    names = path.split(".") if isinstance(path, str) else []
    are_identifiers = all(name.isidentifier() and not keyword.iskeyword(name) for name in names)
    if len(names) < 2 or not are_identifiers:
        raise _target_error(f"_target_ {path!r} is not a dotted name", where, "Write package.module.Name.")
    _check_blocked(path, path, where)


def resolve(path: str, where: str, trust: Trust) -> object:
    """The object at a dotted path.

    Raises:
        ConfigError: a name on the path does not exist, or a module on the path is not trusted. An error inside an
            imported module is passed on with a note.
    """
    parts = path.split(".")
    current: Any = _import(parts[0], path, where)
    for depth, name in enumerate(parts[1:], start=1):
        # It is checked before each lookup: a module's __getattr__ may run code.
        if isinstance(current, ModuleType) and not trust.passes(current):
            raise _untrusted_error(path, current.__name__, where)
        prefix = ".".join(parts[:depth])
        # An attribute before a submodule: importing the submodule could replace an attribute of the same name.
        try:
            current = getattr(current, name)
        except AttributeError:
            missing = explain_missing(f"_target_ {path}", "names", name) if current is trainer_cli else None
            if missing is not None:
                raise _target_error(missing.what, where, missing.cure) from None
            if not isinstance(current, ModuleType):
                raise missing_name_error(path, where, f"{prefix} has no {name!r}", name, dir(current)) from None
            current = _import_submodule(current, prefix, name, path, where)
    return current


def check_name(path: str, where: str, trust: Trust) -> None:
    """Refuse, before any import, a path that does not begin with a trusted package."""
    if not trust.names(path):
        raise _untrusted_error(path, path, where)


def check_allowed(target: object, path: str, where: str, trust: Trust) -> None:
    """Refuse an object that is not a class or function, that Hydra blocks, or that no trusted package defines."""
    if not (inspect.isclass(target) or inspect.isroutine(target)):
        kind = "a module" if isinstance(target, ModuleType) else f"of type {type(target).__name__}"
        raise _target_error(f"_target_ {path} is {kind}, but it must be a class or a function", where)
    # Again, by the object: an alias may lead to a blocked function.
    _check_blocked(target, path, where)
    if trust.unrestricted:
        return
    if isinstance(target, MethodType) and not trust.is_of_project(target.__func__.__module__):
        raise _not_component_error(path, where)
    # A decorator of a trusted package may wrap a function of any other.
    for definition in _find_definitions(target):
        module = str(getattr(definition, "__module__", None) or "")
        name = f"{module}.{getattr(definition, '__qualname__', path)}".lstrip(".")
        if not trust.admits(definition, module):
            raise _not_component_error(path, where) if trust.holds(module) else _untrusted_error(path, name, where)
        if not _is_defined_in(definition, module):
            message = f"_target_ {path} claims to be {name}, but {module} did not define it; the config comes from disk"
            raise _target_error(message, where, "Name it where it is defined.")


def import_from(project: Path) -> None:
    """Put the project's root first on `sys.path`, so that its classes need not be installed.

    Raises:
        ConfigError: a module in it shadows a library, or is shadowed by one.
    """
    refuse_shadows(project)
    # First, as for `python script.py`; `refuse_shadows` has excluded modules that would hide a library.
    roots = read_import_roots(project)
    # They are added once, although every composition in a process calls this.
    if sys.path[: len(roots)] != roots:
        sys.path[:0] = roots


def find_project_packages(project: Path) -> Iterator[str]:
    """Names of the top-level packages and modules of a project, in its root or in `src/`."""
    for root in (project, project / "src"):
        if not root.is_dir():
            continue
        for path in root.iterdir():
            name = path.stem if path.suffix == ".py" else path.name
            holds_code = path.suffix == ".py" or (path.is_dir() and next(path.glob("*.py"), None) is not None)
            if holds_code and name.isidentifier() and name not in sys.stdlib_module_names:
                yield name


def missing_name_error(path: str, where: str, message: str, name: str, candidates: Iterable[str]) -> ConfigError:
    """The error for a name on a path that does not exist, with the nearest one that does."""
    public = [name for name in candidates if not name.startswith("_")]
    return _target_error(f"_target_ {path}: {message}", where, did_you_mean(name, public).strip() or None)


def _check_blocked(target: Any, path: str, where: str) -> None:
    """Refuse a path, or the object at a path, that Hydra blocks."""
    # Hydra offers its list of blocked targets by no public name; these private ones are those of version 1.3.
    from hydra._internal.target_policy import _get_resolved_target_name_for_check
    from hydra.errors import InstantiationException

    # The name is that of the definition, so that an alias of os.system is found too.
    name = target if isinstance(target, str) else _get_resolved_target_name_for_check(target)
    try:
        _authorize(name)
    except InstantiationException:
        raise _target_error(f"_target_ {path} is blocked, since it can run or destroy anything", where) from None


@cache
def _authorize(name: str) -> None:
    """Raise Hydra's error if it blocks a name. Each check reads its whole policy, so what is allowed is remembered."""
    from hydra._internal.target_policy import _authorize_target_name

    _authorize_target_name(name, name, "")


def _target_error(message: str, where: str, hint: str | None = None) -> ConfigError:
    """An error about the target at a key, `where`."""
    return ConfigError(message, location=where, code=Code.target, hint=hint)


def _find_definitions(target: object) -> Iterator[object]:
    """The definitions behind a target, all of which must be trusted: unwrapped functions, and a method's class."""
    function = target.__func__ if isinstance(target, MethodType) else target
    yield function
    if isinstance(function, FunctionType) and (unwrapped := inspect.unwrap(function)) is not function:
        yield unwrapped
    bound_to = getattr(target, "__self__", None)
    if bound_to is not None and not isinstance(bound_to, ModuleType):
        yield bound_to if inspect.isclass(bound_to) else type(bound_to)


def _is_defined_in(definition: object, module: str) -> bool:
    """Whether a module defines an object.

    `__module__` can be assigned. A function is therefore checked by its globals, a class by its qualified name.
    """
    loaded = sys.modules.get(module)
    if loaded is None:
        return False
    if isinstance(definition, FunctionType):
        unwrapped = inspect.unwrap(definition)
        return isinstance(unwrapped, FunctionType) and unwrapped.__globals__ is vars(loaded)
    current: object = loaded
    for segment in str(getattr(definition, "__qualname__", "")).split("."):
        current = getattr(current, "__dict__", {}).get(segment)
    if inspect.isclass(definition) and current is not definition:
        # Defined inside a function, so that only its methods show the module.
        return any(
            isinstance(attribute, FunctionType) and attribute.__globals__ is vars(loaded)
            for attribute in vars(definition).values()
        )
    return current is definition


def _is_in_project(project: Path, module: str) -> bool:
    """Whether an imported module is in a top-level package of the project, not in an environment inside its folder."""
    loaded = sys.modules.get(module)
    # Its file decides: a module of the project may have the name of an installed package.
    file = getattr(loaded, "__file__", None)
    paths = [file] if file else list(getattr(loaded, "__path__", ()))
    top = module.partition(".")[0]
    folders = [root / name for root in (project, project / "src") for name in (top, f"{top}.py")]
    # With and without links followed: an editable install may link to the project.
    folders += [folder.resolve() for folder in folders]

    def is_inside(path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in folders)

    return bool(paths) and all(is_inside(Path(path)) or is_inside(Path(path).resolve()) for path in paths)


def _is_subclass(cls: type, bases: Set[tuple[str, str]]) -> bool:
    """Whether a class has one of these bases, given as (module, qualified name)."""
    return any((base.__module__, base.__qualname__) in bases for base in cls.__mro__)


def _assigns_train(cls: type) -> bool:
    """Whether a class has a property or field `train`, or assigns it in its constructor (read from its bytecode)."""
    if any("train" in vars(base).get("__annotations__", ()) for base in cls.__mro__):
        return True
    if isinstance(inspect.getattr_static(cls, "train", None), property | cached_property):
        return True
    # It is read statically: a lookup would run descriptors of a class that is not trusted yet.
    constructor = inspect.getattr_static(cls, "__init__", None)
    return isinstance(constructor, FunctionType) and any(
        instruction.opname == "STORE_ATTR" and instruction.argval == "train"
        for instruction in dis.get_instructions(constructor)
    )


def _is_module_of(module: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of these packages, or in one of them."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _import(name: str, path: str, where: str) -> ModuleType:
    """Import a module that is on the path of a target.

    Raises:
        ConfigError: there is no such package, or the import fails because of how it is written or used.
        Exception: whatever the code of the module raises, with a note that names the target.
    """
    try:
        return importlib.import_module(name)
    except SyntaxError as error:
        problem = f"{error.filename}:{error.lineno}: {error.msg}"
        raise _target_error(f"_target_ {path} cannot be imported: {problem}", where) from None
    # A script without a main guard would end the command without a word.
    except SystemExit:
        raise _target_error(f"_target_ {path}: importing {name} ends the process", where) from None
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            if "." in name:
                raise
            hint = did_you_mean(name, sys.modules) or " Install it, or mend the name."
            raise _target_error(f"_target_ {path}: there is no package {name!r}", where, hint.strip()) from None
        if isinstance(error, ImportError) and "no known parent package" in str(error):
            raise _relative_import_error(error, path, where) from None
        # An error of that module's own code, not of the config.
        error.add_note(f"while importing {name} for _target_ {path} ({where})")
        raise


def _relative_import_error(error: ImportError, path: str, where: str) -> ConfigError:
    """The error for a relative import in a module that is in no package, such as one in the project's root."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    message = f"_target_ {path} cannot be imported: {frame.filename}:{frame.lineno}: {frame.line}: it is in no package"
    hint = "Import without the leading dot (from x import y), or move the modules into a folder with an __init__.py."
    return _target_error(message, where, hint)


def _import_submodule(module: ModuleType, prefix: str, name: str, path: str, where: str) -> ModuleType:
    """Import the submodule `name` of a module that the first part of a target's path, `prefix`, leads to.

    Raises:
        ConfigError: there is no such submodule.
    """
    # The path leads through an alias (`mine.np.random`): its submodules are not imported under that name.
    if not hasattr(module, "__path__") or module.__name__ != prefix:
        raise missing_name_error(path, where, f"module {prefix} has no {name!r}", name, dir(module))
    try:
        return _import(f"{prefix}.{name}", path, where)
    except ModuleNotFoundError as error:
        if error.name != f"{prefix}.{name}":
            raise
        candidates = {*dir(module), *(file.stem for root in module.__path__ for file in Path(root).glob("*.py"))}
        raise missing_name_error(path, where, f"package {prefix} has no {name!r}", name, candidates) from None


_ADMITS = (
    "models, optimizers, schedulers, datasets, callbacks, loggers, dataclasses, transforms (of torchvision), and "
    "functions annotated to return one of them"
)


def _not_component_error(path: str, where: str) -> ConfigError:
    """The error for a target of a trusted package that is not a component."""
    message = f"_target_ {path} comes from a config on disk and is not a component: trust= admits a package's {_ADMITS}"
    return _target_error(
        message, where, "Give experiment=NAME, so that your own config is used, which may name anything."
    )


def _untrusted_error(path: str, actual: str, where: str) -> ConfigError:
    """The error for a target of another package, or for one that is defined there, as `actual`."""
    alias_note = "" if actual == path else f" is {actual}, which"
    package = actual.partition(".")[0]
    message = (
        f"_target_ {path}{alias_note} comes from a config on disk and is not in trainer_cli's components, "
        "torch's modules, optimizers and schedulers, or this project"
    )
    hint = (
        "If it is of a project in another folder, add -cd PROJECT/configs (in Python config_dir='PROJECT/configs'). If "
        f"you trust the config and the package, add trust=[{package}] (in Python trust=['{package}']): it admits the "
        f"package's {_ADMITS}; for anything else, give experiment=NAME, so that your own config is used."
    )
    return _target_error(message, where, hint)
