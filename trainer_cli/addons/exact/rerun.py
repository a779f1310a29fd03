"""Make a whole run again, from the source that it keeps, and compare all that it has recorded while that trains.

    NEW/.rerun/original/   what was packed of the run, if a file is given
    NEW/.rerun/rerun.json  which run is made again, and which of its states were equal

The new run is an ordinary one: if it was killed, the same command resumes it, and compares the rest. `train pack`
writes a file with the files of a run but weights, data and logs, and with digests of the states in its checkpoints.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer_cli.addons.exact.replay import not_comparable
from trainer_cli.addons.exact.replay_plan import config_of, find_boundary, find_changes, find_returns, read_config
from trainer_cli.addons.exact.replay_records import RecordComparison
from trainer_cli.config import Composed, from_yaml
from trainer_cli.errors import UserError
from trainer_cli.files import read_rows
from trainer_cli.origin import KeptSource, of_project, use_kept_source
from trainer_cli.processes import text_of
from trainer_cli.runs import Run, RunDir, read_json, write_json
from trainer_cli.storage import replacing
from trainer_cli.strict_json import strict_json
from trainer_cli.terminal import format_count, format_first

_FACTS_FILE = "packed.json"
_PACKED = ("config.yaml", "environment.json", "summary.json", "metrics.jsonl", "source")
_MOST_BYTES = 1 << 30
_NO_CAUSE = ("run_id", "time", "argv", "host", "project_root", "git", "versions")


class Original(NamedTuple):
    """The run that is made again."""

    run: RunDir
    attempt: int
    """The first attempt."""
    last: int
    """The last step that its source and config have made."""
    ends: str
    """Why later steps of the run are not made again; empty without later ones."""
    states: Mapping[int, Path | Sequence[Any]]
    """Its kept checkpoints by step; of a packed run the digests of each rank's state."""
    returns: Sequence[Sequence[int]]
    """Steps of checkpoints between which it went back to one: its records are those of the last time."""

    @classmethod
    def of(cls, path: Path) -> Original:
        """The run in a directory, which may be that of a packed one.

        Raises:
            UserError: it is none.
        """
        if (facts := read_json(path / _FACTS_FILE)) is not None:
            states = {int(step): ranks for step, ranks in facts["states"].items()}
            return cls(RunDir(path), facts["attempt"], facts["last"], facts["ends"], states, facts.get("returns", ()))
        history = Run.open(path)
        first = history.attempt_of(history.first_step + 1)
        last, ends = _find_end(history, first)
        kept = {entry.step: checkpoint for entry, checkpoint in history.entries if entry.step <= last}
        return cls(history.directory, first, last, ends, kept, find_returns(history))

    def read_source(self) -> KeptSource | None:
        """The source that the first attempt kept; None without one."""
        return KeptSource.of_attempt(self.run, self.attempt)

    def digests(self, step: int) -> Sequence[Any]:
        """The digests of the state after a step, of each rank.

        Raises:
            CheckpointError: its checkpoint is gone, or damaged.
        """
        # Imported here: it imports torch.
        from trainer_cli.addons.exact.rerun_observer import digest_checkpoint

        state = self.states[step]
        return digest_checkpoint(state) if isinstance(state, Path) else state


def _find_end(history: Run, first: int) -> tuple[int, str]:
    """The last step that the first attempt's config and source have made, and what ends there."""
    last, ends = history.reached, ""
    while (boundary := find_boundary(history, history.first_step, last)) is not None:
        last, ends = boundary
    sources = {attempt.get("attempt"): attempt.get("source") for attempt in history.attempts}
    for attempt in history.attempts:
        number, start = attempt.get("attempt"), int(attempt.get("start_step") or 0)
        if start < last and sources[number] != sources.get(first) and history.attempt_of(start + 1) == number:
            last, ends = start, f"attempt {number}, which has another source than the first, began at step {start}"
    return last, ends


def pack(run: Path, output: Path) -> None:
    """Write what a rerun needs of a run into one file, without weights and data.

    Raises:
        UserError: the run keeps no source, or the file exists.
        CheckpointError: a checkpoint, or the kept source, is damaged.
    """
    original = Original.of(run)
    if original.read_source() is None:
        raise UserError(f"{run} keeps no source of its first attempt", cure="Only a run that keeps it can be packed.")
    states = {str(step): original.digests(step) for step in original.states}
    content = strict_json({**original._asdict(), "run": None, "states": states}).encode()
    facts = tarfile.TarInfo(_FACTS_FILE)
    facts.size = len(content)
    with replacing(output, overwrite=False) as staging, tarfile.open(staging, "w:gz") as tar:
        tar.addfile(facts, io.BytesIO(content))
        for name in filter(lambda name: (run / name).exists(), _PACKED):
            tar.add(run / name, name)


def _unpack(file: Path, folder: Path) -> None:
    """Write the files of a packed run, which may come from anybody, into a folder.

    Raises:
        UserError: it is no packed run, or it would write elsewhere, or too much.
    """
    try:
        with gzip.open(file) as packed:
            content = packed.read(_MOST_BYTES + 1)
        # In memory before it is parsed: a small archive may claim headers and files of any size.
        if len(content) > _MOST_BYTES:
            raise ValueError("it is too large")
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            # It refuses what leads out of the folder, by its name or by a link, and what is no file.
            tar.extractall(folder, filter="data")
        if read_json(folder / _FACTS_FILE) is None:
            raise ValueError(f"it has no {_FACTS_FILE}")
    except (ValueError, EOFError, OSError, zlib.error, tarfile.TarError) as error:
        message = f"{file} is no packed run: {str(error)[:200]}"
        raise UserError(message, cure="`train pack RUN` writes one.") from None


class Rerun:
    """A new run that makes another one again.

    Args:
        run: the directory of that run, or a file of `train pack`.
        output: the directory of the new run.
        overrides: of its config; `source=project` takes the project as it is now.
    """

    def __init__(self, run: Path, output: Path, overrides: Sequence[str]) -> None:
        self.new, self._folder = RunDir(output), output / ".rerun"
        self._state_file, self._overrides = self._folder / "rerun.json", overrides
        if not self._state_file.exists():
            self._begin(run)
        packed = self._folder / "original"
        self.original = Original.of(packed if packed.exists() else run)
        self._source = self.original.read_source()
        self.environment = self.original.run.environment_of(self.original.attempt)
        if self._read_state()["run_id"] != self.original.run.run_id:
            raise UserError(f"{output} was begun as a rerun of another run", cure="Name a new directory with -o.")

    def _begin(self, run: Path) -> None:
        """Write what is beside the new run; all of it or nothing."""
        if self.new.path.exists() and any(self.new.path.iterdir()):
            raise UserError(f"{self.new.path} is not empty", cure="Name a new directory for the run that is made: -o.")
        with replacing(self._folder, overwrite=True) as staging:
            staging.mkdir()
            if run.is_file():
                _unpack(run, staging / "original")
                run = staging / "original"
            original = Original.of(run)
            if original.read_source() is None and not of_project(self._overrides):
                raise UserError(
                    f"{run} keeps no source, so it is unknown which code has made it",
                    cure="To make it with the project as it is now, add source=project.",
                )
            write_json(staging / self._state_file.name, {"run_id": original.run.run_id, "states": {}})

    def _read_state(self) -> dict[str, Any]:
        return read_json(self._state_file) or {"run_id": None, "states": {}}

    def note_state(self, step: int, difference: str | None) -> None:
        """Record durably how the state after a step compares: its checkpoint here may be removed later."""
        state = self._read_state()
        write_json(self._state_file, {**state, "states": {**state["states"], str(step): difference}})

    def compose(self) -> Composed:
        """The config of the new run: that of the first attempt, elsewhere."""
        source = self._source
        changes = [
            f"run_dir={text_of(str(self.new.path))}", f"name={text_of(self.new.path.name)}", "resume=auto",
            "loop.max_time=null", "checkpoint.folder=null", "checkpoint.copy_to.folder=null",
        ]  # fmt: skip
        use_kept_source(self.original.run, self.original.attempt, self._overrides)
        stored = config_of(Run(self.original.run.path), self.original.attempt) if source is None else source.config
        # Of one's own run all that made it is trusted, as when it began: source and config are signed together.
        trusted = source is not None and source.is_own
        return from_yaml(stored, [*changes, *self._overrides], trusted=trusted)

    def compare_records(self) -> RecordComparison:
        """The records of the run, and those that the new one has written."""
        return RecordComparison(
            Run(self.original.run.path).records,
            after=-1,
            without=not_comparable(read_config(self.new.config_file).config),
            replayed=read_rows(self.new.metrics_file),
        )

    def find_difference(self, step: int) -> str | None:
        """The first difference up to a step, of the records and states that both runs have; None without any."""
        step = next((begin for begin, end in self.original.returns if begin < step < end), step)
        differing = next(self.compare_records().differences(step, ended=step >= self.original.last), None)
        unequal = {int(at): name for at, name in self._read_state()["states"].items() if name is not None}
        first = min(unequal, default=None)
        if first is not None and (differing is None or first < differing.step):
            return f"step {first}: {unequal[first]} differs from the kept checkpoint"
        return None if differing is None else str(differing)

    def describe_compared(self, step: int) -> str:
        """What was compared up to a step, all of which is equal."""
        records, states = len(self.compare_records().steps(step)), len(self._read_state()["states"])
        return f"equal up to step {step:,}: {format_count(records, 'record')} and {format_count(states, 'checkpoint')}"

    def find_causes(self) -> list[str]:
        """What of the new run is not as it was, the likeliest cause of a difference first."""
        from trainer_cli.data import other_samples

        attempt = len(self.new.attempts)
        source, now = self._source, KeptSource.of_attempt(self.new, attempt)
        causes = []
        if source is not None and now is not None:
            files = source.files.keys() | now.files.keys()
            code = sorted(name for name in files if source.files.get(name) != now.files.get(name))
            data = other_samples(now.facts.samples, source.facts.samples)
            causes = [
                f"the {kind} is another: {format_first(of)}" for kind, of in (("code", code), ("data", data)) if of
            ]
            causes += map(str, find_changes(source.config, read_config(self.new.config_file)))
        before, after = (
            {**facts, **(facts.get("versions") or {})} for facts in (self.environment, self.new.environment_of(attempt))
        )
        differing = [name for name in before if name not in _NO_CAUSE and before[name] != after.get(name)]
        causes += [f"{name} {before[name]} (here {after.get(name)})" for name in differing]
        return causes or [
            "nothing that the run keeps differs here: perhaps a kernel that sums in no fixed order "
            "(deterministic=true), or something that changes from run to run (`train check resume` looks for it)"
        ]
