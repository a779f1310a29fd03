"""Which tests are about a package, and how long they take, for CONTRIBUTING.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from reached import Table


class Advice(NamedTuple):
    """The folders of tests for a package."""

    package: str
    folders: list[str]
    share: float
    """The share of the package's functions that these tests run, of those that any test runs."""
    seconds: float


_ENOUGH, _MOST_FOLDERS = 0.95, 3


def advise(table: Table) -> list[Advice]:
    """For each package the folders of tests that are about it, until they run nearly all of its functions.

    A test file is about a package as far as the functions that it runs are of this package.
    """
    ran_by: dict[str, set[str]] = defaultdict(set)
    for name, tests in table.ran.items():
        for test in tests:
            ran_by[test].add(name)
    focus: dict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for test, names in ran_by.items():
        for package, count in Counter(map(_package_of, names)).items():
            focus[package][_folder_of(test)] += count / len(names)
    seconds: defaultdict[str, float] = defaultdict(float)
    for test, each in table.seconds.items():
        seconds[_folder_of(test)] += each
    files_in = Counter(map(_folder_of, ran_by))
    advice = []
    for package, ranking in sorted(focus.items()):
        left = {name for name, tests in table.ran.items() if tests and _package_of(name) == package}
        count, folders = len(left), list[str]()
        for folder in sorted(ranking, key=lambda folder: ranking[folder] / files_in[folder], reverse=True):
            run_here = {name for name in left if any(_folder_of(test) == folder for test in table.ran[name])}
            # A file in `tests` itself is about all packages.
            is_folder = not folder.endswith(".py")
            if is_folder and len(folders) < _MOST_FOLDERS and len(left) > (1 - _ENOUGH) * count and run_here:
                folders.append(folder)
                left -= run_here
        advice.append(Advice(package, folders, 1 - len(left) / count, sum(seconds[folder] for folder in folders)))
    return advice


_BEGIN, _END = "<!-- by scripts/record.py -->", "<!-- end -->"


def write_advice(page: Path, table: Table) -> None:
    """Write the table of packages, their tests and how long these take between the two marks of a page."""
    rows = ["| package | tests | of its functions | takes |", "|---|---|--:|--:|"]
    for advice in advise(table):
        folders = " ".join(f"`{folder}`" for folder in advice.folders)
        rows.append(f"| `{advice.package}` | {folders} | {advice.share:.0%} | {_about(advice.seconds)} |")
    before, begin, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    page.write_text("\n".join([before + begin, *rows, end + after]), encoding="utf-8")


def _about(seconds: float) -> str:
    """A duration that the next recording does not change: seconds are rounded to 1, 2, 5, 10, 20, 50 and so on."""
    step = next(n * 10**power for power in range(6) for n in (1, 2, 5) if seconds <= n * 10**power)
    return f"{step} s" if step < 100 else f"{step // 60} min"


def _folder_of(test: str) -> str:
    """The folder of a test file; the file itself, if it lies in `tests`."""
    folder = test.rpartition("/")[0]
    return test if folder == "tests" else folder


def _package_of(function: str) -> str:
    """The folder of the package that holds a function; `trainer_cli` for a module beside the folders."""
    parts = function.partition(":")[0].split(".")
    depth = 3 if parts[1] == "addons" else 2
    return ".".join(parts[:depth] if len(parts) > depth else parts[:1])
