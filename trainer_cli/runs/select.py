"""Which checkpoints `ckpt=` names: paths, globs, runs, and `RUN_DIR@latest`, `@best`, `@step500`."""

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
from typing import Any

import yaml

from trainer_cli.checkpoint.catalog import Catalog, Entry, catalog_of
from trainer_cli.checkpoint.find import checkpoint_at, extract_archive, is_archive, paths_of, split_existing
from trainer_cli.checkpoint.foreign.kind import kind_of
from trainer_cli.checkpoint.storage.open import open_storage
from trainer_cli.core.naming import CONFIG_FILE, MANIFEST_FILE, parse_step, with_ranks
from trainer_cli.core.patterns import alternatives, did_you_mean
from trainer_cli.core.url_path import as_path, is_url, is_web
from trainer_cli.errors import CheckpointError, RunDirectoryError, UserError
from trainer_cli.runs.metrics import best_rule, keep_best_of
from trainer_cli.runs.run_dir import RunDir

log = logging.getLogger(__name__)

_AT = re.compile(r"(?P<run>.+)@(?P<which>latest|best|step\d+)")
_CONFIG_BYTES = 1_000_000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Named:
    """How patterns name a folder."""

    run: Path | None
    """The directory of its run, where that is known."""
    itself: bool
    """Whether a pattern means this one alone, not all that a glob or a run names."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The checkpoints that patterns name, in order of run and step; what was passed over, and what is damaged."""

    paths: list[Path]
    skipped: dict[Path, str]
    damaged: dict[Path, str]


def select(patterns: Sequence[str]) -> Selection:
    """Expand every pattern before any work is done.

    A run directory means its newest valid checkpoint. A folder without a manifest is partial, and skipped; one whose
    manifest or sizes are wrong is damaged. A checkpoint that is named twice, also by another path, counts once.

    Raises:
        CheckpointError: a pattern matches nothing, or nothing valid.
        UserError: a pattern names a place that is no checkpoint.
    """
    found: dict[Path, tuple[str, int]] = {}
    skipped: dict[Path, str] = {}
    damaged: dict[Path, str] = {}
    seen: set[Path] = set()
    catalogs: dict[Path, Catalog] = {}
    for pattern in chain.from_iterable(_parts(_filled(each)) for each in patterns):
        matches = list(_matches(pattern))
        if not matches:
            raise CheckpointError(f"ckpt={pattern} matches nothing", cure=_nearby(pattern))
        for path in matches:
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            if kind_of(path) is not None:
                found[path] = (str(path.parent), 0)
                continue
            if path.parent not in catalogs:
                catalogs[path.parent] = catalog_of(path.parent)
            entry = catalogs[path.parent].entry(path.name)
            if entry.problem is not None:
                (skipped if entry.partial else damaged)[path] = entry.problem
            elif not os.path.lexists(pattern) and (original := _original_of(catalogs[path.parent], entry)):
                skipped[path] = f"it is a copy of {original}"
            else:
                found[path] = (str(path.parent), entry.step)
    if not found:
        listed = "\n".join(f"  {path}: {problem}" for path, problem in {**skipped, **damaged}.items())
        raise CheckpointError(f"ckpt={', '.join(patterns)} matches no valid checkpoint:\n{listed}\n")
    return Selection(sorted(found, key=lambda path: found[path]), skipped, damaged)


def _original_of(catalog: Catalog, entry: Entry) -> str | None:
    """The name of the checkpoint beside it that a user has copied; None if it is no copy of any."""
    if not entry.is_copy or entry.manifest is None or entry.manifest.name is None:
        return None
    original = catalog.entry(entry.manifest.name)
    return original.name if original.valid and original.manifest == entry.manifest else None


def select_one(pattern: str | list[str]) -> Path:
    """The one checkpoint that a pattern names: of those of one folder that a glob matches, the newest. A damaged one
    that the glob matches too is passed over with a warning.

    Raises:
        UserError: it names several, of several folders or in a list.
        CheckpointError: it names none.
    """
    selection = select([pattern] if isinstance(pattern, str) else pattern)
    chosen = selection.paths
    if len(chosen) > 1 and (isinstance(pattern, list) or len({path.parent for path in chosen}) > 1):
        raise UserError(
            f"ckpt={pattern} names {len(chosen)} checkpoints, and a run begins with one",
            cure=f"Name one of them, for example {ckpt_argument(chosen[-1])}.",
        )
    for path, problem in selection.damaged.items():
        log.warning("%s is passed over, and %s is used: %s", path, chosen[-1].name, problem)
    return chosen[-1]


def all_of(patterns: Sequence[str]) -> dict[Path, Named]:
    """Every folder that the patterns name, valid or not.

    A run, or a folder of checkpoints, names all that are in it. A checkpoint that is named twice, also by another
    path, counts once; a run that has no checkpoint yet is passed over where others have some.

    Raises:
        CheckpointError: a pattern names nothing.
    """
    found: dict[Path, Named] = {}
    seen: set[str] = set()
    empty: list[str] = []
    for pattern in map(_filled, patterns):
        named = _named(pattern)
        if not named and not is_run(Path(pattern)):
            raise CheckpointError(f"{pattern} names no checkpoint", cure=_readable(Path(pattern)) or _nearby(pattern))
        empty += [] if named else [pattern]
        for path, how in named.items():
            place = os.path.realpath(path)
            if place not in seen:
                seen.add(place)
                found[path] = how
    if not found:
        raise CheckpointError(f"{', '.join(empty)}: there is no checkpoint yet")
    return found


def ckpt_argument(pattern: str | Path) -> str:
    """`ckpt=PATTERN` as it is typed in bash and zsh."""
    text = str(pattern)
    # A value that begins so is a list, null or in quotes.
    if text == "null" or text[:1] in ("[", "'", '"', " "):
        text = f"./{text}"
    if text.endswith(" ") and '"' not in text:
        text = f'"{text}"'
    return f"ckpt={shlex.quote(text)}"


def _filled(pattern: str) -> str:
    """A pattern with the home folder for `~`, and with the ranks of this process."""
    return os.path.expanduser(with_ranks(pattern, os.environ))


def _named(pattern: str) -> dict[Path, Named]:
    found: dict[Path, Named] = {}
    holders: dict[Path, Path | None] = {}
    is_glob = not os.path.lexists(pattern)
    for path in _matches(pattern, whole_runs=True):
        if is_checkpoint(path) or parse_step(path.name) is not None:
            folder = path.parent
            if folder not in holders:
                holders[folder] = run_holding(folder)
            found[path] = Named(holders[folder], itself=not is_glob)
        elif path.is_dir() or is_url(path):
            folder = checkpoints_of(path)
            run = path if is_run(path) else run_holding(folder)
            found |= {folder / name: Named(run, itself=False) for name in _names(folder, run)}
    if (match := _at(pattern)) is not None:
        return dict.fromkeys(found, Named(as_path(match["run"]), itself=True))
    return found


def _names(folder: Path, run: Path | None) -> list[str]:
    """What a run, or a folder of checkpoints, names: all that exists. Of a folder elsewhere, which others may save
    in too, a run names its own alone."""
    catalog = catalog_of(folder)
    if run is None or run_holding(folder) is not None or (run_id := id_of(run)) is None:
        return catalog.names()
    return [entry.name for entry in catalog.entries() if entry.manifest and entry.manifest.run_id == run_id]


def id_of(run: Path | None) -> str | None:
    """What the checkpoints of a run carry; None if unknown."""
    try:
        return None if run is None else RunDir(run).run_id
    except RunDirectoryError:
        return None


def is_run(path: Path) -> bool:
    """True for the directory of a run, as far as one can see from outside."""
    return (path / CONFIG_FILE).is_file() and not is_checkpoint(path)


def run_holding(folder: Path) -> Path | None:
    """The run that a folder of checkpoints lies in; None if it lies in none, or elsewhere by `checkpoint.folder`."""
    run = folder / ".." if folder.name in ("", "..") else folder.parent
    return run if is_run(run) and os.path.realpath(checkpoints_of(run)) == os.path.realpath(folder) else None


def is_checkpoint(path: Path) -> bool:
    """True for a folder with a manifest."""
    if is_url(path):
        return open_storage(path.parent).peek(path.name, MANIFEST_FILE) is not None
    return (path / MANIFEST_FILE).is_file()


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints: `checkpoints/`, or what its config says; a folder of no run is its own."""
    if not is_run(run):
        return run
    config = run_config(run)
    section = config.get("checkpoint")
    named = section.get("folder") if isinstance(section, dict) else None
    if isinstance(named, str) and "${" in named:
        named = _resolved(config, run)
    if not isinstance(named, str):
        return run / "checkpoints"
    return as_path(named.replace("{run_name}", str(config.get("name") or "default")))


def _resolved(config: dict[str, Any], run: Path) -> str:
    """The value of `checkpoint.folder` where it refers to others."""
    # Most answers need no more than plain YAML.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return str(OmegaConf.select(OmegaConf.create(config), "checkpoint.folder", throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise UserError(
            f"checkpoint.folder is unknown: {str(error).splitlines()[0]}",
            where=str(run / CONFIG_FILE),
            cure="Name the folder of its checkpoints instead of the run.",
        ) from None


def run_config(run: Path) -> dict[str, Any]:
    """The written config of a run, unresolved; empty if it cannot be read."""
    try:
        with (run / CONFIG_FILE).open("rb") as file:
            found = yaml.load(file.read(_CONFIG_BYTES), Loader=_LOADER)
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _parts(pattern: str) -> list[str]:
    """The parts of `a,b`, unless something is called so."""
    match = _at(pattern)
    exists = os.path.lexists(pattern if match is None else match["run"])
    if "," not in pattern or "{" in pattern or exists or paths_of(pattern):
        return [pattern]
    return pattern.split(",")


def _matches(pattern: str, *, whole_runs: bool = False) -> Iterator[Path]:
    if (match := _at(pattern)) is not None:
        yield _of_run(as_path(match["run"]), match["which"])
        return
    if is_url(pattern):
        for alternative in alternatives(pattern):
            yield from _in_store(as_path(alternative), whole_runs=whole_runs)
        return
    if os.path.lexists(pattern):
        yield _straight(Path(pattern)) if whole_runs else _checkpoint(Path(pattern))
        return
    for path in map(Path, paths_of(pattern)):
        if path.is_file() and is_archive(path):
            yield extract_archive(path)
        elif path.is_dir() or kind_of(path) is not None:
            yield path


def _at(pattern: str) -> re.Match[str] | None:
    return None if os.path.lexists(pattern) else _AT.fullmatch(pattern)


def _straight(path: Path) -> Path:
    """A path that ends in a name."""
    return path if path.name not in ("", "..") else path.resolve()


def _checkpoint(path: Path) -> Path:
    """A path as it was named; the newest checkpoint of a run, or of a folder of checkpoints."""
    if path.is_dir() and not is_checkpoint(path) and kind_of(path) is None:
        for folder in (path, path / "checkpoints"):
            if is_run(folder) or catalog_of(folder).names():
                return _of_run(folder, "latest")
    if path.is_file() and is_archive(path):
        return extract_archive(path)
    if not path.is_dir() and kind_of(path) is None:
        raise UserError(
            f"ckpt={path} is a file that is no checkpoint",
            cure="A checkpoint is a directory, or a file of torch, Lightning, Composer or safetensors.",
        )
    return _straight(path)


def _in_store(path: Path, *, whole_runs: bool) -> Iterator[Path]:
    """What a URL names: a checkpoint, those that the glob in its last part matches, the newest of a folder (the folder
    if `whole_runs`), or files of another program, which are fetched."""
    if "?" in str(path) and is_web(path):
        # What follows the mark is a query, which belongs to the address of a file.
        if (file := checkpoint_at(path)) != path:
            yield file
        return
    if re.search(r"[*?\[]", str(path.parent)) and not catalog_of(path.parent).names():
        raise UserError(f"ckpt={path}: only the last part of a URL may have a glob")
    if re.search(r"[*?\[]", path.name):
        folder = path.parent
        yield from (folder / name for name in catalog_of(folder).names() if fnmatchcase(name, path.name))
    elif is_checkpoint(path) or ((names := catalog_of(path).names()) and whole_runs):
        yield path
    elif names:
        yield _of_run(path, "latest")
    elif (copy := checkpoint_at(path)) != path:
        yield copy


def _of_run(run: Path, which: str) -> Path:
    folder = checkpoints_of(run)
    if not folder.is_dir() and not is_url(folder):
        raise CheckpointError(f"{run}@{which}: there is no {folder}", cure=_nearby(str(run)))
    catalog, run_id = catalog_of(folder), id_of(run)
    if which == "latest":
        chosen = catalog.newest_valid(run_id)
        if chosen is not None:
            _warn_of_newer(catalog, chosen, run_id)
    elif which == "best":
        valid = catalog.valid(run_id)
        chosen = best_of(valid, run)
        if chosen is None and valid:
            raise CheckpointError(f"{run}@best: no checkpoint was saved at an evaluation, so none has a loss of one")
    else:
        # A damaged one is named too: whoever loads it says what is wrong with it.
        named = [
            entry
            for entry in catalog.entries()
            if f"step{entry.step}" == which and (entry.manifest is None or run_id in (None, entry.manifest.run_id))
        ]
        chosen = next((entry for entry in named if entry.valid), named[0] if named else None)
    if chosen is None:
        have = [entry.name for entry in catalog.valid(run_id)]
        listed = ", ".join([*have[:4], "…", *have[-4:]] if len(have) > 9 else have) or "no valid checkpoint"
        raise CheckpointError(f"{run}@{which}: there is none", cure=f"{folder} holds {listed}.")
    return folder / chosen.name


def _warn_of_newer(catalog: Catalog, chosen: Entry, run_id: str | None) -> None:
    """Warn of each newer checkpoint of the run that is damaged, or whose weights are not finite."""
    for entry in catalog.entries():
        of_another = entry.manifest is not None and run_id not in (None, entry.manifest.run_id)
        if entry.step > chosen.step and not (entry.partial or of_another):
            problem = entry.problem or "its weights are not finite"
            log.warning("%s is passed over, and %s is used: %s", entry.name, chosen.name, problem)


def best_of(valid: Sequence[Entry], run: Path | None) -> Entry | None:
    """The best checkpoint of a run (runs/metrics.py)."""
    facts = [saved for entry in valid if (saved := entry.saved()) is not None]
    keep_best = None if run is None else keep_best_of(run_config(run))
    rule = best_rule(keep_best, (name for saved in facts for name in saved.metrics))
    ranked = rule.ranked(facts) if rule is not None else []
    return next((entry for entry in valid if ranked and entry.name == ranked[0].name), None)


def _readable(path: Path) -> str | None:
    """What to do with a file or folder that only `ckpt=` takes."""
    found = "tar archive of a checkpoint" if path.is_file() and is_archive(path) else kind_of(path)
    return None if found is None else f"It is a {found}, which ckpt= of train fit and train validate reads."


def _nearby(pattern: str) -> str | None:
    """What there is where the pattern looks."""
    existing, rest = split_existing(pattern)
    folder = Path(existing + re.split(r"[*?\[{@]", rest, maxsplit=1)[0])
    if is_url(pattern):
        web = "Name one file, or one checkpoint: a web server may show no list of its files."
        return web if is_web(pattern) else None
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return None
    runs = [path for path in folder.iterdir() if is_run(path)] if folder == Path(pattern) else []
    if runs:
        return f"It holds runs: name one, such as {runs[0]}, or all, as '{folder}/*'."
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    wanted = re.split(r"[@/]", pattern[len(str(folder)) :].lstrip("/") if folder != Path() else pattern)[0]
    meant = did_you_mean(wanted, names) if wanted and wanted not in names and not re.search(r"[*?\[{]", wanted) else ""
    more = ", …" if len(names) > 8 else ""
    where = "The current folder" if folder == Path() else folder
    return f"{where} holds {', '.join(names[:8])}{more}.{meant}" if names else f"{where} is empty."
