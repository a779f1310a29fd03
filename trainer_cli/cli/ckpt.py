"""`train ckpt`: list checkpoints, look into them, verify and compare them, pin, remove and prune."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import CheckpointError, ExitCode, UserError

if TYPE_CHECKING:
    from trainer_cli.run.inspect import Content
    from trainer_cli.run.shelf import Item

EXAMPLES = """actions:
  ls [WHAT ...]       a table of checkpoints (by default of all runs in ./runs)
  show CKPT           its tensors and where it comes from (--norms, --states)
  verify WHAT ...     read every byte and compare the digests
  diff CKPT CKPT      configs, names, shapes, and the largest relative changes
  pin, unpin WHAT ... keep it whatever the rules say, or no longer
  rm WHAT ...         remove (asks first, unless --yes)
  prune WHAT ...      remove what the run's own rules would (--dry-run shows it)

WHAT is a checkpoint, a glob in quotes, a run directory, or RUN@latest, RUN@best, RUN@step500.

examples:
  train ckpt ls runs/digits
  train ckpt show runs/digits@latest --norms
  train ckpt verify 'runs/*/checkpoints/step*'
  train ckpt diff runs/digits@step180 runs/digits@latest
  train ckpt rm 'runs/digits/checkpoints/step{180,360}' --yes
  train ckpt prune runs/digits --dry-run
"""
_RUNS = "runs/*"


@dataclass(frozen=True, slots=True)
class _Action:
    run: Callable[[argparse.Namespace], int]
    least: int
    most: int | None
    flags: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, what it is done to, and flags."""
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("what", nargs="*", metavar="WHAT", help="checkpoints, globs, run directories")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--norms", action="store_true", help="show: the norm of each tensor")
    parser.add_argument("--states", action="store_true", help="show: the small states too")
    parser.add_argument("-y", "--yes", action="store_true", help="rm, prune: do not ask")
    parser.add_argument("--force", action="store_true", help="rm: also pinned ones, and a run's last valid one")
    parser.add_argument("-n", "--dry-run", action="store_true", help="rm, prune: only show what would go")
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(args: argparse.Namespace) -> int:
    """Do one action."""
    action = ACTIONS[args.action]
    for flag in ("norms", "states", "yes", "force", "dry_run"):
        if getattr(args, flag) and flag not in action.flags:
            raise UserError(
                f"--{flag.replace('_', '-')} means nothing for {args.action}", cure="See train ckpt --help."
            )
    if len(args.what) < action.least or (action.most is not None and len(args.what) > action.most):
        wanted = "two checkpoints" if action.least == 2 else "one checkpoint" if action.most == 1 else "a checkpoint"
        raise UserError(f"train ckpt {args.action} needs {wanted}", cure="See train ckpt --help.")
    return action.run(args)


def _ls(args: argparse.Namespace) -> int:
    from trainer_cli.run.shelf import look

    if not args.what and not any(Path().glob(_RUNS)):
        raise CheckpointError("there is no folder runs/ here", cure="Say where: train ckpt ls RUN_DIRECTORY.")
    items = look(args.what or [_RUNS])
    if args.json:
        _print_json([item.record() for item in items])
        return ExitCode.DONE
    now = time.time()
    for number, folder in enumerate(dict.fromkeys(item.path.parent for item in items)):
        print(f"{'' if number == 0 else chr(10)}{folder}")
        print(_table([_row(item, now) for item in items if item.path.parent == folder]))
    return ExitCode.DONE


def _row(item: Item, now: float) -> list[str]:
    manifest = item.entry.manifest
    marks = " ".join(
        word for word, given in (("pinned", item.entry.pinned), ("best", item.best), ("final", _ended(item))) if given
    )
    state = item.state if manifest is None or manifest.finite else "not finite"
    metrics = {} if manifest is None else manifest.metrics
    values = "  ".join(f"{key} {value:.4g}" for key, value in metrics.items() if not key.startswith("train/"))
    return [
        item.path.name,
        manifest.kind.value if manifest else "",
        _size(item.entry.size_bytes) if manifest else "",
        "" if item.saved_at is None else _age(now - item.saved_at),
        "" if state == "valid" else state,
        marks,
        values,
        f"({manifest.reason})" if manifest else "",
    ]


def _ended(item: Item) -> bool:
    return item.entry.manifest is not None and item.entry.manifest.finished is not None


def _show(args: argparse.Namespace) -> int:
    from trainer_cli.config.difference import shown
    from trainer_cli.run.inspect import open_checkpoint, totals

    content = open_checkpoint(_one(args.what[0]))
    norms = {name: tensor.norm() for name, tensor in content.tensors.items()} if args.norms else {}
    if args.json:
        _print_json(_facts(content) | {"tensors": _tensor_records(content, norms)})
        return ExitCode.DONE
    for key, value in _facts(content).items():
        print(f"{key:<16} {value if isinstance(value, str) else shown(value)}")
    print()
    rows = []
    for name, tensor in content.tensors.items():
        entry = tensor.entry
        norm = [f"{norms[name]:.6g}"] if name in norms else []
        rows.append([f"  {name}", entry.code, str(list(entry.shape)), _size(entry.size_bytes), *norm])
    rows += [[f"  {name}", "=", target, ""] + ([""] if norms else []) for name, target in content.aliases.items()]
    print(_table(rows))
    print()
    print(
        _table(
            [[f"  {top}", f"{count:,} elements", _size(size)] for top, (count, size) in totals(content.tensors).items()]
        )
    )
    if args.states:
        print()
        _print_json(content.states())
    return ExitCode.DONE


def _facts(content: Content) -> dict[str, Any]:
    manifest = content.manifest
    facts = {
        "path": str(content.path),
        "step": manifest.step,
        "epoch": manifest.epoch,
        "kind": manifest.kind.value,
        "reason": manifest.reason,
        "finished": manifest.finished,
        "finite": manifest.finite,
        "pinned": content.entry.pinned,
        "size": _size(content.entry.size_bytes),
        "metrics": {name: value if math.isfinite(value) else str(value) for name, value in manifest.metrics.items()},
        "run_id": manifest.run_id,
        "attempt": manifest.attempt,
        "world_size": manifest.world_size,
        "format": manifest.format,
        "versions": dict(manifest.versions),
        "packages": list(manifest.target_packages),
        "config_digest": manifest.config_digest,
    }
    return {key: value for key, value in facts.items() if value not in (None, {}, [])}


def _tensor_records(content: Content, norms: Mapping[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "type": tensor.entry.code,
            "shape": list(tensor.entry.shape),
            "size_bytes": tensor.entry.size_bytes,
            **({"norm": norms[name] if math.isfinite(norms[name]) else str(norms[name])} if name in norms else {}),
        }
        for name, tensor in content.tensors.items()
    ]


def _verify(args: argparse.Namespace) -> int:
    from trainer_cli.run.shelf import look, verify_all

    items = look(args.what)
    shows = sys.stderr.isatty() and not args.json
    done = 0

    def told(item: Item, problem: str | None) -> None:
        nonlocal done
        done += 1
        if shows:
            print(f"\r{done}/{len(items)} {item.path.name}\x1b[K", end="", file=sys.stderr, flush=True)

    faults = verify_all(items, told)
    if shows:
        print("\r\x1b[K", end="", file=sys.stderr)
    if args.json:
        _print_json(
            [
                {"path": str(item.path), "sound": item.path not in faults, "problem": faults.get(item.path)}
                for item in items
            ]
        )
    else:
        rows = [[str(item.path), _size(item.entry.size_bytes), faults.get(item.path, "sound")] for item in items]
        print(_table(rows))
        print(f"{len(items) - len(faults)} of {len(items)} are sound")
    return ExitCode.FAILED if faults else ExitCode.DONE


def _diff(args: argparse.Namespace) -> int:
    from trainer_cli.run.inspect import compare, open_checkpoint

    first, second = (open_checkpoint(_one(what)) for what in args.what)
    found = compare(first, second)
    if args.json:
        _print_json(
            {
                "config": [{"key": c.key, "old": _json(c.old), "new": _json(c.new)} for c in found.config],
                "only_first": found.only_first,
                "only_second": found.only_second,
                "tensors": [{key: _json(value) for key, value in asdict(change).items()} for change in found.tensors],
                "same": found.same,
            }
        )
        return ExitCode.DONE
    print(f"{first.path} (step {first.manifest.step}) -> {second.path} (step {second.manifest.step})")
    _listed("config", found.config)
    _listed(f"only in {first.path}", found.only_first)
    _listed(f"only in {second.path}", found.only_second)
    _listed("tensors that differ, by relative change", found.tensors)
    print(f"{found.same} tensors are the same, bit for bit")
    return ExitCode.DONE


def _pin(args: argparse.Namespace) -> int:
    from trainer_cli.run.shelf import look, pin

    changed = pin(look(args.what), pinned=args.action == "pin")
    return _told(args, changed, f"{args.action}ned")


def _rm(args: argparse.Namespace) -> int:
    from trainer_cli.run.shelf import look, remove, why_not_remove

    items = look(args.what)
    if not args.force and (reasons := why_not_remove(items)):
        listed = "\n".join(f"  {path}: {why}" for path, why in reasons.items())
        raise UserError(f"these are not removed:\n{listed}\n", cure="To remove them all the same, add --force.")
    paths = [item.path for item in items]
    if args.dry_run or not _confirmed(args, paths):
        return _told(args, paths, "would be removed" if args.dry_run else "left alone", done=args.dry_run)
    for item in items:
        remove(item)
    return _told(args, paths, "removed")


def _prune(args: argparse.Namespace) -> int:
    from trainer_cli.run.shelf import carry_out, look, prunings

    items = look(args.what)
    plans = list(prunings(items))
    go = {path: why for plan in plans for path, why in plan.go.items()}
    keep = {path: why for plan in plans for path, why in plan.keep.items()}
    if not args.json:
        rows = [[str(path), "stays", why] for path, why in keep.items()] + [
            [str(p), "goes", why] for p, why in go.items()
        ]
        print(_table(rows))
    if not go or args.dry_run or not _confirmed(args, list(go)):
        return _told(args, list(go), "would be removed", done=args.dry_run or not go)
    for plan in plans:
        carry_out(plan, items)
    return _told(args, list(go), "removed")


ACTIONS: Mapping[str, _Action] = {
    "ls": _Action(_ls, 0, None),
    "show": _Action(_show, 1, 1, ("norms", "states")),
    "verify": _Action(_verify, 1, None),
    "diff": _Action(_diff, 2, 2),
    "pin": _Action(_pin, 1, None),
    "unpin": _Action(_pin, 1, None),
    "rm": _Action(_rm, 1, None, ("yes", "force", "dry_run")),
    "prune": _Action(_prune, 1, None, ("yes", "dry_run")),
}


def _one(what: str) -> Path:
    from trainer_cli.run.select import all_of

    found = all_of(what)
    if len(found) > 1:
        raise UserError(
            f"{what} names {len(found)} checkpoints, but one is wanted", cure=f"Name one, such as {found[-1]}."
        )
    return found[0]


def _confirmed(args: argparse.Namespace, paths: Sequence[Path]) -> bool:
    if args.yes:
        return True
    if not sys.stdin.isatty():
        raise UserError(f"{len(paths)} checkpoints would be removed, and nobody can be asked", cure="Add --yes.")
    for path in paths:
        print(f"  {path}")
    return input(f"remove {len(paths)}? [y/N] ").strip().lower() in ("y", "yes")


def _told(args: argparse.Namespace, paths: Sequence[Path], what: str, *, done: bool = True) -> int:
    if args.json:
        _print_json({what.replace(" ", "_"): [str(path) for path in paths]})
    else:
        print("\n".join(f"{what}: {path}" for path in paths) or "nothing to do")
    return ExitCode.DONE if done else ExitCode.FAILED


def _listed(title: str, rows: Iterable[object]) -> None:
    lines = [f"  {row}" for row in rows]
    if lines:
        more = [f"  … and {len(lines) - 40} more"] if len(lines) > 40 else []
        print("\n".join([f"{title}:", *lines[:40], *more]))


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns as wide as they need; empty columns vanish."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    used = [column for column, width in enumerate(widths) if width]
    return "\n".join("  ".join(f"{row[column]:<{widths[column]}}" for column in used).rstrip() for row in rows)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _age(seconds: float) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _json(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))
