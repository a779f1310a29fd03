"""Finds checkpoints by step, epoch, glob or path."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path

from trainer_cli.catalog.catalog import Catalog, Entry
from trainer_cli.catalog.foreign_kind import ForeignKind
from trainer_cli.catalog.path_variables import RANK_VARIABLES, fill_in, rank_variables_in, variables_in
from trainer_cli.errors import NoCheckpointError, UserError
from trainer_cli.files import as_path, is_url
from trainer_cli.layout import MANIFEST_FILE, VARIABLES, Naming, numbers_within
from trainer_cli.parallel import find_default_ranks
from trainer_cli.parts import EXTRACT_ARCHIVE, IS_ARCHIVE
from trainer_cli.patterns import expand_braces
from trainer_cli.storage import Storage, open_storage

_MOST_DIGITS = 12
"""Of the steps that `checkpoint_pattern` matches."""
_STEP_AND_SUFFIX = re.compile(r"step[0-9]+(?:-(.+))?", re.DOTALL)


def latest_checkpoint(folder: str | Path, suffix: str | None = None) -> Path:
    """The numerically newest valid checkpoint of a folder: of the names with this suffix, or without one if it is None
    or empty (`step20-ema` has one; in names of another form, such as `ep1-ba20`, none is seen).

    Where more have the same step, the one with the plainest name is used. Incomplete checkpoints and copies
    (`step10.bak`) never match.
    `{rank}`, `{local_rank}` and `{node_rank}` in folder and suffix are those of this process. Sizes are checked,
    digests when it is loaded.

    Raises:
        NoCheckpointError: no checkpoint matches; the message names the folder and what it holds.
    """
    return _find_newest(folder, suffix, lambda entry: True, "checkpoint")


def checkpoint_path(
    folder: str | Path,
    step: int | None = None,
    epoch: int | None = None,
    suffix: str | None = None,
    must_exist: bool = True,
) -> Path:
    """The checkpoint of a step, or the newest one of an epoch (counted as at its saving); suffix as in
    `latest_checkpoint`.

    Args:
        must_exist: False returns, if it is not there, the path at which it is to be saved: `step10`, `epoch3`.

    Raises:
        ValueError: neither or both of `step` and `epoch` are given.
        NoCheckpointError: no checkpoint matches.
    """
    if (step is None) is (epoch is None):
        raise ValueError("give either step or epoch")
    if not must_exist:
        try:
            return checkpoint_path(folder, step, epoch, suffix)
        except FileNotFoundError:
            naming = Naming("epoch{epoch}" if step is None else "step{step}", suffix or None)
            return as_path(filled(str(folder))) / naming.name({"step": step, "epoch": epoch})
    if step is not None:
        return _find_newest(folder, suffix, lambda entry: entry.step == step, f"checkpoint of step {step}")
    return _find_newest(
        folder,
        suffix,
        lambda entry: entry.manifest is not None and entry.manifest.epoch == epoch,
        f"checkpoint of epoch {epoch}",
    )


def checkpoint_at(path: str | os.PathLike[str], storage: Callable[[Path], Storage] = open_storage) -> Path:
    """The checkpoint that a path to load names, as a path that the readers of checkpoints take.

    `{rank}`, `{local_rank}` and `{node_rank}` are those of this process. An archive is extracted into the user's
    cache, and files of another program in an object store or on a web server are copied into it. A checkpoint of this
    program in a store keeps its URL, and where there is nothing the path itself is returned.

    Args:
        storage: gives the storage of a folder.

    Raises:
        CheckpointError: an archive is damaged.
        OSError: a store does not answer, or the disk is full.
    """
    named = as_path(_named(path))
    if is_url(named):
        # A web server may answer with the file itself, whatever follows the question mark.
        is_file = is_url(named, web=True) and "?" in str(named)
        if not is_file and storage(named.parent).peek(named.name, MANIFEST_FILE) is not None:
            return named
        named = storage(named.parent).fetch(named.name, [mark for kind in ForeignKind for mark in kind.marks]) or named
    if named.is_file() and IS_ARCHIVE.need(f"{named}, which is a file,")(named):
        return EXTRACT_ARCHIVE.need(str(named))(named)
    return named


def checkpoint_pattern(suffix: str | None = None) -> str:
    """The glob of the default names, for `train validate ckpt=…` and `validate_all`: those without a suffix, or those
    with this one. It has braces, which Python's own `glob` does not know."""
    # `*` would match suffixes, too, so each number of digits is an alternative.
    numbers = ",".join("[0-9]" * digits for digits in range(1, _MOST_DIGITS + 1))
    return f"step{{{numbers}}}" + (f"-{glob.escape(suffix)}" if suffix else "")


def split_existing(pattern: str) -> tuple[str, str]:
    """The longest leading part of a path, up to a slash, an `@` or its end, that exists as written; and the rest.

    A folder called `a[1]` is meant by `a[1]/step*` and `a[1]@latest`, though its name is a glob, too.
    """
    ends = [match.start() for match in re.finditer(r"[/@]|$", pattern)]
    end = next((end for end in reversed(ends) if os.path.lexists(pattern[:end])), 0)
    return pattern[:end], pattern[end:]


def paths_of(pattern: str) -> list[str]:
    """The paths that a glob with alternatives matches, sorted for each alternative. Leading folders that exist as
    written are no glob."""
    existing, globbed = split_existing(pattern)
    return [
        path
        for alternative in expand_braces(globbed)
        for path in sorted(glob.glob(glob.escape(existing) + alternative, recursive=True))
    ]


def expanded(pattern: str | Path) -> list[Path]:
    """The checkpoints that a glob matches, in the order of their steps; a path without `*`, `?`, `[` or `{` itself.

    `**` matches any folders, `{a,b}` either. Half-written and damaged ones are left out. Else as in `checkpoint_at`.

    Raises:
        NoCheckpointError: it matches none.
    """
    text = _named(pattern)
    if is_url(text) or not (any(sign in text for sign in "*?[{") and not os.path.exists(text)):
        return [checkpoint_at(text)]
    matched = set(map(Path, paths_of(text)))
    foreign = sorted((numbers_within(path.name), str(path)) for path in matched if ForeignKind.of(path) is not None)
    entries = [(path, Catalog.of(path.parent).entry(path.name)) for path in matched if ForeignKind.of(path) is None]
    native = sorted((entry.order, str(path)) for path, entry in entries if entry.problem is None)
    if not foreign and not native:
        raise NoCheckpointError(f"{text} matches no valid checkpoint (from {Path.cwd()})")
    return [checkpoint_at(path) for _, path in (*foreign, *native)]


def _named(path: str | os.PathLike[str]) -> str:
    """A path to load, with the ranks of this process filled in.

    Raises:
        UserError: it is not a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"expected the path of a checkpoint, got {type(path).__name__}")
    return filled(str(path))


def filled(path: str, counts: Mapping[str, object] | None = None) -> str:
    """A path with the ranks of this process and `counts` filled in.

    Args:
        counts: of a path to save, of which those are variables that `VARIABLES` has; None for a path to load, whose
            leading part that exists as written stays, and whose globs may match names with braces.

    Raises:
        UserError: it has another variable.
    """
    if "{" not in path:
        return path
    is_to_load, ranks = counts is None, find_default_ranks()
    counts = {name: value for name, value in (counts or {}).items() if name in VARIABLES}
    # A process of torch.distributed may have no variables of a launcher.
    environment = {**os.environ, **({"RANK": str(ranks.rank)} if ranks.world_size > 1 else {})}
    existing, template = split_existing(path) if is_to_load else ("", path)
    path = existing + fill_in(template, environment, counts)
    unknown = variables_in(split_existing(path)[1])
    if unknown and not (is_to_load and paths_of(path)):
        names = ", ".join(f"{{{name}}}" for name in (*RANK_VARIABLES, *counts))
        raise UserError(f"{path} has {{{unknown[0]}}}, and there is no such variable here", cure=f"There are {names}.")
    return path


def path_to_save(path: str | os.PathLike[str], counts: Mapping[str, object], *, ranks: int = 1) -> Path:
    """The path at which a checkpoint is to be saved, by several ranks together if there are.

    Raises:
        UserError: a variable is unknown, or would give each of the ranks another path.
    """
    named = str(as_path(path))
    if ranks > 1 and (differing := rank_variables_in(named)):
        raise UserError(
            f"{named} has {{{differing[0]}}}, and {ranks} ranks save one checkpoint together",
            cure="Leave it out; or, for a checkpoint of each rank, save with group=trainer_cli.ALONE.",
        )
    return as_path(filled(named, counts))


def _find_newest(named: str | Path, suffix: str | None, fits: Callable[[Entry], bool], description: str) -> Path:
    """The newest checkpoint of a folder that fits, of those with the suffix.

    Args:
        description: what such a checkpoint is called in the error.

    Raises:
        NoCheckpointError: there is none.
    """
    folder = as_path(filled(str(named)))
    suffix = filled(suffix) if suffix else None
    passed = []
    for entry in sorted(Catalog.of(folder).entries(), key=attrgetter("order"), reverse=True):
        if not _has_suffix(entry.name, suffix):
            passed.append(f"{entry.name}: another suffix")
            continue
        if entry.resumable and fits(entry):
            return folder / entry.name
        passed.append(f"{entry.name}: {entry.problem or 'another step or epoch, or not finite'}")
    contents = "; it holds " + ", ".join(passed[:5]) if passed else ", which holds none" if folder.is_dir() else ""
    ending = "" if suffix is None else f" with suffix {suffix!r}"
    missing = "" if folder.is_dir() or is_url(folder) else " (there is no such folder)"
    raise NoCheckpointError(f"no valid {description}{ending} in {folder.absolute()}{missing}{contents}")


def _has_suffix(name: str, suffix: str | None) -> bool:
    """Whether a name has this suffix; None: whether it has none. In names without `step` and a number in front, a
    suffix cannot be told from the pattern, so that these have none as well as each that they end with."""
    if match := _STEP_AND_SUFFIX.fullmatch(name):
        return match[1] == suffix
    return suffix is None or name.endswith(f"-{suffix}")
