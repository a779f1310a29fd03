"""Milliseconds that a run takes at its start to keep its source, and a later command to compare and to use it."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path

from settings import Settings
from table import Column, Row, Table
from timing import interleaved
from trainer_cli.config import Composed, compose
from trainer_cli.environment import versions
from trainer_cli.origin import DataAndSource, KeptSource, keep_source
from trainer_cli.runs import RunDir

SMALL = 6
"""Files of a small project."""
_names = count()


def measure(settings: Settings) -> list[Table]:
    """One table. The modules of the projects are imported before, as in a run."""
    large = settings.pick(smoke=20, quick=200, whole=200)
    with tempfile.TemporaryDirectory(dir=settings.scratch) as scratch:
        small, other = (_Project(Path(scratch), files) for files in (SMALL, large))
        none = "nothing"
        measures = {
            none: lambda: {"wall": 0.0, "processor": 0.0},
            f"kept source, {SMALL} files": small.keep_anew,
            f"kept source, {large} files": other.keep_anew,
            f"the same source again, {SMALL} files": small.keep_again,
            f"comparison with the project, {SMALL} files": small.compare,
            f"a view of the kept source, {SMALL} files": small.view,
        }
        samples, skipped = interleaved(measures, settings.rounds_or(5, 15), warm=1, needed=list(measures))
    notes = [
        "In a process that has imported a project of modules of 60 lines, on the disk of the other tables: what "
        "`train fit` does before its first step to keep its source durably, and what a later command does to verify "
        "and use it. The goal is at most 30 ms for the small project."
    ]
    columns = [Column("wall", "ms", 1, resolution=2.0, ratio=False), Column("processor", "ms", 1, ratio=False)]
    rows = [Row(name, samples[name]) for name in measures]
    return [Table("source", "The source that a run keeps", none, columns, rows, {"files": large}, skipped, notes)]


class _Project:
    """A package whose modules import one another, and a run directory for each source that is kept of it."""

    def __init__(self, scratch: Path, files: int) -> None:
        self.root = (scratch / f"project{files}").resolve()
        package = self.root / f"package{files}"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        body = "\n".join(f"def function{line}(value):\n    return value + {line}\n" for line in range(20))
        for number in range(1, files):
            before = f"from package{files} import module{number - 1}\n\n\n" if number > 1 else ""
            (package / f"module{number}.py").write_text(before + body)
        sys.path.insert(0, str(self.root))
        # In order: each has imported the one before it.
        for number in range(1, files):
            import_module(f"package{files}.module{number}")
        self.composed: Composed = compose(["experiment=digits_mlp"], cwd=self.root)
        self.text = self.composed.to_yaml()
        self.environment = {"python": sys.version.split()[0], "versions": versions()}
        self.kept = self._keep(self._new_run())

    def _new_run(self) -> RunDir:
        run = RunDir(self.root / f"runs/run{next(_names)}")
        run.path.mkdir(parents=True)
        return run

    def _keep(self, run: RunDir) -> Path:
        digest = keep_source(run, self.composed, self.text, DataAndSource({}, {}), self.environment, begins=True)
        assert digest is not None
        return run.source_folder / digest

    def keep_anew(self) -> dict[str, float]:
        run = self._new_run()
        return _timed(partial(self._keep, run))

    def keep_again(self) -> dict[str, float]:
        return _timed(partial(self._keep, RunDir(self.kept.parent.parent)))

    def compare(self) -> dict[str, float]:
        return _timed(lambda: KeptSource.read(self.kept).find_differences(self.root))

    def view(self) -> dict[str, float]:
        source, folder = KeptSource.read(self.kept), self.root / "view"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return _timed(lambda: source.write_view(folder, self.root))


def _timed(action: Callable[[], object]) -> dict[str, float]:
    began, processor = time.perf_counter(), time.process_time()
    action()
    return {"wall": 1e3 * (time.perf_counter() - began), "processor": 1e3 * (time.process_time() - processor)}
