"""Files of a run directory with odd values in them, and the readers that must survive them."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from reported import make_run, record, validate

from trainer_cli import manifest
from trainer_cli.addons.view.serve_runs import ServedRuns
from trainer_cli.commands.command_line import main
from trainer_cli.strict_json import strict_json

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, -1.5, 0.5, 10**15, 1e15, 2**53, 2**63, -(2**63), 10**30, -(10**28), 10**400, 1e300,
    float("nan"), float("inf"), float("-inf"), "", "nan", "inf", "x", "${x}", "${now:%Y}", "../../x", "/etc/passwd",
    "\0", "\n", "\udce9", "a" * 5000, "9" * 5000, "1e999", "9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+14:00",
    [], [[]], [1], [None], ["x"], [[[[[[1]]]]]], {}, {"": ""}, {"a": {}}, {"value": 1}, {"value": {}}, {"0": [[]]},
)  # fmt: skip
"""Values that no writer of ours puts there."""
RAW = (
    b"", b"\n", b"{", b"[" * 200_000, b'["]", ' * 50_000, b'{"a":' * 50_000, b"- " * 50_000, b"\xff\xfe", b"\0" * 100,
    b"null", b"[]", b"1" * 6000, b'"' * 3, b"a: &a [*a]\n", b"a: !!bool x\n", b"a: !!python/name:os.system\n",
    b"a0: &a0 [1]\n" + b"".join(b"a%d: &a%d [*a%d,*a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, 60)),
    b"a0: &a0 [1]\n" + b"".join(b"a%d: &a%d {x: *a%d}\n" % (i, i, i - 1) for i in range(1, 900)),
)  # fmt: skip
"""Contents of whole files."""
DEEP: Any = None
for _ in range(300):
    DEEP = [DEEP]
FILES = (
    "config.yaml", "overrides.yaml", "provenance.json", "environment.json", "summary.json", "metrics.jsonl",
    "system.jsonl", "media.jsonl", "checkpoints.jsonl", "decisions.json", "validation/validation.jsonl",
    "checkpoints/step20/manifest.json",
)  # fmt: skip
COMMANDS: dict[str, tuple[str, ...]] = {
    "top": ("top", "--json", "."),
    "top, one run": ("top", "--json", "bad"),
    "tail": ("tail", "bad"),
    "report": ("report", ".", "-o", "r.html"),
    "report, one run": ("report", "bad", "-o", "r.html"),
    "ckpt ls": ("ckpt", "ls", "bad"),
    "ckpt ls --json": ("ckpt", "ls", "--json", "bad"),
    "ckpt show": ("ckpt", "show", "bad@latest"),
    "ckpt prune": ("ckpt", "prune", "bad", "--dry-run"),
    "ckpt verify": ("ckpt", "verify", "bad"),
    "data": ("data", "bad", "5"),
}


def make_runs(root: Path) -> None:
    """A run `good` and a run `bad` with every file that a reader opens."""
    for name in ("good", "bad"):
        run = make_run(root / name, steps=20)
        validate(run.validation_folder, {"checkpoints/step20": (20, 0.5)})
        run.system_file.write_text(f"{strict_json(record(1, 10, 0.1, {}))}\n" * 3)
        media = {
            "texts": {"a": "words"},
            "images": {"b": "media/step1-0123.png"},
            "histograms": {"c": {"counts": [1, 2], "edges": [0.0, 1.0, 2.0]}},
            "tables": {"d": {"columns": ["x", "y"], "rows": [["1", "2"]], "matrix": True}},
        }
        lines = [{"step": step, "epoch": 0.1, "time": 1_700_000_000.0, **media} for step in (1, 2)]
        (run.path / "media.jsonl").write_text("".join(f"{strict_json(line)}\n" for line in lines))
        run.decisions_file.write_text('{"data.batch_size": {"value": 3, "why": "fits"}}')
        summary = run.read_summary()
        summary["best_metrics"] = {"val/loss": {"value": 0.2, "step": 20, "mode": "min"}}
        summary["throughput"] = {"samples_per_s": 64.0}
        run.summary_file.write_text(strict_json(summary))


def damage(root: Path, file: str, rng: random.Random) -> str:
    """Put odd values into a file of the run `bad`; returns what was done."""
    path = root / "bad" / file
    if rng.random() < 0.1:
        content = rng.choice(RAW)
        path.write_bytes(content)
        return f"{file} is {content[:30]!r}"
    text = path.read_text()
    if path.suffix == ".jsonl":
        lines = text.splitlines()
        number = rng.randrange(len(lines))
        done, lines[number] = _odd_json(json.loads(lines[number]), rng)
        path.write_text("\n".join(lines) + "\n", "utf-8", errors="surrogateescape")
    elif path.suffix == ".yaml":
        done, value = _mutate(yaml.safe_load(text), rng)
        path.write_text(yaml.safe_dump(value) if rng.random() < 0.5 else strict_json(value), "utf-8", "replace")
    elif path.name == "manifest.json":
        fields = json.loads(text)
        fields.pop("digest")
        done, value = _mutate(fields, rng)
        with contextlib.suppress(ValueError):
            path.write_bytes(manifest._add_digest(value))
    else:
        done, changed = _odd_json(json.loads(text), rng)
        path.write_text(changed, "utf-8", errors="surrogateescape")
    return f"{file}: {done}"


def _odd_json(value: Any, rng: random.Random) -> tuple[str, str]:
    done, changed = _mutate(value, rng)
    return done, json.dumps(changed)


def _mutate(tree: Any, rng: random.Random) -> tuple[str, Any]:
    """The tree with one of its values, chosen at random, replaced by an odd one, or with an odd key."""
    odd = DEEP if rng.random() < 0.05 else rng.choice(ODD)
    paths = list(_paths(tree))
    path = rng.choice(paths)
    if not path:
        return f"all = {str(odd)[:40]}", odd
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    if isinstance(parent, dict) and rng.random() < 0.15:
        parent[rng.choice(["", "\0", "a" * 300, "<b>", "val/x", "train/x", "9", "${x}", "__proto__"])] = odd
        return f"{path[:-1]}: a key more = {str(odd)[:40]}", tree
    parent[path[-1]] = odd
    return f"{path} = {str(odd)[:40]}", tree


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from _paths(value, (*path, key))


def read_page(root: Path) -> str:
    """What `train serve` answers for all runs, and for each alone."""
    served = ServedRuns(root)
    try:
        overview = served.overview()
        strict_json(overview)
        json.dumps(overview, allow_nan=False).encode()
        for number in overview["runs"]:
            json.dumps(served.page([int(number)]), allow_nan=False).encode()
    finally:
        served.close()
    return ""


def read_by(words: tuple[str, ...]) -> Callable[[Path], str]:
    """A command: what it says of a fault of its own, or that it did not end with a message."""

    def read(root: Path) -> str:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(words))
        said = err.getvalue()
        if "Traceback" in said or "fault of train" in said or code not in (0, 1, 2, 3, 4):
            return f"{' '.join(words)}: exit code {code}: {said[-1500:]}"
        return ""

    return read


READERS: dict[str, Callable[[Path], str]] = {
    **{name: read_by(words) for name, words in COMMANDS.items()},
    "serve": read_page,
}


def try_damage(whole: Path, folder: Path, seed: int) -> list[str]:
    """What goes wrong where a copy of the runs has up to three odd values; the current folder is that copy."""
    rng = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    file = rng.choice(FILES)
    done = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        try:
            done.append(damage(folder, file, rng))
        except (ValueError, yaml.YAMLError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
            break  # Nothing is left in it to change.
    problems = []
    with contextlib.chdir(folder):
        for name, read in READERS.items():
            try:
                problem = read(folder)
            except Exception as error:
                import traceback

                problem = "".join(traceback.format_exception(error)[-3:])
            if problem:
                problems.append(f"seed {seed}, {'; '.join(done)}: {name}: {problem}")
    return problems
