"""Which checkpoints `ckpt=` names, and their small files.

It names paths, globs, runs, and `RUN@latest`, `RUN@best` or `RUN@step500`: the checkpoint of that step, or the one that
was replayed. `provide_steps` has an add-on replay it. RUN may be a glob too.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from trainer_cli.catalog import Catalog, Entry, ForeignKind, checkpoint_at, filled, paths_of, split_existing
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.files import as_path, is_url
from trainer_cli.layout import CONFIG_FILE, in_runs, parse_step
from trainer_cli.parts import IS_ARCHIVE
from trainer_cli.patterns import did_you_mean, expand_braces
from trainer_cli.runs import BestSettings, RunDir, is_checkpoint, replayed_entries
from trainer_cli.selection.stored import run_holding
from trainer_cli.terminal import format_first

log = logging.getLogger(__name__)

_RUN_AT = re.compile(r"(.+)@(latest|best|step\d+)")


class _RunAt(NamedTuple):
    """A pattern such as `RUN@best`, which selects a checkpoint of a run."""

    run: str
    selector: str
    """`latest`, `best` or `step500`."""

    def select(self) -> Path:
        """See `_select_from_run`."""
        return _select_from_run(as_path(self.run), self.selector)


@dataclass(frozen=True, slots=True)
class NamedFolder:
    """How a pattern names the folder of a checkpoint."""

    run: Path | None
    """The directory of its run, if known."""
    itself: bool
    """Whether the pattern names this folder alone, and not all that match a glob or belong to a run."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The checkpoints that patterns name."""

    paths: list[Path]
    """Valid ones, sorted by run and step."""
    skipped: dict[Path, str]
    """Partial ones and copies, with the reason."""
    damaged: dict[Path, str]
    """Damaged ones, with the problem."""


def select(patterns: Sequence[str]) -> Selection:
    """Expand every pattern before any work is done.

    A run directory names its newest valid checkpoint. A folder without a manifest is partial and skipped; one whose
    manifest or sizes are wrong is damaged. A checkpoint that is named twice, also by another path, counts once.

    Raises:
        CheckpointError: a pattern matches nothing, or nothing valid.
        UserError: a pattern names a file that is not a checkpoint.
    """
    run_and_step: dict[Path, tuple[str, int]] = {}
    skipped: dict[Path, str] = {}
    damaged: dict[Path, str] = {}
    seen: set[Path] = set()
    catalogs: dict[Path, Catalog] = {}
    for pattern in chain.from_iterable(_split_list(_fill_in(pattern)) for pattern in patterns):
        matches = list(_match(pattern))
        if not matches:
            raise CheckpointError(f"ckpt={pattern} matches nothing", cure=suggest_nearby(pattern))
        for path in matches:
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            if ForeignKind.of(path) is not None:
                run_and_step[path] = (str(path.parent), 0)
                continue
            if path.parent not in catalogs:
                catalogs[path.parent] = Catalog.of(path.parent)
            entry = catalogs[path.parent].entry(path.name)
            if entry.problem is not None:
                (skipped if entry.partial else damaged)[path] = entry.problem
            # A copy that is named by its own path is meant; one that a glob matches is not.
            elif not os.path.lexists(pattern) and (original := _original_of(catalogs[path.parent], entry)):
                skipped[path] = f"it is a copy of {original}"
            else:
                run_and_step[path] = (str(path.parent), entry.step)
    if not run_and_step:
        listed = "\n".join(f"  {path}: {problem}" for path, problem in {**skipped, **damaged}.items())
        raise CheckpointError(f"ckpt={', '.join(patterns)} matches no valid checkpoint:\n{listed}\n")
    return Selection(sorted(run_and_step, key=lambda path: run_and_step[path]), skipped, damaged)


def _original_of(catalog: Catalog, entry: Entry) -> str | None:
    """The name of the checkpoint in the same folder that this one is a copy of; None if it is not such a copy."""
    if not entry.is_copy or entry.manifest is None or entry.manifest.name is None:
        return None
    original = catalog.entry(entry.manifest.name)
    return original.name if original.valid and original.manifest == entry.manifest else None


def select_one(pattern: str | list[str]) -> Path:
    """Select the one checkpoint that a pattern names. If a glob matches several of one folder, it is the newest.

    A damaged one that the glob matches too is skipped with a warning.

    Raises:
        UserError: it names more than one in a list or in different folders.
        CheckpointError: it names none.
    """
    selection = select([pattern] if isinstance(pattern, str) else pattern)
    chosen = selection.paths
    # One glob may match several of one folder, of which the newest is taken.
    is_ambiguous = isinstance(pattern, list) or len({path.parent for path in chosen}) > 1
    if len(chosen) > 1 and is_ambiguous:
        raise UserError(
            f"ckpt={pattern} names {len(chosen)} checkpoints, and a run begins with one",
            cure=f"Name one of them, for example {ckpt_argument(chosen[-1])}.",
        )
    for path, problem in selection.damaged.items():
        log.warning("%s is skipped, and %s is used: %s", path, chosen[-1].name, problem)
    return chosen[-1]


def select_all(patterns: Sequence[str]) -> dict[Path, NamedFolder]:
    """Select every folder that the patterns name, valid or not.

    A run or a folder of checkpoints names all checkpoints in it. A checkpoint that is named twice, also by another
    path, counts once. A run without a checkpoint is skipped if other patterns name some.

    Raises:
        CheckpointError: a pattern names nothing.
    """
    folders: dict[Path, NamedFolder] = {}
    seen: set[str] = set()
    empty: list[str] = []
    for pattern in map(_fill_in, patterns):
        matches = _match_all(pattern)
        if not matches and not RunDir(Path(pattern)).is_run():
            cure = _suggest_ckpt(Path(pattern)) or suggest_nearby(pattern)
            raise CheckpointError(f"{pattern} names no checkpoint", cure=cure)
        empty += [] if matches else [pattern]
        for path, how_named in matches.items():
            real_path = os.path.realpath(path)
            if real_path not in seen:
                seen.add(real_path)
                folders[path] = how_named
    if not folders:
        raise CheckpointError(f"{', '.join(empty)}: there is no checkpoint yet")
    return folders


def named_steps(patterns: Sequence[str]) -> list[tuple[Path, int]]:
    """The (run, step) of each pattern `RUN@stepN` whose run is in a local folder."""
    single_patterns = chain.from_iterable(_split_list(_fill_in(pattern)) for pattern in patterns)
    runs_at = chain.from_iterable(map(_runs_at, single_patterns))
    steps = [(run, parse_step(selector)) for run, selector in runs_at if not is_url(run)]
    return [(Path(run), step) for run, step in steps if step is not None]


def run_of(named: str) -> str:
    """The run that `RUN@latest`, `RUN@best` or `RUN@step500` names; any other path itself."""
    runs = _runs_at(named)
    return runs[0].run if len(runs) == 1 else named


def named_path(named: str) -> Path:
    """The path of the checkpoint that `RUN@latest`, `RUN@best` or `RUN@step500` names; any other path itself.

    Raises:
        CheckpointError: the run has no such checkpoint.
    """
    runs = _runs_at(named)
    return runs[0].select() if len(runs) == 1 else as_path(named)


def has_step(run: Path, step: int) -> bool:
    """Whether a checkpoint of a step of a run was kept, valid or damaged, or was replayed."""
    run_id = RunDir(run).known_id
    for entry in Catalog.of(RunDir(run).stored_checkpoints()).entries():
        if entry.step == step and entry.may_be_of(run_id) and not entry.partial:
            return True
    return any(entry.step == step for entry in replayed_entries(RunDir(run)))


def ckpt_argument(pattern: str | Path) -> str:
    """`ckpt=PATTERN`, quoted for bash and zsh."""
    text = str(pattern)
    # The parser of overrides would read such a value as a list, null or a quoted text.
    if text == "null" or text[:1] in ("[", "'", '"', " "):
        text = f"./{text}"
    if text.endswith(" ") and '"' not in text:
        text = f'"{text}"'
    return f"ckpt={shlex.quote(text)}"


def _fill_in(pattern: str) -> str:
    """Replace `~` by the home folder, and `{rank}` and the like by the ranks of this process."""
    return filled(os.path.expanduser(pattern))


def _match_all(pattern: str) -> dict[Path, NamedFolder]:
    """Every folder of a checkpoint that one pattern names, valid or not."""
    if runs_at := _runs_at(pattern):
        return {run_at.select(): NamedFolder(as_path(run_at.run), itself=True) for run_at in runs_at}
    folders: dict[Path, NamedFolder] = {}
    runs: dict[Path, Path | None] = {}
    is_glob = not os.path.lexists(pattern)
    for path in _match(pattern, whole_runs=True):
        if is_checkpoint(path) or parse_step(path.name) is not None:
            folder = path.parent
            if folder not in runs:
                runs[folder] = run_holding(folder)
            folders[path] = NamedFolder(runs[folder], itself=not is_glob)
        elif path.is_dir() or is_url(path):
            folder = RunDir(path).stored_checkpoints()
            run = path if RunDir(path).is_run() else run_holding(folder)
            folders |= {folder / name: NamedFolder(run, itself=False) for name in _names_in(folder, run)}
    return folders


def _names_in(folder: Path, run: Path | None) -> list[str]:
    """The checkpoints in a folder; outside of the run, where other runs may save too, only those of the run."""
    catalog = Catalog.of(folder)
    if run is None or run_holding(folder) is not None or (run_id := RunDir(run).known_id) is None:
        return catalog.names()
    return [entry.name for entry in catalog.entries() if entry.manifest and entry.manifest.run_id == run_id]


def _split_list(pattern: str) -> list[str]:
    """Split `a,b`, unless a file or folder has that name."""
    exists = os.path.lexists(pattern) or any(os.path.lexists(run) for run, _ in _runs_at(pattern))
    if "," not in pattern or "{" in pattern or exists or paths_of(pattern):
        return [pattern]
    return pattern.split(",")


def _match(pattern: str, *, whole_runs: bool = False) -> Iterator[Path]:
    """The paths that one pattern names; a run or a folder of checkpoints stays itself if `whole_runs`."""
    if runs_at := _runs_at(pattern):
        yield from (run_at.select() for run_at in runs_at)
        return
    if is_url(pattern):
        for alternative in expand_braces(pattern):
            yield from _match_url(as_path(alternative), whole_runs=whole_runs)
        return
    # What exists is taken as written, also if its name holds signs of a glob.
    if os.path.lexists(pattern):
        yield _with_name(Path(pattern)) if whole_runs else _checkpoint_at(Path(pattern))
        return
    for path in map(Path, paths_of(pattern)):
        if (extracted := checkpoint_at(path)) != path:
            yield extracted
        elif path.is_dir() or ForeignKind.of(path) is not None:
            yield path


def _runs_at(pattern: str) -> list[_RunAt]:
    """The runs of `RUN@latest`, `RUN@best` or `RUN@step500`; none for another pattern, or if a path has that name.

    `*`, `?` and `[` name those that they match and that have a checkpoint, or one of that step.
    """
    existing, globbed = split_existing(pattern)
    matches = [_RUN_AT.fullmatch(existing + alternative) for alternative in expand_braces(globbed) if globbed]
    alternatives = [_RunAt(*match.groups()) for match in matches if match is not None]
    if len(alternatives) < len(matches):
        return []
    runs_at: list[_RunAt] = []
    for run_at in alternatives:
        name, selector = run_at
        if not _has_wildcard(name[len(existing) :]):
            runs_at.append(run_at)
            continue
        # A path that is the pattern itself is taken as it is written.
        runs = [run for run in paths_of(name) if run == name or _has_checkpoint(Path(run), selector)]
        runs_at += [_RunAt(run, selector) for run in runs]
    return runs_at


def _has_wildcard(path: str) -> bool:
    """Whether a path has a sign of a glob; that of a URL is not expanded."""
    return not is_url(path) and re.search(r"[*?\[]", path) is not None


def _has_checkpoint(run: Path, selector: str) -> bool:
    """Whether a folder is of a run with any checkpoint, or with the step that the selector names."""
    if not run.is_dir():
        return False
    if (step := parse_step(selector)) is not None:
        return has_step(run, step)
    return bool(Catalog.of(RunDir(run).stored_checkpoints()).names())


def _with_name(path: Path) -> Path:
    """The path, resolved if it ends in `..` or has no name, so that its last part is the name."""
    return path if path.name not in ("", "..") else path.resolve()


def _checkpoint_at(path: Path) -> Path:
    """The checkpoint at an existing path: the newest of a run or of a folder of checkpoints, else the path itself."""
    is_folder = path.is_dir() and not is_checkpoint(path) and ForeignKind.of(path) is None
    if is_folder and (RunDir(path).is_run() or Catalog.of(RunDir(path).stored_checkpoints()).names()):
        return _select_from_run(path, "latest")
    if (extracted := checkpoint_at(path)) != path:
        return extracted
    if not path.is_dir() and ForeignKind.of(path) is None:
        raise UserError(
            f"ckpt={path} is a file, but not a checkpoint",
            cure="A checkpoint is a directory, or a file of torch, Lightning, Composer or safetensors.",
        )
    return _with_name(path)


def _match_url(path: Path, *, whole_runs: bool) -> Iterator[Path]:
    """The paths that a URL names.

    These are a checkpoint, those that a glob in its last part matches, the newest one of a folder (the folder itself if
    `whole_runs`), or a downloaded copy of files of another program.
    """
    if "?" in str(path) and is_url(path, web=True):
        # A question mark begins the query of a web address; elsewhere it is a glob.
        if (file := checkpoint_at(path)) != path:
            yield file
        return
    if re.search(r"[*?\[]", str(path.parent)) and not Catalog.of(path.parent).names():
        raise UserError(f"ckpt={path}: only the last part of a URL may have a glob")
    if re.search(r"[*?\[]", path.name):
        folder = path.parent
        yield from (folder / name for name in Catalog.of(folder).names() if fnmatchcase(name, path.name))
    elif is_checkpoint(path) or ((names := Catalog.of(path).names()) and whole_runs):
        yield path
    elif names:
        yield _select_from_run(path, "latest")
    elif (copy := checkpoint_at(path)) != path:
        yield copy


def _select_from_run(run: Path, selector: str) -> Path:
    """The checkpoint of a run that `latest`, `best` or `step500` selects.

    Raises:
        CheckpointError: no checkpoint matches.
    """
    folder = RunDir(run).stored_checkpoints()
    # A step may have been replayed in a run that saves no checkpoints.
    if not folder.is_dir() and not is_url(folder) and parse_step(selector) is None:
        raise CheckpointError(f"{run}@{selector}: there is no {folder}", cure=suggest_nearby(str(run)))
    catalog, run_id = Catalog.of(folder), RunDir(run).known_id
    if selector == "latest":
        chosen = catalog.newest_valid(run_id)
        if chosen is not None:
            _warn_of_newer(catalog, chosen, run_id)
    elif selector == "best":
        valid = catalog.valid(run_id)
        chosen = best_of(valid, run)
        if chosen is None and valid:
            raise CheckpointError(
                f"{run}@best: no checkpoint has a loss on a validation set that is no test set, measured when it was "
                "saved",
                cure="Name a step, or set checkpoint.keep_best.metric in a run.",
            )
    else:
        entries = [entry for entry in catalog.entries() if entry.may_be_of(run_id)]
        of_step = [entry for entry in entries if f"step{entry.step}" == selector]
        # A valid one, else a damaged one, whose loading reports the damage, else a partial one.
        chosen = min(of_step, key=lambda entry: (not entry.valid, entry.partial), default=None)
        if chosen is None or chosen.partial:
            replayed = [] if is_url(run) else replayed_entries(RunDir(run))
            chosen = next((entry for entry in replayed if f"step{entry.step}" == selector), chosen)
            folder = RunDir(run).replayed_folder if chosen in replayed else folder
    if chosen is None:
        listed = _list_ends([entry.name for entry in catalog.valid(run_id)]) or "no valid checkpoint"
        raise CheckpointError(f"{run}@{selector}: there is none", cure=f"{folder} holds {listed}.")
    return folder / chosen.name


def _warn_of_newer(catalog: Catalog, chosen: Entry, run_id: str | None) -> None:
    """Warn of each newer checkpoint of the run that is damaged, or whose weights are not finite."""
    for entry in catalog.entries():
        if entry.step > chosen.step and not entry.partial and entry.may_be_of(run_id):
            problem = entry.problem or "its weights are not finite"
            log.warning("%s is skipped, and %s is used: %s", entry.name, chosen.name, problem)


def best_of(valid: Sequence[Entry], run: Path | None) -> Entry | None:
    """The best of these checkpoints of a run, by `BestSettings.rule`; None if none was saved at an evaluation."""
    facts = [entry.facts for entry in valid if entry.facts is not None]
    # Read now: the rule of the run may have changed since the checkpoint was saved.
    settings = BestSettings.of({} if run is None else RunDir(run).values)
    rule = settings.rule(name for saved in facts for name in saved.metrics)
    best = rule.ranked(facts)[:1] if rule is not None else []
    best_names = [saved.name for saved in best]
    return next((entry for entry in valid if entry.name in best_names), None)


def _suggest_ckpt(path: Path) -> str | None:
    """The hint for a file or folder that only `ckpt=` reads; None for any other."""
    recognise = IS_ARCHIVE.find()
    is_archive = recognise is not None and path.is_file() and recognise(path)
    kind = "tar archive of a checkpoint" if is_archive else ForeignKind.of(path)
    return None if kind is None else f"It is a {kind}, which ckpt= of train fit and train validate reads."


def _list_ends(names: Sequence[str]) -> str:
    """The names, of many the first and the last four, for a message."""
    return ", ".join([*names[:4], "…", *names[-4:]] if len(names) > 8 else names)


def suggest_selector(pattern: str) -> str | None:
    """The hint for `RUN@41` or `RUN@lates`; None for any other pattern."""
    run, at, selector = pattern.rpartition("@")
    if not at or is_url(run) or not RunDir(Path(run)).is_run():
        return None
    if selector.isdecimal():
        return f"Write {run}@step{selector}."
    return f"Write {run}@latest, {run}@best or {run}@step500.{did_you_mean(selector, ('latest', 'best'))}"


def suggest_nearby(pattern: str) -> str | None:
    """The hint that lists the folder in which a pattern looks; None without a folder."""
    if (hint := suggest_selector(pattern)) is not None:
        return hint
    if (path_in_runs := in_runs(pattern)) is not None:
        return f"Did you mean '{path_in_runs}'?"
    if re.fullmatch(r"(best|last|latest)(\.\w+)?", pattern):
        file = min(Path("runs").glob(f"*/{CONFIG_FILE}"), default=Path("runs/NAME", CONFIG_FILE))
        return f"Write RUN@best or RUN@latest, such as {file.parent}@best."
    existing, glob = split_existing(pattern)
    folder = Path(existing + re.split(r"[*?\[{@]", glob, maxsplit=1)[0])
    if is_url(pattern):
        web = "Name one file, or one checkpoint: a web server may show no list of its files."
        return web if is_url(pattern, web=True) else None
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return None
    # Only where the pattern is a folder: one above it may hold folders that may not be read, such as lost+found.
    runs = [path for path in folder.iterdir() if RunDir(path).is_run()] if folder == Path(pattern) else []
    if runs:
        return f"It holds runs: name one, such as {runs[0]}, or all, as '{folder}/*'."
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    names.sort(key=lambda name: [int(text) if text.isdecimal() else text for text in re.split(r"(\d+)", name)])
    path_below = pattern if folder == Path() else pattern[len(str(folder)) :].lstrip("/")
    typed = re.split(r"[@/]", path_below)[0]
    # Another step with similar digits is no likely meaning.
    is_typo = typed and typed not in names and not re.search(r"[*?\[{]|^step\d+$", typed)
    # A checkpoint of one file is near to no module of similar letters.
    alike = [name for name in names if Path(name).suffix == Path(typed).suffix]
    suggestion = did_you_mean(typed, alike or names) if is_typo else ""
    steps = [name for name in names if parse_step(name) is not None]
    if "epoch" in typed and steps:
        return f"Checkpoints are named by their step: did you mean '{folder}/step*' ({format_first(steps)})?"
    where = "The current folder" if folder == Path() else folder
    return f"{where} holds {_list_ends(names)}.{suggestion}" if names else f"{where} is empty."
