"""Targets looked up in files: what certainly does not exist, and what only an import can tell."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainer_cli.config.modules import find_missing

FILES = {
    "mine/__init__.py": "from .nets import *\n",
    "mine/nets.py": "class Net: ...\n",
    "mine/open.py": "def __getattr__(name): ...\n",
    "mine/broken.py": "def f(:\n",
    "space/deep.py": "class Deep: ...\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        "mine.Net", "mine.nets.Net", "mine.nets.Net.of", "mine.open.Anything", "mine.broken.Net", "mine.nets",
        "space.deep.Deep", "math.sqrt", "torch.optim.AdamW", "torch.optim.lr_scheduler.StepLR", "torch.nn.Linear",
        "torch.nn.functional.relu", "torch.Tensor", "torch.nn.modules.linear.Linear", "trainer_cli.MLP",
        "trainer_cli.CheckpointerCallback",
    ],
)  # fmt: skip
def test_what_may_exist_is_let_through(root: Path, path: str) -> None:
    assert find_missing(path, [root]) is None


@pytest.mark.parametrize(
    ("path", "what", "nearby"),
    [
        ("mien.Net", "there is no package 'mien'", "mine"),
        ("mine.Nett", "package mine has no 'Nett'", "Net"),
        ("mine.nest.Net", "package mine has no 'nest'", "nets"),
        ("mine.nets.Nett", "module mine.nets has no 'Nett'", "Net"),
        ("torch.optm.AdamW", "package torch has no 'optm'", "optim"),
        ("torch.optim.AdmW", "package torch.optim has no 'AdmW'", "AdamW"),
        ("torch.optim.lr_scheduler.StepLr", "module torch.optim.lr_scheduler has no 'StepLr'", "StepLR"),
        ("trainer_cli.models.mlp.Mlp", "module trainer_cli.models.mlp has no 'Mlp'", "MLP"),
    ],
)
def test_what_does_not_exist_is_reported_with_the_names_that_do(root: Path, path: str, what: str, nearby: str) -> None:
    found = find_missing(path, [root])
    assert found is not None
    assert found.message == what
    assert nearby in found.candidates


def test_a_misspelt_layer_of_torch_is_reported(root: Path) -> None:
    found = find_missing("torch.nn.Linera", [root])
    assert found is not None
    assert found.message == "package torch.nn has no 'Linera'"


def test_nothing_is_imported(root: Path) -> None:
    sys.modules.pop("mine", None)
    assert find_missing("mine.nets.Nope", [root]) is not None
    assert not {"mine", "mine.nets"} & set(sys.modules)
