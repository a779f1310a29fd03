"""The verdict of `train compare` in the report of its runs, from `verdict.json` in the folder of the comparison."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer_cli.addons.view.report_blocks import Block, number, table
from trainer_cli.errors import UserError
from trainer_cli.metric_names import Mode
from trainer_cli.runs import RunDir, read_json

_FILE = "verdict.json"
_CURVE = {"step": "seed", "y": "mean", "low": "low", "high": "high"}
"""Array of a curve -> the key of a pair in the file."""
_COLUMNS = {"A": "a", "B": "b", "B is better by": "difference", "mean so far": "mean", "low": "low", "high": "high"}
"""Column of the table of pairs -> the key."""


class ComparedRuns(NamedTuple):
    """What was compared, and with which result."""

    title: str
    metric: str | None
    """The metric that decides; None if it is not known yet."""
    runs: Mapping[Path, tuple[str, str]]
    """The runs of the pairs that still exist, each with its short name and what its side is."""
    answer: Sequence[Block]
    details: Sequence[Block]

    @classmethod
    def read(cls, folder: Path) -> ComparedRuns | None:
        """The comparison in a folder; None if there is none.

        Raises:
            UserError: its file is damaged.
        """
        file = folder / _FILE
        if not file.exists():
            return None
        try:
            verdict = read_json(file) or {}
            sides = {letter: f"{letter}: {verdict[letter.lower()]}" for letter in "AB"}
            # All comparisons are beside each other, also one that has trained a run for this one.
            beside = os.path.relpath(folder.resolve().parent)
            runs = {
                Path(beside, *Path(pair[f"{letter.lower()}_run"]).parts[-2:]): (f"{letter} seed {pair['seed']}", side)
                for pair in verdict["pairs"]
                for letter, side in sides.items()
            }
            existing = {path: names for path, names in runs.items() if RunDir(path).exists_as_run()}
            blocks = list(_answer(verdict)), list(_details(verdict))
            return cls(", ".join(sides.values()), verdict["metric"], existing, *blocks)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file} is damaged", cure="The same train compare writes it again.") from error


def _answer(verdict: Mapping[str, Any]) -> Iterator[Block]:
    """The verdict, on what it rests, and the chart of the interval after each pair."""
    yield {"kind": "banner", "state": verdict["verdict"], "text": verdict["sentence"]}
    pairs, margin, noise = verdict["pairs"], verdict["margin"], verdict["noise"]
    if not pairs:
        return
    extreme = "smallest" if verdict["mode"] == Mode.min else "largest"
    same = "the same for A and B"
    facts = {
        "decides": f"the {extreme} {verdict['metric']} of each run",
        "length of each run": verdict["length"],
        "pairs": f"{len(pairs)} of at most {verdict['seeds']}",
        "least difference that matters (margin)": number(margin),
        "A varies over seeds (standard deviation)": "" if noise is None else f"±{noise:.3g}",
        "batches": same if verdict["same_batches"] else "not the same: the data, or the size of a batch, differs",
        "config": "" if verdict["differs"] else same,
        "source": "" if verdict["source_differs"] else same,
    }
    yield {"kind": "facts", "items": [fact for fact in facts.items() if all(fact)]}
    name = "mean difference"
    interval = {"run": -1, "name": name, "group": name, "bars": True}
    yield {
        "kind": "chart",
        "title": f"How much better B is in {verdict['metric']}: mean and 95 % interval after each pair",
        "axis": "pairs",
        "curves": [{**interval, **{array: [pair[key] for pair in pairs] for array, key in _CURVE.items()}}],
        # Without a margin the three are one.
        "levels": [*{-margin: "-margin", margin: "margin", 0: "no difference"}.items()],
    }


def _details(verdict: Mapping[str, Any]) -> Iterator[Block]:
    """Tables of the pairs, and of what differs between A and B."""
    tables = {
        "Pairs": (
            ["seed", *_COLUMNS],
            [[str(pair["seed"]), *(number(pair[key]) for key in _COLUMNS.values())] for pair in verdict["pairs"]],
        ),
        "Config keys that differ": (
            ["key", "A", "B"],
            [[key, str(values["a"]), str(values["b"])] for key, values in verdict["differs"].items()],
        ),
        "Source files that differ": (["file"], [[file] for file in verdict["source_differs"]]),
    }
    yield from (
        table(*content, right=["seed", *_COLUMNS], title=title) for title, content in tables.items() if content[1]
    )
