"""What the test suites of other trainers claim, as rows that are tried on this one.

A file of tests/peers holds the claims of one trainer, in the order of its own test files. Each row names where the
claim comes from, says it in one sentence, and has a check that fails where it does not hold here. Where this trainer
does something else on purpose, the row says what and why, and the check shows that. Long rows are left to
scripts/faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Claim:
    """One row of the table.

    Attributes:
        source: The test of the other project, as `file: test`, or its code where that is all there is.
        text: The claim.
        check: Called with a folder of its own, which is the current one, and the arguments; raises where the row fails.
        arguments: What sets this row apart from others of the same check.
        difference: What this trainer does instead, and why. Empty where the claim holds as it is.
        is_long: Whether the row is left to scripts/faults.
    """

    source: str
    text: str
    check: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    difference: str = ""
    is_long: bool = False


def claims(
    source: str,
    check: Callable[..., None],
    rows: Mapping[str, tuple[Any, ...]],
    *,
    difference: str = "",
    is_long: bool = False,
) -> list[Claim]:
    """Rows of one source and one check; `rows` has the arguments of each by its text."""
    return [Claim(source, text, check, arguments, difference, is_long) for text, arguments in rows.items()]


def each(table: Iterable[Claim]) -> pytest.MarkDecorator:
    """Parametrize a test `(claim, folder)` with the rows of a table, each under a name of its own."""
    rows = [
        pytest.param(claim, id=f"{claim.source}: {claim.text}", marks=[pytest.mark.campaign] if claim.is_long else [])
        for claim in table
    ]
    return pytest.mark.parametrize("claim", rows)


def try_claim(claim: Claim, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a row in a folder of its own."""
    monkeypatch.chdir(folder)
    claim.check(folder, *claim.arguments)
