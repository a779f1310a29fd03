"""Calls of clocks and unseeded generators are seen in the user's files, whatever name they go by."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from trainer_cli.addons.exact.digests import Asks, read_calls, record_calls

CASES = [
    ("import time\ntime.time()", Asks.clock, "time.time()"),
    ("from time import perf_counter as now\nnow()", Asks.clock, "time.perf_counter()"),
    ("import datetime\ndatetime.datetime.now()", Asks.clock, "datetime.datetime.now()"),
    ("import random\nrandom.Random()", Asks.chance, "random.Random()"),
    ("import random\nrandom.seed()", Asks.chance, "random.seed()"),
    ("import numpy\nnumpy.random.default_rng()", Asks.chance, "numpy.random.default_rng()"),
    ("import torch\ntorch.Generator().seed()", Asks.chance, "torch.Generator.seed()"),
    ("import torch\ntorch.seed()", Asks.chance, "torch.seed()"),
    ("import os\nos.urandom(2)", Asks.chance, "os.urandom()"),
    ("import uuid\nuuid.uuid4()", Asks.chance, "uuid.uuid4()"),
    ("import os\nos.getpid()", Asks.worker, "os.getpid()"),
    ("import torch\ntorch.utils.data.get_worker_info()", Asks.worker, "torch.utils.data.get_worker_info()"),
]


def calls(code: str, folder: Path) -> list[tuple[Asks, str, str]]:
    """What is noted while a user's file runs."""
    (folder / "users.py").write_text(code)
    with record_calls(folder / "calls", folder):
        runpy.run_path(str(folder / "users.py"))
    return [(call.asks, call.function, call.where) for call in read_calls(folder / "calls")]


@pytest.mark.parametrize(("code", "asks", "what"), CASES, ids=[what for _, _, what in CASES])
def test_a_call_is_noted_with_its_line(code: str, asks: Asks, what: str, tmp_path: Path) -> None:
    assert calls(code, tmp_path) == [(asks, what, "users.py:2")]


@pytest.mark.parametrize(
    "code",
    [
        "import random\nrandom.Random(1)",
        "import random\nrandom.seed(0)",
        "import numpy\nnumpy.random.default_rng(1)",
        "import torch\ntorch.Generator().manual_seed(1)",
        "import tempfile\ntempfile.gettempdir()",
    ],
)
def test_what_is_seeded_or_done_by_others_is_not(code: str, tmp_path: Path) -> None:
    assert calls(code, tmp_path) == []
