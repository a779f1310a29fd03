"""Record which functions of the package each test file runs, and how long it takes, in tests/reached.json.

    scripts/test --record             all test files, from the beginning
    scripts/test --record missing     those that are not in the table: new ones, and the rest after a Ctrl-C
    scripts/test --record FILE...     these once more

`scripts/changed.py` selects tests by this table. Each file is tested by a process of its own, a fork of one that has
imported torch, so that nothing is cached by the tests of another file. `tests/support/recorder.py` notes the functions
in it and in all processes that it starts, where a .pth file of the environment starts the recorder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

import recorder  # noqa: E402

import advice  # noqa: E402
import reached  # noqa: E402

LOADED = ("torch", "torch.utils.tensorboard", "numpy", "pytest")
"""What no test file has to import once more."""
WITHOUT = ("cacheprovider", "xdist", "unraisableexception")
"""Plugins of pytest. The last one would look at what a test file leaves open to the end of its process."""


@contextmanager
def recorded_processes(folder: Path) -> Iterator[None]:
    """Start the recorder in each process of this environment that has `REACHED_BY` among its variables."""
    (folder / "code").mkdir()
    # Some tests are another user for a moment.
    folder.chmod(0o777)
    begin = (
        f"__import__('sys').path.append({str(ROOT / 'tests/support')!r}), __import__('recorder').start({str(folder)!r})"
    )
    pth = Path(sysconfig.get_path("purelib")) / "zz_recorder.pth"
    pth.write_text(f"import os; 'REACHED_BY' in os.environ and ({begin})\n", encoding="utf-8")
    try:
        yield
    finally:
        pth.unlink()


def run(test: str, folder: Path) -> None:
    """Test one file in this process, a fork, and write how that ended."""
    import pytest

    os.environ["REACHED_BY"] = test.replace("/", "~")
    # As `python -m pytest` has it.
    ours = (str(ROOT / "scripts"), str(ROOT / "tests"))
    sys.path[:] = [str(ROOT), *(path for path in sys.path if not path.startswith(ours))]
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    recorder.start(str(folder))
    started: list[str] = []
    sys.addaudithook(lambda event, _: started.append(event) if event == "subprocess.Popen" else None)
    code = pytest.main(["-q", *(f"-pno:{plugin}" for plugin in WITHOUT), test])
    (folder / "facts").write_text(json.dumps({"code": int(code), "starts_processes": bool(started)}))


def record(test: str, folder: Path, table: reached.Table) -> int:
    """Test one file in a fork, put what it ran into the table, and return pytest's exit code."""
    facts: dict[str, Any] = {"code": -1, "starts_processes": True}
    (folder / "facts").write_text(json.dumps(facts))
    began = time.monotonic()
    if (pid := os.fork()) == 0:
        try:
            run(test, folder)
        except BaseException:
            traceback.print_exc()
        finally:
            # Nothing that this process has to do at its end is the fork's.
            os._exit(0)
    _, _, usage = os.wait4(pid, 0)
    facts = json.loads((folder / "facts").read_text())
    # Of a processor, which other work on the machine does not change. That of processes which the tests start and do
    # not wait for is unknown.
    seconds = time.monotonic() - began if facts["starts_processes"] else usage.ru_utime + usage.ru_stime
    written = folder / test.replace("/", "~")
    names = set(written.read_text().splitlines()) if written.is_file() else set()
    table.put(test, names, seconds=seconds, starts_processes=facts["starts_processes"])
    return int(facts["code"])


def main(arguments: Sequence[str]) -> int:
    os.chdir(ROOT)
    path = ROOT / reached.TABLE
    tests = sorted(str(test.relative_to(ROOT)) for test in (ROOT / "tests").rglob("test_*.py"))
    table = reached.Table.read(path) if arguments else reached.Table()
    if not table.ran:
        for module, source in reached.read_sources(ROOT).items():
            table.add_functions(f"{module}:{name}" for name in source.functions)
    if arguments:
        for gone in table.seconds.keys() - set(tests):
            table.drop(gone)
        tests = [test for test in tests if test not in table.seconds] if arguments == ["missing"] else [*arguments]
    failed = []
    with tempfile.TemporaryDirectory(prefix="reached.") as name, recorded_processes(folder := Path(name)):
        for module in LOADED:
            importlib.import_module(module)
        for number, test in enumerate(tests, 1):
            code = record(test, folder, table)
            # After each: the recording takes as long as all tests one after another.
            table.write(path)
            print(f"{number}/{len(tests)} {test} {table.seconds[test]} s", flush=True)
            # 5: no test was selected, as where all are for a GPU.
            if code not in (0, 5):
                failed.append(test)
        advice.write_advice(ROOT / "CONTRIBUTING.md", table)
        if failed:
            print((folder / "log").read_text(errors="replace"))
            print("failed, and recorded as far as they went:", *failed)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
