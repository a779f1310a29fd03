"""A small project with configs of its own, over those that ship."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from wrong_configs import small_project

__all__ = ["small_project"]
FILES = {
    "model/mlp.yaml": "# A small one.\n_target_: mine.MLP\nhidden: [64]\n",
    "model/cnn.yaml": "# A larger one.\n_target_: mine.CNN\nchannels: 8\n",
    "data/digits.yaml": "# Pictures.\n_target_: mine.Digits\nbatch_size: 32\n",
    "data/text.yaml": "# Letters.\n_target_: mine.Text\npath: ???\nbatch_size: 12\n",
    "experiment/small.yaml": (
        "# @package _global_\n# Three epochs.\ndefaults:\n  - override /model: cnn\n"
        "  - override /scheduler: warmup_cosine\nloop:\n  max_duration: 3ep\noptimizer:\n  lr: 0.5\n"
    ),
    "experiment/vision/deep.yaml": "# @package _global_\nseed: 7\n",
    "experiment/letters.yaml": "# @package _global_\ndefaults:\n  - override /data: text\n",
}

CODE = "".join(
    f"class {name}:\n    def __init__(self, **settings): ...\n" for name in ("MLP", "CNN", "Net", "Digits", "Text")
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's root, which is the current directory too."""
    root = tmp_path / "project"
    for name, text in FILES.items():
        file = root / "configs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "mine.py").write_text(CODE)
    monkeypatch.chdir(root)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return root


@pytest.fixture
def write(project: Path) -> Callable[[str, str], Path]:
    """Write a file of the project's configs."""

    def write(name: str, text: str) -> Path:
        file = project / "configs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return write
