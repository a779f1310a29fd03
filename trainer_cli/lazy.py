"""Names of a package that are imported when they are first used."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def add_lazy_names(package: dict[str, Any], names: Mapping[str, str], *, of_addons: bool = False) -> None:
    """Make names of a package's modules attributes of the package, each imported when it is first asked for.

    The package's `__init__.py` calls this, and repeats the names as imports under `TYPE_CHECKING` for type checkers.

    Args:
        package: `globals()` of the package.
        names: names of modules, relative to the package -> the names that they hold, separated by spaces.
        of_addons: whether the public names of add-ons are attributes, too.
    """
    path = package["__name__"]
    module_of = {name: f"{path}.{module}" for module, text in names.items() for name in text.split()}

    def find_modules() -> Mapping[str, str]:
        if not of_addons:
            return module_of
        from trainer_cli.addon import public_names

        return {**public_names(), **module_of}

    def get_name(name: str) -> Any:
        # Imported here: `train --help` and completion import packages whose names they do not need.
        from importlib import import_module

        if name == "__all__":
            package[name] = sorted(name for name in find_modules() if not name.startswith("_"))
            return package[name]
        # Add-ons are not searched for attributes such as `__path__`, for which Python asks.
        modules = module_of if name in module_of or name.startswith("__") else find_modules()
        if name not in modules:
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    package["__getattr__"] = get_name
    # Completion and `dir` show the names, although none of them is imported yet.
    package["__dir__"] = lambda: sorted({*package, *find_modules()})
