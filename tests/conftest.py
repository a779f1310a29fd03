"""What every test runs under: one thread, no leftovers from the caller's environment, skips that tell why."""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

_ROOT = Path(__file__).parents[1]
_RECORDED: dict[str, float] = json.loads((_ROOT / "tests/reached.json").read_text("utf-8"))["seconds"]
"""Each test file that `scripts/test --record` knows -> its seconds, negative if it starts processes."""
_SHORT_S = 7.0
"""What a file takes at most that `scripts/test fast` selects."""
_LEFT_OUT = {"not slow": {"slow"}, "not (slow or heavy)": {"slow", "heavy"}}
"""The marks of the files of which no test is selected, for each selection of scripts/test and scripts/versions."""

_ADDONS = _ROOT / "trainer_cli/addons"

# Helpers of the tests, and the scripts. Last: no name there hides another module.
sys.path += [str(Path(__file__).parent / "support"), str(Path(__file__).parents[1] / "scripts")]

# Before torch is imported anywhere, in this process and in those that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background jobs ignore Ctrl-C, and `nohup` hangups, and hand that down; whatever tests start must hear them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The garbage of the collection of tests is little, and looking for it takes seconds, also at its end. From then on the
# tests themselves, torch and all else that is loaded stay out of each later search.
gc.disable()


_STATE = tempfile.TemporaryDirectory(prefix="train-state-")


def pytest_configure() -> None:
    """Have runs of tests sign with a key of their own, not with that of whoever tests; workers of xdist inherit it."""
    os.environ.setdefault("XDG_STATE_HOME", _STATE.name)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out whose every test the selection leaves out: to import them takes as long as to test."""
    left_out = _LEFT_OUT.get(config.option.markexpr, set())
    return True if left_out & _marks_of(collection_path) else None


settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")


@pytest.fixture(autouse=True, scope="session")
def _tests_are_no_project() -> Iterator[None]:
    """A worker has imported hundreds of test files: a fit in this folder would keep them all as a user's source."""
    from trainer_cli.origin import source_files

    libraries = (*source_files._find_libraries(), _ROOT / "tests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_files, "_find_libraries", lambda: libraries)
        yield


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    for name in ("TRAIN_FULL_ERROR", "HYDRA_FULL_ERROR", "COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    # What the package itself sets, as for the ranks it starts, is put back too: a later test's commands would be new
    # processes, not forks, since a fork can't have another setting of torch or OpenMP.
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
    left = signal.signal(signal.SIGINT, on_ctrl_c)
    assert left == on_ctrl_c, "this test left another handler of Ctrl-C to the tests after it"


@pytest.fixture(autouse=True)
def _no_processes_in_unit_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_named: object) -> None:
        raise AssertionError("this test starts a process: write `pytestmark = pytest.mark.slow` into its file")

    # A file that was not recorded yet may start processes.
    if request.node.get_closest_marker("slow") is None and _recorded_s(request.path) is not None:
        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


@pytest.fixture(autouse=True, scope="module")
def _no_projects_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a file's tests imported from projects of their own is unknown to the next file's, in whatever order."""
    paths = list(sys.path)
    yield
    sys.path[:] = paths
    made = str(tmp_path_factory.getbasetemp())
    for name, module in sys.modules.copy().items():
        # A folder without an `__init__.py` is a module without a file.
        place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", None) or ()), "")
        if str(place).startswith(made):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new folder that is the current one during the test."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """An empty folder, in memory where the system has such a place."""
    shared = "/dev/shm"
    place = shared if os.path.isdir(shared) and os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.fixture
def forked_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays that the program has in processes of their own are forks of a process that has imported torch."""
    import command

    # With the names of `subprocess` that the module uses.
    forks = SimpleNamespace(run=command.run_own, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr("trainer_cli.addons.exact.replay_process.subprocess", forks)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Mark whole files, not each of their tests: there are many."""
    if isinstance(collector, pytest.Module):
        for mark in _marks_of(collector.path):
            collector.add_marker(mark)


@cache
def _recorded_s(path: Path) -> float | None:
    return _RECORDED.get(path.relative_to(_ROOT).as_posix()) if path.is_relative_to(_ROOT) else None


def _marks_of(path: Path) -> set[str]:
    """`slow` of a test file that starts processes, `heavy` of one that takes long, none of what was not recorded."""
    seconds = _recorded_s(path) or 0.0
    return {"slow"} if seconds < 0 else {"heavy"} if seconds > _SHORT_S else set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("TRAIN_CAMPAIGN") != "all":
        left_out = {item for item in items if item.get_closest_marker("campaign")}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    # The longest files first, so that no core is left waiting for one of them at the end.
    items.sort(key=lambda item: -abs(_recorded_s(item.path) or math.inf))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs what is not here."""
    for mark in item.iter_markers():
        if mark.name == "addon" and not (_ADDONS / mark.args[0]).is_dir():
            pytest.skip(f"the add-on {mark.args[0]} was deleted")
        if mark.name == "root" and os.geteuid() != 0:
            pytest.skip("needs the superuser")
        if mark.name == "gpu" and not _has_gpu():
            pytest.skip("needs a CUDA device")


def pytest_make_parametrize_id(val: Any) -> str | None:
    """Lists and settings as they are written, where pytest would only count them.

    Without addresses in memory, which differ between the processes that share the tests.
    """
    return re.sub(r" at 0x[0-9a-f]+", "", repr(val)) if isinstance(val, dict | list | range) else None


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
