"""Refuse modules of the project that have the name of a library, since one hides the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from trainer_cli.errors import ConfigError

_LIBRARIES = frozenset({
    "absl", "filelock", "fsspec", "grpc", "hydra", "jinja2", "markdown", "markupsafe", "mpmath", "networkx", "numpy",
    "omegaconf", "packaging", "PIL", "rich", "safetensors", "sympy", "tensorboard", "torch", "trainer_cli", "triton",
    "typing_extensions", "werkzeug", "xxhash", "yaml",
})  # fmt: skip
"""Libraries that a run imports, directly or through its dependencies."""
_UNUSED = frozenset({"antigravity", "idlelib", "lib2to3", "test", "this", "tkinter", "turtle", "turtledemo", "venv"})
"""Modules of Python that no run imports, so that hiding them does no harm."""


def refuse_shadows(root: Path) -> None:
    """Refuse modules in a project's root that have the name of a library.

    The root is first on `sys.path`: a library that is not imported yet would be taken from there.

    Raises:
        ConfigError: naming each module.
    """
    if shadows := sorted(_describe_shadows(root)):
        raise ConfigError(
            "; ".join(shadows),
            location=str(root),
            hint="Rename it." if len(shadows) == 1 else "Rename them.",
        )


def _describe_shadows(root: Path) -> Iterator[str]:
    """A sentence for each module in a project's root that hides a library or is hidden by one."""
    package = Path(__file__).parents[1]
    try:
        paths = list(root.iterdir())
    except OSError:
        return  # Nothing is imported from a folder that cannot be listed.
    for path in paths:
        name, is_package = path.stem, not path.suffix and (path / "__init__.py").is_file()
        is_module = path.suffix == ".py" or is_package
        of_python = name in sys.stdlib_module_names - _UNUSED
        if not is_module or not (of_python or name in _LIBRARIES):
            continue
        if is_package and name == package.name:
            continue  # a checkout of this program
        # A library that is imported already stays in use, so that the project's module cannot be reached.
        loaded = sys.modules.get(name)
        file = getattr(loaded, "__file__", None)
        is_loaded_from_here = file is not None and Path(file) in (path, path / "__init__.py")
        verb = "hides" if loaded is None or is_loaded_from_here else "is hidden by"
        shadowed = f"Python's module {name}" if of_python else f"the library {name}"
        yield f"{path.name} {verb} {shadowed}"
