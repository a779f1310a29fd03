"""`train ckpt`: list checkpoints, look into them, verify, compare, pin, remove, prune and export them.

Each action imports what it needs inside its function: `ls` and `pin` answer without numpy and Hydra.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_cli.addon import insert_each
from trainer_cli.catalog import Catalog
from trainer_cli.commands.command_line import Parser
from trainer_cli.errors import CheckpointError, ExitCode, TrainError, UserError, disk_cure
from trainer_cli.parts import CKPT_ACTIONS
from trainer_cli.running import showing_import
from trainer_cli.terminal import (
    beside,
    format_age,
    format_bytes,
    format_count,
    is_terminal,
    line_width,
    print_json,
    table,
)

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
"""
_DEFAULT_PATTERNS = ("runs/*", "runs/*/sweep/*")
_MAX_LINES = 40
"""Lines that `diff` prints of each list."""
_VERIFY_TRIES = 10
"""Times that `verify` lists the checkpoints again after all were removed before they were read."""


class Action(NamedTuple):
    """An action: its function, arguments, flags and help."""

    run: Callable[[argparse.Namespace], int]
    nargs: int | str
    """How many checkpoints it takes, as in argparse."""
    metavar: str
    flags: tuple[str, ...]
    """The names of its flags, in `own_flags` or in a table of those that several actions have; all have --json."""
    summary: str
    own_flags: Mapping[str, tuple[tuple[str, ...], dict[str, Any]]] = {}
    """Name -> option strings, and arguments of `add_argument`."""
    after: str | None = None
    """The action after which one of an add-on is listed."""
    example: str = ""
    """The example of one of an add-on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a parser for each action."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", parser_class=Parser)
    for name, action in _find_actions().items():
        if action.example:
            parser.epilog = f"{parser.epilog}  {action.example}\n"
        summary = action.summary
        description = f"{summary[0].upper()}{summary[1:]}."
        examples = re.findall(rf"^  train ckpt {name} .*$", parser.epilog or "", re.M)
        subparser = actions.add_parser(
            name,
            help=summary,
            description=description,
            epilog="\n".join(["examples:", *examples]) if examples else None,
            formatter_class=parser.formatter_class,
            allow_abbrev=False,
        )
        about = "a checkpoint" if action.metavar == "CKPT" else "a checkpoint, a glob or a run directory"
        subparser.add_argument(
            "names", nargs=action.nargs, metavar=action.metavar, help=f"{about}; RUN@latest, RUN@best"
        )
        for flag in (*action.flags, "--json"):
            if flag in action.own_flags:
                names, settings = action.own_flags[flag]
                subparser.add_argument(*names, **settings)
            else:
                names, text = _FLAGS[flag]
                subparser.add_argument(*names, action="store_true", help=text)
        subparser.set_defaults(action=name)


def _find_actions() -> dict[str, Action]:
    """All actions, in the order in which they are listed."""
    return insert_each(_ACTIONS, CKPT_ACTIONS.each())


def run(args: argparse.Namespace) -> int:
    """Run the action that the command names."""
    action = _find_actions()[args.action]
    try:
        if "--no-replay" in action.flags:
            from trainer_cli.selection import provide_steps

            provide_steps(args.names, replays=not args.no_replay)
        return action.run(args)
    except BrokenPipeError:
        raise
    except OSError as error:
        elsewhere = "Write it elsewhere: --output PATH." if hasattr(args, "output") else disk_cure(error)
        raise TrainError(
            f"train ckpt {args.action}: {error.strerror or error}", where=error.filename, cure=elsewhere
        ) from error


def _list_checkpoints(args: argparse.Namespace) -> int:
    """`train ckpt ls`: print the checkpoints, a table for each folder, and how much replayed ones take."""
    from trainer_cli.commands.ckpt_remove import find_items
    from trainer_cli.runs import RunDir

    patterns = args.names or [pattern for pattern in _DEFAULT_PATTERNS if any(Path().glob(pattern))]
    if not patterns:
        raise CheckpointError("there is no folder runs/ here", cure="Say where: train ckpt ls RUN_DIRECTORY.")
    items = find_items(patterns)
    if args.json:
        print_json([item.record() for item in items])
        return ExitCode.DONE
    folders: dict[Path, list[Item]] = {}
    for item in items:
        folders.setdefault(item.path.parent, []).append(item)
    now = time.time()
    texts = [f"{folder}\n{_format_folder(in_folder, now)}" for folder, in_folder in folders.items()]
    for run in dict.fromkeys(item.run for item in items if item.run is not None):
        replayed, searches = RunDir(run).replayed_folder, RunDir(run).searches_folder
        removable = [*(replayed / name for name in Catalog.of(replayed).names()), searches]
        if replayed not in folders and (size := sum(map(_size_of, removable))):
            command = f"train ckpt prune {shlex.quote(str(run))}"
            texts.append(f"{replayed}  {format_bytes(size)} of replayed steps, which `{command}` removes")
    print("\n\n".join(texts))
    return ExitCode.DONE


def _size_of(folder: Path) -> int:
    """The bytes of all files below a folder; 0 without it."""
    size_bytes = 0
    for path in folder.rglob("*"):
        # Another command may remove it meanwhile.
        with suppress(FileNotFoundError):
            size_bytes += path.lstat().st_size if path.is_file() else 0
    return size_bytes


def _format_folder(items: Sequence[Item], now: float) -> str:
    """The table of the checkpoints of one folder."""
    # Imported here: the other actions do without.
    from trainer_cli.runs import BestSettings, RunDir

    manifests = [item.entry.manifest for item in items]
    measured = dict.fromkeys(key for manifest in manifests if manifest is not None for key in manifest.metrics)
    run = next((item.run for item in items if item.run is not None), None)
    rule = BestSettings.of({} if run is None else RunDir(run).values).rule(measured)
    # Metrics of the training choose no checkpoint, so they are left out; the one that decides which is best is first.
    shown = [key for key in measured if not key.startswith("train/")]
    metrics = sorted(shown, key=lambda key: rule is None or key != rule.metric)
    # The last of a run counts: one that was given a longer max_duration has been finished before.
    final = {item.run: item.path for item in items if item.finished}
    # A name such as step500 says the step already.
    names_say_step = all(item.path.name == f"step{item.entry.step}" for item in items)
    rows = []
    for item in items:
        manifest, saved_at = item.entry.manifest, item.saved_at
        values = {} if manifest is None else manifest.metrics
        marks = {"pinned": item.entry.pinned, "best": item.best, "final": final.get(item.run) == item.path}
        rows.append(
            [
                item.path.name,
                "" if names_say_step else str(item.entry.step),
                "" if manifest is None else manifest.kind.value,
                "" if manifest is None else format_bytes(item.entry.size_bytes),
                "" if saved_at is None else format_age(now - saved_at),
                *(f"{values[key]:.4g}" if key in values else "" for key in metrics),
                item.state,
                " ".join(mark for mark, is_set in marks.items() if is_set),
                item.entry.problem or ("" if manifest is None else manifest.reason),
            ]
        )
    header = ["name", "step", "kind", "size", "age", *metrics, "state", "marks", "reason"]
    return table(
        header,
        rows,
        right=["step", "size", "age", *metrics],
        indent="  ",
        # The first metric decides which is best; `train ckpt show` and --json have all.
        least_important=[*reversed(metrics[1:]), "size", "age", "reason", *metrics[:1], "kind", "state", "step"],
        cut="reason",
        colours={"best": "green"} | {item.state: "red" for item in items if item.state != "valid"},
    )


def _show(args: argparse.Namespace) -> int:
    """`train ckpt show`: print what one checkpoint holds."""
    from trainer_cli.commands.ckpt_inspect import TENSOR_COLUMNS, open_content, tensor_rows

    with open_content(_select_one(args.names[0])) as content:
        tensors = content.tensors
        if args.norms:
            # The norm of a random generator's state has no meaning.
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
        print_json({**_content_facts(content), "tensors": listed, "aliases": content.aliases, "views": views, **more})
        return ExitCode.DONE
    print("\n".join(beside(f"{key:<9} ", value, line_width(sys.stdout)) for key, value in _fact_lines(content)))
    print("\n" + table(TENSOR_COLUMNS, tensor_rows(tensors, norms), right=["elements", "size", "norm"]))
    notes = [f"{name} is tied to {target}" for name, target in content.aliases.items()]
    notes += [f"{name} is a view of {base}" for name, base in views.items()]
    if notes:
        print("\n" + "\n".join(notes))
    if args.states:
        print("\nstates")
        print_json(states)
    return ExitCode.DONE


def _content_facts(content: Content) -> dict[str, Any]:
    """The facts about a checkpoint, for `--json`."""
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
    """(title, text) of the facts about a checkpoint, without those that are empty."""
    manifest = content.manifest
    facts = [
        ("path", str(content.path)),
        ("step", f"{manifest.step:,} (epoch {manifest.epoch})"),
        ("kind", f"{manifest.kind} ({manifest.reason})" + (", pinned" if content.entry.pinned else "")),
        ("finished", manifest.finished or ""),
        ("weights", "" if manifest.finite else "NOT FINITE: a resume skips it"),
        ("left out", ", ".join(manifest.left_out)),
        ("size", f"{format_bytes(content.entry.size_bytes)} in {format_count(len(manifest.files), 'file')}"),
        ("run", f"{manifest.run_id} (attempt {manifest.attempt}, {format_count(manifest.world_size, 'process')})"),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))),
        ("packages", ", ".join(manifest.target_packages)),
        ("config", manifest.config_digest or ""),
        *(("metric", f"{name} {value:.6g}") for name, value in manifest.metrics.items()),
    ]
    return [(key, value) for key, value in facts if value]


def _verify(args: argparse.Namespace) -> int:
    """`train ckpt verify`: read checkpoints whole, and print which are valid."""
    from trainer_cli.commands.ckpt_remove import find_items, verify_all

    # A log file would keep every state of the line.
    shows = is_terminal(sys.stderr) and not args.json

    def show_progress(done: int, item: Item) -> None:
        if shows:
            # On one line that each checkpoint overwrites.
            print(f"\r{done}/{len(items)} {item.path.name}\x1b[K", end="", file=sys.stderr, flush=True)

    # Where a run removed all of them meanwhile, its newer checkpoints are looked for.
    for _ in range(_VERIFY_TRIES):
        items = find_items(args.names)
        _import_decoders()
        problems = verify_all(items, show_progress)
        if shows:
            print("\r\x1b[K", end="", file=sys.stderr)
        removed = [item for item in items if item.path not in problems]
        for item in removed:
            print(f"skipped: {item.path}, which was removed meanwhile", file=sys.stderr)
        if problems or any(item.named for item in removed):
            break
    else:
        raise CheckpointError("each checkpoint was removed before it was read", cure="Run the command again.")
    if args.json:
        print_json(
            [{"path": str(path), "valid": problem is None, "problem": problem} for path, problem in problems.items()]
        )
    else:
        rows = []
        for item in items:
            if item.path in problems:
                size = "" if item.entry.manifest is None else format_bytes(item.entry.size_bytes)
                rows.append([str(item.path), size, problems[item.path] or "valid"])
        print(table(["checkpoint", "size", "found"], rows, right=["size"]))
        print(f"{sum(problem is None for problem in problems.values())} of {len(problems)} valid")
    if any(problems.values()):
        return ExitCode.FAILED
    if named := [str(item.path) for item in removed if item.named]:
        raise CheckpointError(f"{', '.join(named)}: removed meanwhile", cure="Name one that exists.")
    return ExitCode.DONE


def _diff(args: argparse.Namespace) -> int:
    """`train ckpt diff`: print in what two checkpoints differ."""
    from trainer_cli.commands.ckpt_inspect import compare, open_content

    paths = [_select_one(name) for name in args.names]
    with ExitStack() as stack:
        # Both stay open to the end, since their tensors are read from the files as they are compared.
        first, second = (stack.enter_context(open_content(path)) for path in paths)
        difference = compare(first, second)
    changes = difference.config
    if args.json:
        config = [{"key": change.key, "old": change.old, "new": change.new} for change in changes]
        print_json({**asdict(difference), "config": config})
        return ExitCode.DONE
    print(f"{first.path} (step {first.manifest.step}) -> {second.path} (step {second.manifest.step})")
    _print_list("config", [difference.no_config] if difference.no_config else [str(change) for change in changes])
    _print_list(f"only in {first.path}", difference.only_first)
    _print_list(f"only in {second.path}", difference.only_second)
    rows = [[change.name, change.why or f"{change.relative:.3g}"] for change in difference.tensors]
    if rows:
        _print_list("tensors that differ", table(["tensor", "relative change"], rows).splitlines())
    common = len(difference.tensors) + difference.same
    print(f"{difference.same} of {common} common tensors are the same, bit for bit")
    return ExitCode.DONE


def _pin(args: argparse.Namespace) -> int:
    """`train ckpt pin` and `unpin`."""
    from trainer_cli.commands.ckpt_remove import find_items, pin

    changed = pin(find_items(args.names), pinned=args.action == "pin")
    return _report(args, f"{args.action}ned", changed)


def _remove(args: argparse.Namespace) -> int:
    """`train ckpt rm`: remove the named checkpoints, after a question."""
    from trainer_cli.commands.ckpt_remove import find_items, remove, why_not_remove

    items = find_items(args.names)
    # All or nothing: what is left after half a removal would be hard to tell.
    if not args.force and (reasons := why_not_remove(items)):
        listed = "\n".join(f"  {path}: {why}" for path, why in reasons.items())
        raise UserError(f"nothing is removed, because of\n{listed}\n", cure="To remove them all the same, add --force.")
    paths = [item.path for item in items]
    if args.dry_run:
        return _report(args, "would_be_removed", paths)
    if not _confirm(args, paths):
        return _report(args, "removed", [], dict.fromkeys(paths, "you said no"))
    return _report(args, "removed", *remove(items))


def _prune(args: argparse.Namespace) -> int:
    """`train ckpt prune`: remove what the rules of the runs let go, after a question."""
    from trainer_cli.commands.ckpt_prune import apply_pruning, leftovers_in, prunings, remove_leftovers
    from trainer_cli.commands.ckpt_remove import find_items
    from trainer_cli.runs import RunDir

    # A run names the checkpoints that it saved; those that were replayed are removed with them.
    runs = [run for run in map(RunDir, args.names) if run.is_run()]
    replayed = [str(run.replayed_folder) for run in runs if Catalog.of(run.replayed_folder).names()]
    items = find_items([*args.names, *replayed])
    _import_decoders()
    # A run that is training has such folders too.
    leftovers = leftovers_in([run for run in runs if not run.is_locked()])
    plans = list(prunings(items))
    removals = {path: why for plan in plans for path, why in plan.remove.items()}
    removals |= leftovers
    if not args.json:
        keep = {path: why for plan in plans for path, why in plan.keep.items()}
        rows = [[str(path), "stays", why] for path, why in keep.items()]
        rows += [[str(path), "goes", why] for path, why in removals.items()]
        uncounted = [item.path for item in items if item.path not in keep and item.path not in removals]
        rows += [[str(path), "left", "not counted: damaged, partial, or another run's"] for path in uncounted]
        print(table(["checkpoint", "rules", "why"], rows))
    if args.dry_run or not removals:
        return _report(args, "would_be_removed" if args.dry_run else "removed", list(removals))
    if not _confirm(args, list(removals)):
        return _report(args, "removed", [], dict.fromkeys(removals, "you said no"))
    removed: list[Path] = []
    refused: dict[Path, str] = {}
    for plan in plans:
        # Run by run, each under its own lock.
        removed_of_run, refused_of_run = apply_pruning(plan, items)
        removed += removed_of_run
        refused |= refused_of_run
    removed += remove_leftovers(runs, leftovers)
    return _report(args, "removed", removed, refused)


def _import_decoders() -> None:
    """Import what decodes the files of a checkpoint, with torch, before the first one is read."""
    with showing_import():
        from trainer_cli.format import check_readable  # noqa: F401


_FLAGS = {
    "--norms": (("--norms",), "show the Euclidean norm of each tensor too; random states are left out"),
    "--states": (("--states",), "show the small states too"),
    "--yes": (("-y", "--yes"), "do not ask"),
    "--force": (("--force",), "remove pinned ones too, and the last valid one of a run"),
    "--no-replay": (("--no-replay",), "refuse RUN@stepN if it does not exist, instead of computing it"),
    "--dry-run": (("-n", "--dry-run"), "only show what would be removed"),
    "--json": (("--json",), "print the answer as JSON"),
}
_ACTIONS: Mapping[str, Action] = {
    "ls": Action(_list_checkpoints, "*", "WHAT", (), "show a table of checkpoints, by default of all runs in ./runs"),
    "show": Action(
        _show, 1, "CKPT", ("--norms", "--states", "--no-replay"), "show where a checkpoint comes from, and its tensors"
    ),
    "verify": Action(_verify, "+", "WHAT", ("--no-replay",), "read every byte and compare the digests"),
    "diff": Action(_diff, 2, "CKPT", ("--no-replay",), "compare configs, names, shapes and values of two checkpoints"),
    "pin": Action(_pin, "+", "WHAT", (), "keep checkpoints, regardless of the retention rules"),
    "unpin": Action(_pin, "+", "WHAT", (), "remove the pins of checkpoints"),
    "rm": Action(_remove, "+", "WHAT", ("--yes", "--force", "--dry-run"), "remove checkpoints, after asking"),
    "prune": Action(_prune, "+", "WHAT", ("--yes", "--dry-run"), "remove what the rules of the run would remove"),
}  # fmt: skip


def _select_one(name: str) -> Path:
    """The one checkpoint that a name or pattern selects.

    Raises:
        UserError: there are more.
    """
    from trainer_cli.selection import select_all

    matches = select_all([name])
    if len(matches) > 1:
        path, match = list(matches.items())[-1]
        such = path if match.run is None else f"{match.run}@latest, {match.run}@best or {path}"
        raise UserError(
            f"{name} names {len(matches)} checkpoints, but one is expected", cure=f"Name one, such as {such}."
        )
    return next(iter(matches))


def _confirm(args: argparse.Namespace, paths: Sequence[Path]) -> bool:
    """Whether the user confirms the removal."""
    if args.yes:
        return True
    count = format_count(len(paths), "checkpoint")
    # A script that pipes text into the command has not read the question.
    if not sys.stdin.isatty():
        raise UserError(
            f"{count} would be removed, but this is not a terminal, so it cannot be confirmed", cure="Add --yes."
        )
    lines = "".join(f"  {path}\n" for path in paths)
    # To stderr: stdout holds only the answer, which a program may read.
    print(f"{lines}remove {count}? [y/N] ", end="", file=sys.stderr, flush=True)
    # Anything but yes is no, also the end of the input.
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _report(
    args: argparse.Namespace, outcome: str, paths: Sequence[Path], refused: Mapping[Path, str] | None = None
) -> int:
    """Print which paths have the outcome, and which were left alone and why. Returns the exit code."""
    refused = refused or {}
    if args.json:
        print_json({outcome: [str(path) for path in paths], "left": {str(path): why for path, why in refused.items()}})
    else:
        lines = [f"{outcome.replace('_', ' ')}: {path}" for path in paths]
        lines += [f"left: {path}: {why}" for path, why in refused.items()]
        print("\n".join(lines) or "nothing to do")
    return ExitCode.FAILED if refused else ExitCode.DONE


def _print_list(title: str, lines: Sequence[str]) -> None:
    """Print lines below a title, at most `_MAX_LINES`; nothing without lines."""
    if lines:
        hidden = len(lines) - _MAX_LINES
        more = [f"… and {hidden} more (all with --json)"] if hidden > 0 else []
        print("\n".join([f"{title}:", *(f"  {line}" for line in [*lines[:_MAX_LINES], *more])]))
