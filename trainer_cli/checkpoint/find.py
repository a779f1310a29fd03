"""Find a checkpoint on the disk: the newest, or that of a step or an epoch."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_cli.checkpoint.archive_file import extract_archive, is_archive
from trainer_cli.checkpoint.catalog import Entry
from trainer_cli.checkpoint.foreign.kind import MARKS, kind_of
from trainer_cli.checkpoint.integrity import catalog_of
from trainer_cli.checkpoint.naming import MANIFEST_FILE, Naming, numbers_within, parse_step, with_ranks
from trainer_cli.checkpoint.storage.interfaces import Storage
from trainer_cli.checkpoint.storage.registry import fetch, open_storage
from trainer_cli.checkpoint.storage.url_path import as_path, is_url, is_web
from trainer_cli.config.globs import alternatives
from trainer_cli.errors import UserError


def latest_checkpoint(folder: str | Path, suffix: str | None = None) -> Path:
    """The numerically newest valid checkpoint of a folder; with a suffix that is not empty, of those whose names end in
    it.

    Of equal steps the one with the plainer name is taken. Half-written ones and copies (`step10.bak`) never match.
    `{rank}`, `{local_rank}` and `{node_rank}` in folder and suffix are those of this process. Sizes are checked,
    digests when it is loaded.

    Raises:
        FileNotFoundError: there is none; with the folder, and what it holds.
    """
    return _newest(folder, suffix, lambda entry: True, "checkpoint")


def checkpoint_path(
    folder: str | Path,
    step: int | None = None,
    epoch: int | None = None,
    suffix: str | None = None,
    must_exist: bool = True,
) -> Path:
    """The checkpoint of a step, or the newest one of an epoch (counted as at its saving).

    Args:
        must_exist: False: where there is none of this step, the path at which one is to be saved.

    Raises:
        ValueError: neither or both of `step` and `epoch` are given, or an epoch with `must_exist=False`.
        FileNotFoundError: there is none.
    """
    if (step is None) is (epoch is None):
        raise ValueError("give either step or epoch")
    if epoch is not None and not must_exist:
        raise ValueError("must_exist=False needs the step: checkpoints are named by it")
    if step is not None and not must_exist:
        try:
            return checkpoint_path(folder, step, suffix=suffix)
        except FileNotFoundError:
            return as_path(with_ranks(str(folder), os.environ)) / Naming(suffix=suffix or None).name({"step": step})
    if step is not None:
        return _newest(folder, suffix, lambda entry: entry.step == step, f"checkpoint of step {step}")
    return _newest(
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
        is_file = is_web(named) and "?" in str(named)
        if not is_file and storage(named.parent).peek(named.name, MANIFEST_FILE) is not None:
            return named
        named = fetch(str(named), MARKS) or named
    return extract_archive(named) if named.is_file() and is_archive(named) else named


def checkpoint_pattern(suffix: str | None = None) -> str:
    """The glob of the default names, for `train validate ckpt=…`: without a suffix, or with this one."""
    return f"step*-{suffix}" if suffix else "step*[0-9]"


def split_existing(pattern: str) -> tuple[str, str]:
    """The longest leading part of a path, up to a slash or its end, that exists as written; and the rest.

    A folder called `a[1]` is meant by `a[1]/step*`, though its name is a glob, too.
    """
    parts = pattern.split("/")
    for count in range(len(parts), 0, -1):
        leading = "/".join(parts[:count])
        if leading and os.path.lexists(leading):
            return leading, pattern[len(leading) :]
    return "", pattern


def paths_of(pattern: str) -> list[str]:
    """The paths that a glob with alternatives matches, sorted for each alternative. Leading folders that exist as
    written are no glob."""
    existing, rest = split_existing(pattern)
    return [
        path
        for alternative in alternatives(rest)
        for path in sorted(glob.glob(glob.escape(existing) + alternative, recursive=True))
    ]


def expanded(pattern: str | Path) -> list[Path]:
    """The checkpoints that a glob matches, in the order of their steps; a path without `*`, `?`, `[` or `{` itself.

    `**` matches any folders, `{a,b}` either. Half-written and damaged ones are left out. Else as of `checkpoint_at`.

    Raises:
        FileNotFoundError: it matches none.
    """
    text = _named(pattern)
    if is_url(text) or not (any(sign in text for sign in "*?[{") and not os.path.exists(text)):
        return [checkpoint_at(text)]
    matched = set(map(Path, paths_of(text)))
    foreign = sorted((numbers_within(path.name), str(path)) for path in matched if kind_of(path) is not None)
    entries = [(path, catalog_of(path.parent).entry(path.name)) for path in matched if kind_of(path) is None]
    own = sorted((_order(entry), str(path)) for path, entry in entries if entry.problem is None)
    if not foreign and not own:
        raise FileNotFoundError(f"{text} matches no valid checkpoint (from {Path.cwd()})")
    return [checkpoint_at(path) for _, path in (*foreign, *own)]


def _named(path: str | os.PathLike[str]) -> str:
    """A path to load, with the ranks of this process filled in.

    Raises:
        UserError: it is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"expected the path of a checkpoint, got {type(path).__name__}")
    return with_ranks(str(path), os.environ)


def _newest(named: str | Path, suffix: str | None, fits: Callable[[Entry], bool], what: str) -> Path:
    folder = as_path(with_ranks(str(named), os.environ))
    suffix = with_ranks(suffix, os.environ) if suffix else None
    passed = []
    for entry in sorted(catalog_of(folder).entries(), key=_order, reverse=True):
        if suffix is not None and not entry.name.endswith(f"-{suffix}"):
            passed.append(f"{entry.name}: another suffix")
            continue
        if entry.resumable and fits(entry):
            return folder / entry.name
        passed.append(f"{entry.name}: {entry.problem or 'another step or epoch, or not finite'}")
    there = "; it holds " + ", ".join(passed[:5]) if passed else ", which holds none" if folder.is_dir() else ""
    ending = "" if suffix is None else f" with suffix {suffix!r}"
    missing = "" if folder.is_dir() or is_url(folder) else " (there is no such folder)"
    raise FileNotFoundError(f"no valid {what}{ending} in {folder.absolute()}{missing}{there}")


def _order(entry: Entry) -> tuple[Any, ...]:
    """Newer ones sort later: by step, then epoch. A plain `step10` sorts after `step10-ema`; where no step is known,
    numbers in names decide."""
    epoch = -1 if entry.manifest is None else entry.manifest.epoch
    plain = parse_step(entry.name) is not None
    return entry.step, epoch, plain, numbers_within(entry.name), -len(entry.name), entry.name
