"""`train ckpt`: list checkpoints, look into them, verify, compare, pin, remove, prune and export them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_cli.commands import ckpt_export
from trainer_cli.commands.main import Parser
from trainer_cli.errors import CheckpointError, ExitCode, TrainError, UserError, disk_cure
from trainer_cli.terminal import format_age, format_bytes, print_json, table

if TYPE_CHECKING:
    from trainer_cli.commands.ckpt_inspect import Content
    from trainer_cli.commands.ckpt_remove import Item

EXAMPLES = """WHAT is a checkpoint, a glob, a run directory, or RUN@latest, RUN@best, RUN@step500; CKPT is one
checkpoint. Each action also answers as JSON with --json. `train ckpt ACTION --help` shows its flags.

Exit codes: 0 done, 1 something is not valid or was left alone, 2 a mistake in the command, 3 there is no such
checkpoint, 4 the run is training now (prune).

examples:
  train ckpt ls runs/digits
  train ckpt show runs/digits@latest --norms
  train ckpt verify 'runs/*/checkpoints/step*'
  train ckpt diff runs/digits@step180 runs/digits@latest
  train ckpt rm 'runs/digits/checkpoints/step{180,360}' --yes
  train ckpt prune runs/digits --dry-run
  train ckpt export runs/digits@best --format safetensors --dtype bfloat16
  train ckpt average 'runs/digits/checkpoints/step*' --output runs/mean
"""
_RUNS = ("runs/*", "runs/*/sweep/*")
_METRIC_COLUMNS = 4
_LISTED = 40
_LOOKS = 10
"""Times that `verify` lists checkpoints anew where all were removed before they were read."""


class _Action(NamedTuple):
    """What runs it, how many checkpoints it takes (as argparse's `nargs`), their metavar, its flags and its help."""

    run: Callable[[argparse.Namespace], int]
    nargs: int | str
    metavar: str
    flags: tuple[str, ...]
    summary: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A parser for each action, with its own flags."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", parser_class=Parser)
    for name, action in ACTIONS.items():
        summary = action.summary
        one = actions.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
        )
        about = "a checkpoint" if action.metavar == "CKPT" else "a checkpoint, a glob or a run directory"
        one.add_argument("what", nargs=action.nargs, metavar=action.metavar, help=f"{about}; RUN@latest, RUN@best")
        for flag in (*action.flags, "--json"):
            if flag in ckpt_export.FLAGS:
                names, settings = ckpt_export.FLAGS[flag]
                one.add_argument(*names, **settings)
            else:
                names, text = _FLAGS[flag]
                one.add_argument(*names, action="store_true", help=text)
        one.set_defaults(action=name)


def run(args: argparse.Namespace) -> int:
    """Do one action."""
    try:
        return ACTIONS[args.action].run(args)
    except BrokenPipeError:
        raise
    except OSError as error:
        elsewhere = "Write it elsewhere: --output PATH." if hasattr(args, "output") else disk_cure(error)
        raise TrainError(
            f"train ckpt {args.action}: {error.strerror or error}", where=error.filename, cure=elsewhere
        ) from error


def _ls(args: argparse.Namespace) -> int:
    from trainer_cli.commands.ckpt_remove import look

    what = args.what or [pattern for pattern in _RUNS if any(Path().glob(pattern))]
    if not what:
        raise CheckpointError("there is no folder runs/ here", cure="Say where: train ckpt ls RUN_DIRECTORY.")
    items = look(what)
    if args.json:
        print_json([item.record() for item in items])
        return ExitCode.DONE
    folders: dict[Path, list[Item]] = {}
    for item in items:
        folders.setdefault(item.path.parent, []).append(item)
    now = time.time()
    print("\n\n".join(f"{folder}\n{_listing(own, now)}" for folder, own in folders.items()))
    return ExitCode.DONE


def _listing(items: Sequence[Item], now: float) -> str:
    measured = dict.fromkeys(key for item in items if (found := item.entry.manifest) for key in found.metrics)
    metrics = [key for key in measured if not key.startswith("train/")][:_METRIC_COLUMNS]
    plain = all(item.path.name == f"step{item.entry.step}" for item in items)
    rows = []
    for item in items:
        manifest, saved_at = item.entry.manifest, item.saved_at
        values = {} if manifest is None else manifest.metrics
        marks = {"pinned": item.entry.pinned, "best": item.best, "final": item.finished}
        rows.append(
            [
                item.path.name,
                "" if plain else str(item.entry.step),
                "" if manifest is None else manifest.kind.value,
                "" if manifest is None else format_bytes(item.entry.size_bytes),
                "" if saved_at is None else format_age(now - saved_at),
                *(f"{values[key]:.4g}" if key in values else "" for key in metrics),
                item.state,
                " ".join(mark for mark, given in marks.items() if given),
                item.entry.problem or ("" if manifest is None else manifest.reason),
            ]
        )
    header = ["name", "step", "kind", "size", "age", *metrics, "state", "marks", "reason"]
    return table(header, rows, right=["step", "size", "age", *metrics], indent="  ")


def _show(args: argparse.Namespace) -> int:
    from trainer_cli.commands.ckpt_inspect import TENSOR_COLUMNS, opened, tensor_rows

    with opened(_one(args.what[0])) as content:
        tensors = content.tensors
        if args.norms:
            # The norm of a random generator's state says nothing.
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("rng/")}
        norms = {name: tensor.norm() for name, tensor in tensors.items()} if args.norms else {}
        states = content.states() if args.states else {}
        views = {view.name: view.base for view in content.views().values()}
    if args.json:
        listed = [
            {
                "name": name,
                "type": tensor.entry.code,
                "shape": list(tensor.entry.shape),
                "size_bytes": tensor.entry.size_bytes,
                **({"norm": norms[name]} if norms else {}),
            }
            for name, tensor in tensors.items()
        ]
        more = {"states": states} if args.states else {}
        print_json({**_facts(content), "tensors": listed, "aliases": content.aliases, "views": views, **more})
        return ExitCode.DONE
    print("\n".join(f"{key:<9} {value}" for key, value in _fact_lines(content)))
    print("\n" + table(TENSOR_COLUMNS, tensor_rows(tensors, norms), right=["elements", "size", "norm"]))
    notes = [f"{name} is tied to {target}" for name, target in content.aliases.items()]
    notes += [f"{name} is a view of {base}" for name, base in views.items()]
    if notes:
        print("\n" + "\n".join(notes))
    if args.states:
        print("\nstates")
        print_json(states)
    return ExitCode.DONE


def _facts(content: Content) -> dict[str, Any]:
    manifest = content.manifest
    return {
        "path": str(content.path),
        "step": manifest.step,
        "epoch": manifest.epoch,
        "kind": manifest.kind.value,
        "reason": manifest.reason,
        "finished": manifest.finished,
        "finite": manifest.finite,
        "left_out": list(manifest.left_out),
        "pinned": content.entry.pinned,
        "size_bytes": content.entry.size_bytes,
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "metrics": dict(manifest.metrics),
        "progress": dict(manifest.progress),
        "run_id": manifest.run_id,
        "attempt": manifest.attempt,
        "world_size": manifest.world_size,
        "format": manifest.format,
        "versions": dict(manifest.versions),
        "packages": list(manifest.target_packages),
        "config_digest": manifest.config_digest,
    }


def _fact_lines(content: Content) -> list[tuple[str, str]]:
    manifest = content.manifest
    processes = f"{manifest.world_size} process{'' if manifest.world_size == 1 else 'es'}"
    facts = [
        ("path", str(content.path)),
        ("step", f"{manifest.step} (epoch {manifest.epoch})"),
        ("kind", f"{manifest.kind} ({manifest.reason})" + (", pinned" if content.entry.pinned else "")),
        ("finished", manifest.finished or ""),
        ("weights", "" if manifest.finite else "NOT FINITE: a resume passes it over"),
        ("left out", ", ".join(manifest.left_out)),
        ("size", f"{format_bytes(content.entry.size_bytes)} in {len(manifest.files)} files"),
        ("run", f"{manifest.run_id} (attempt {manifest.attempt}, {processes})"),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))),
        ("packages", ", ".join(manifest.target_packages)),
        ("config", manifest.config_digest or ""),
        *(("metric", f"{name} {value:.6g}") for name, value in manifest.metrics.items()),
    ]
    return [(key, value) for key, value in facts if value]


def _verify(args: argparse.Namespace) -> int:
    from trainer_cli.commands.ckpt_remove import look, verify_all

    shows = sys.stderr.isatty() and not args.json

    def show(done: int, item: Item) -> None:
        if shows:
            print(f"\r{done}/{len(items)} {item.path.name}\x1b[K", end="", file=sys.stderr, flush=True)

    for _ in range(_LOOKS):
        items = look(args.what)
        found = verify_all(items, show)
        if shows:
            print("\r\x1b[K", end="", file=sys.stderr)
        removed = [item for item in items if item.path not in found]
        for item in removed:
            print(f"passed over: {item.path}, which was removed meanwhile", file=sys.stderr)
        if found or any(item.named for item in removed):
            break
    else:
        raise CheckpointError("each checkpoint was removed before it was read", cure="Give the command again.")
    if args.json:
        print_json(
            [{"path": str(path), "valid": problem is None, "problem": problem} for path, problem in found.items()]
        )
    else:
        rows = [
            [
                str(item.path),
                "" if item.entry.manifest is None else format_bytes(item.entry.size_bytes),
                found[item.path] or "valid",
            ]
            for item in items
            if item.path in found
        ]
        print(table(["checkpoint", "size", "found"], rows, right=["size"]))
        print(f"{sum(problem is None for problem in found.values())} of {len(found)} valid")
    if any(found.values()):
        return ExitCode.FAILED
    if gone := [str(item.path) for item in removed if item.named]:
        raise CheckpointError(f"{', '.join(gone)}: removed meanwhile", cure="Name one that is there.")
    return ExitCode.DONE


def _diff(args: argparse.Namespace) -> int:
    from trainer_cli.commands.ckpt_inspect import compare, opened

    paths = [_one(what) for what in args.what]
    with ExitStack() as stack:
        first, second = (stack.enter_context(opened(path)) for path in paths)
        found = compare(first, second)
    if args.json:
        config = [{"key": change.key, "old": change.old, "new": change.new} for change in found.config]
        print_json({**asdict(found), "config": config})
        return ExitCode.DONE
    print(f"{first.path} (step {first.manifest.step}) -> {second.path} (step {second.manifest.step})")
    _listed("config", [found.no_config] if found.no_config else [str(change) for change in found.config])
    _listed(f"only in {first.path}", found.only_first)
    _listed(f"only in {second.path}", found.only_second)
    rows = [[one.name, one.why or f"{one.relative:.3g}"] for one in found.tensors]
    if rows:
        _listed("tensors that differ", table(["tensor", "relative change"], rows).splitlines())
    print(f"{found.same} of {len(found.tensors) + found.same} common tensors are the same, bit for bit")
    return ExitCode.DONE


def _pin(args: argparse.Namespace) -> int:
    from trainer_cli.commands.ckpt_remove import look, pin

    changed = pin(look(args.what), pinned=args.action == "pin")
    return _report(args, f"{args.action}ned", changed)


def _rm(args: argparse.Namespace) -> int:
    from trainer_cli.commands.ckpt_remove import look, remove, why_not_remove

    items = look(args.what)
    if not args.force and (reasons := why_not_remove(items)):
        listed = "\n".join(f"  {path}: {why}" for path, why in reasons.items())
        raise UserError(f"nothing is removed, because of\n{listed}\n", cure="To remove them all the same, add --force.")
    paths = [item.path for item in items]
    if args.dry_run:
        return _report(args, "would_be_removed", paths)
    if not _confirmed(args, paths):
        return _report(args, "removed", [], dict.fromkeys(paths, "you said no"))
    return _report(args, "removed", *remove(items))


def _prune(args: argparse.Namespace) -> int:
    from trainer_cli.commands.ckpt_prune import apply_pruning, prunings
    from trainer_cli.commands.ckpt_remove import look

    items = look(args.what)
    plans = list(prunings(items))
    go = {path: why for plan in plans for path, why in plan.go.items()}
    if not args.json:
        keep = {path: why for plan in plans for path, why in plan.keep.items()}
        rows = [[str(path), "stays", why] for path, why in keep.items()]
        rows += [[str(path), "goes", why] for path, why in go.items()]
        others = [item.path for item in items if item.path not in keep and item.path not in go]
        rows += [[str(path), "left", "not counted: damaged, partial, or another run's"] for path in others]
        print(table(["checkpoint", "rules", "why"], rows))
    if args.dry_run or not go:
        return _report(args, "would_be_removed" if args.dry_run else "removed", list(go))
    if not _confirmed(args, list(go)):
        return _report(args, "removed", [], dict.fromkeys(go, "you said no"))
    gone: list[Path] = []
    left: dict[Path, str] = {}
    for plan in plans:
        removed, refused = apply_pruning(plan, items)
        gone += removed
        left |= refused
    return _report(args, "removed", gone, left)


_FLAGS = {
    "--norms": (("--norms",), "show the Euclidean norm of each tensor too; random states are left out"),
    "--states": (("--states",), "show the small states too"),
    "--yes": (("-y", "--yes"), "do not ask"),
    "--force": (("--force",), "remove pinned ones too, and the last valid one of a run"),
    "--dry-run": (("-n", "--dry-run"), "only show what would be removed"),
    "--json": (("--json",), "print the answer as JSON"),
}
ACTIONS: Mapping[str, _Action] = {
    "ls": _Action(_ls, "*", "WHAT", (), "show a table of checkpoints, by default of all runs in ./runs"),
    "show": _Action(_show, 1, "CKPT", ("--norms", "--states"), "show where a checkpoint comes from, and its tensors"),
    "verify": _Action(_verify, "+", "WHAT", (), "read every byte and compare the digests"),
    "diff": _Action(_diff, 2, "CKPT", (), "compare configs, names, shapes and values of two checkpoints"),
    "pin": _Action(_pin, "+", "WHAT", (), "keep checkpoints, whatever the rules of retention say"),
    "unpin": _Action(_pin, "+", "WHAT", (), "remove the pins of checkpoints"),
    "rm": _Action(_rm, "+", "WHAT", ("--yes", "--force", "--dry-run"), "remove checkpoints, after a question"),
    "export": _Action(
        ckpt_export.export,
        1,
        "CKPT",
        (
            "--format", "--output", "--dtype", "--shard-size", "--ema", "--merge-lora", "--key-mapping", "--hf-config",
            "--overwrite",
        ),
        "write the weights of a checkpoint for other programs",
    ),
    "average": _Action(
        ckpt_export.average,
        "+",
        "WHAT",
        ("--to", "--ema", "--weights"),
        "save the mean of the weights of several checkpoints",
    ),
    "strip": _Action(ckpt_export.strip, 1, "CKPT", ("--to", "--ema"), "save the weights of a checkpoint alone"),
    "prune": _Action(_prune, "+", "WHAT", ("--yes", "--dry-run"), "remove what the rules of the run would remove"),
}  # fmt: skip


def _one(what: str) -> Path:
    from trainer_cli.runs.select import all_of

    found = all_of([what])
    if len(found) > 1:
        path, named = list(found.items())[-1]
        such = path if named.run is None else f"{named.run}@latest, {named.run}@best or {path}"
        raise UserError(f"{what} names {len(found)} checkpoints, but one is wanted", cure=f"Name one, such as {such}.")
    return next(iter(found))


def _confirmed(args: argparse.Namespace, paths: Sequence[Path]) -> bool:
    """Whether to remove them. The question goes to stderr, so that stdout holds the answer alone."""
    if args.yes:
        return True
    count = f"{len(paths)} checkpoint{'' if len(paths) == 1 else 's'}"
    if not sys.stdin.isatty():
        raise UserError(
            f"{count} would be removed, but this is not a terminal, so it cannot be confirmed", cure="Add --yes."
        )
    lines = "".join(f"  {path}\n" for path in paths)
    print(f"{lines}remove {count}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _report(args: argparse.Namespace, what: str, done: Sequence[Path], left: Mapping[Path, str] | None = None) -> int:
    """Say what was done, and what was left alone and why; the exit code."""
    left = left or {}
    if args.json:
        print_json({what: [str(path) for path in done], "left": {str(path): why for path, why in left.items()}})
    else:
        lines = [f"{what.replace('_', ' ')}: {path}" for path in done]
        lines += [f"left: {path}: {why}" for path, why in left.items()]
        print("\n".join(lines) or "nothing to do")
    return ExitCode.FAILED if left else ExitCode.DONE


def _listed(title: str, lines: Sequence[str]) -> None:
    if lines:
        more = [f"… and {len(lines) - _LISTED} more (all with --json)"] if len(lines) > _LISTED else []
        print("\n".join([f"{title}:", *(f"  {line}" for line in [*lines[:_LISTED], *more])]))
