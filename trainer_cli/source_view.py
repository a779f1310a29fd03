"""Folders that stand for a project in this process: its classes are imported from there (`origin/use.py`)."""

from __future__ import annotations

from pathlib import Path

ROOTS_FILE = ".train-import-roots"
"""File of a view: the folders in it, one a line, from which modules are imported besides the view itself."""
VIEW_VARIABLE = "TRAIN_SOURCE_VIEW"
"""Environment variable with the view of the process that has started this one: digest, project and folder."""
_views: dict[Path, Path] = {}


def stand_for(project: Path, view: Path) -> None:
    """Have a view stand for the root of a project."""
    _views[project] = view


def in_view(path: Path) -> Path:
    """The view of a project, or the same folder in it for one in the project; the path itself without a view."""
    found = (view / path.relative_to(project) for project, view in _views.items() if path.is_relative_to(project))
    return next(found, path)


def out_of_view(path: Path) -> Path:
    """The place in a project of a path in its view; any other path itself."""
    found = ((project, view) for project, view in _views.items() if path.is_relative_to(view))
    return next((project / path.relative_to(view) for project, view in found), path)


def is_view(root: Path) -> bool:
    """Whether a folder stands for a project."""
    return root in _views.values()


def find_project(root: Path) -> Path:
    """The project that a view stands for; any other folder itself."""
    return next((project for project, view in _views.items() if view == root), root)


def read_import_roots(root: Path) -> list[str]:
    """The folders from which the modules of a project, or of a view, are imported."""
    try:
        below = (root / ROOTS_FILE).read_text("utf-8").split("\n")
    except OSError:
        below = []
    return [str(root / folder) for folder in below if folder] + [str(root)]
