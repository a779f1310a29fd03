"""Names of a package that are imported when they are first used."""

from __future__ import annotations

# Not from typing, whose import takes as long as the start of Python. Type checkers take the name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def add_lazy_names(package: dict[str, Any], *, of_addons: bool = False) -> None:
    """Make the names in a package's stub attributes of the package, each imported when it is first asked for.

    The stub, `__init__.pyi` beside `__init__.py`, is the only list of these names, and type checkers read it, too. It
    holds nothing but `from module import name as name`.

    Args:
        package: `globals()` of the package.
        of_addons: whether the public names of add-ons are attributes, too, as `import *` in the stub says.
    """
    path = package["__name__"]
    module_of: dict[str, str] = {}

    def read_stub() -> dict[str, str]:
        if not module_of:
            with open(package["__file__"] + "i", encoding="utf-8") as file:
                words = iter(file.read().split())
            # By words: the import of `ast` takes longer than `train --help` takes to read all stubs.
            names = {}
            for word in words:
                if word == "from":
                    module = next(words)
                elif word == "as":
                    names[next(words).rstrip(",")] = module
            # At once, since another thread may ask meanwhile.
            module_of.update(names)
        return module_of

    def find_modules() -> dict[str, str]:
        if not of_addons:
            return read_stub()
        from trainer_cli.addon import public_names

        return {**public_names(), **read_stub()}

    def get_name(name: str) -> Any:
        # Imported here: `train --help` and completion import packages whose names they do not need.
        from importlib import import_module

        if name == "__all__":
            package[name] = sorted(name for name in find_modules() if not name.startswith("_"))
            return package[name]
        modules = read_stub()
        # Add-ons are not searched for attributes such as `__path__`, for which Python asks.
        if name not in modules and not name.startswith("__"):
            modules = find_modules()
        if name not in modules:
            raise AttributeError(f"module {path!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    package["__getattr__"] = get_name
    # Completion and `dir` show the names, although none of them is imported yet.
    package["__dir__"] = lambda: sorted({*package, *find_modules()})
