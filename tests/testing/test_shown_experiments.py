"""A resume is exact for what the documentation shows: a GAN, a GPT-2 of transformers, a network with frozen norms."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_cli.config.compose import compose
from trainer_cli.testing.processes import Run
from trainer_cli.testing.resume import check_resume

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"`([\w/.]+)`:\n\n^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FROZEN = 'freeze=["features.0.*","features.1.*"]'


@pytest.mark.parametrize(
    ("page", "overrides", "imports"),
    [
        ("training-step", ("experiment=gan",), ()),
        ("huggingface", ("experiment=gpt2",), ("transformers.models.gpt2.modeling_gpt2",)),
        ("freezing", ("experiment=digits", FROZEN, "data.batch_size=8", "loop.limit_train_batches=5"), ()),
    ],
    ids=["gan", "gpt2", "frozen norms"],
)
def test_a_resume_of_what_the_documentation_shows_is_exact(
    page: str,
    overrides: tuple[str, ...],
    imports: tuple[str, ...],
    tmp_path: Path,
    run_in: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for file, text in BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8")):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    report = check_resume(compose(overrides), steps=6, run=run_in(tmp_path, imports))
    assert report.exact, report
    assert [row.result for row in report.rows] == ["exact"] * len(report.rows)
