"""Find modules of a project that have the name of a module of Python or of a library: one hides the other."""

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
"""What a training imports, by itself or through what it depends on."""
_UNUSED = frozenset({"antigravity", "idlelib", "lib2to3", "test", "this", "tkinter", "turtle", "turtledemo", "venv"})
"""Modules of Python that no training imports."""


def refuse_shadows(root: Path) -> None:
    """Refuse modules in a project's root that hide a library, or are hidden by one.

    The root is searched first, so that a library that is not imported yet would be taken from there.

    Raises:
        ConfigError: naming each.
    """
    if shadows := sorted(_shadows(root)):
        raise ConfigError(
            "; ".join(shadows),
            location=str(root),
            hint="Rename it." if len(shadows) == 1 else "Rename them.",
        )


def _shadows(root: Path) -> Iterator[str]:
    ours = Path(__file__).parents[1]
    try:
        paths = list(root.iterdir())
    except OSError:
        return  # Nothing is imported from a folder that cannot be listed.
    for path in paths:
        name, is_package = path.stem, not path.suffix and (path / "__init__.py").is_file()
        of_python = name in sys.stdlib_module_names - _UNUSED
        if not (path.suffix == ".py" or is_package) or not (of_python or name in _LIBRARIES):
            continue
        if is_package and name == ours.name:
            continue  # a checkout of this program
        loaded = sys.modules.get(name)
        file = getattr(loaded, "__file__", None)
        is_own = file is not None and Path(file) in (path, path / "__init__.py")
        what = f"Python's module {name}" if of_python else f"the library {name}"
        yield f"{path.name} {'hides' if loaded is None or is_own else 'is hidden by'} {what}"
