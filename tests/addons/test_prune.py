"""What scripts/prune.py leaves of pages when an add-on is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from prune import NOTHING, Brings, names_of, prune

BRINGS: Brings = {
    "draw": {
        "verbs": ["draw", "ckpt paint"],
        "names": ["Pen"],
        "parts": ["format.picture", "fit.draw_at_end"],
        "configs": ["loggers/canvas", "experiment/sketch"],
    }
}
KEPT = "Text of `train fit` and Pen.\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Paragraphs, with the words before what is gone.
        (f"{KEPT}\n`train draw RUN` draws,\nalso by:\n\n- two\n\n{KEPT}", f"{KEPT}\n- two\n\n{KEPT}"),
        (f"{KEPT}\nBy `trainer_cli.Pen`.\n\n```python\na = 1\n```\n", f"{KEPT}\n```python\na = 1\n```\n"),
        (f"{KEPT}\nA program:\n\n```python\nfrom trainer_cli import Pen\n```\n\nIts end.\n", f"{KEPT}\nIts end.\n"),
        (f"{KEPT}\nFormats:\n\n- `format=picture`\n\nIts end.\n", f"{KEPT}\nIts end.\n"),
        # Commands, and what they print.
        (
            "```sh\ntrain fit a\ntrain draw runs/a \\\n  --now\nls\n```\n\n```text\ndrawn\n```\n\nIts end.\n",
            "```sh\ntrain fit a\nls\n```\n\nIts end.\n",
        ),
        ("Text.\n\n```sh\n# One picture\ntrain fit sketch loggers=canvas\n```\n", "Text.\n"),
        # Entries of a config.
        (
            "```yaml\nloggers:\n  # Draws.\n  pen: {_target_: trainer_cli.Pen}\n  csv: {_target_: a.Csv}\n```\n",
            "```yaml\nloggers:\n  csv: {_target_: a.Csv}\n```\n",
        ),
        ("A.\n\n```yaml\nmodel:\n  _target_: trainer_cli.Pen\n  width: 3\n```\n", "A.\n"),
        # Items, rows, answers.
        ("- `train fit`\n- `train ckpt paint`,\n  on paper\n- by [a link](draw.md)\n", "- `train fit`\n"),
        ("| a | b |\n|---|---|\n| `sketch` | 1 |\n| `moons` | 2 |\n", "| a | b |\n|---|---|\n| `moons` | 2 |\n"),
        (f"| a | b |\n|---|---|\n| `canvas` | 1 |\n\n{KEPT}", KEPT),
        (f"**How?** By `loggers=[csv,canvas]`.\n\n**And?** [So](draw.md).\n\n{KEPT}", KEPT),
        # Sections.
        ("# A\n\nA.\n\n## B\n\n`train draw` is it. B.\n\n### C\n\nC.\n\n## D\n\nD.\n", "# A\n\nA.\n\n## D\n\nD.\n"),
        (f"# A\n\n{KEPT}\n## B\n\n- `train draw`\n\n## D\n\nD.\n", f"# A\n\n{KEPT}\n## D\n\nD.\n"),
        # Links.
        ("As [X](draw.md) ([Z](draw.md#x)). [Y](other.md#y), [Z](draw.md), [V](#v).\n", "As X. [Y](other.md#y), V.\n"),
        (f"{'a' * 99}\n([X](draw.md)), {'b ' * 40}c\n", f"{'a' * 99}, b b b b b b b b b b\n{'b ' * 30}c\n"),
    ],
)  # fmt: skip
def test_what_is_gone_goes_from_a_page_and_nothing_else(before: str, after: str, tmp_path: Path) -> None:
    pages = {"docs/page.md": before, "docs/draw.md": "# Draw\n", "docs/other.md": "# Y\n"}
    found = prune(tmp_path, pages, {"docs/draw.md"}, names_of(BRINGS), tables="docs/moving/")
    assert found.pop("docs/page.md") == after
    assert found == {"docs/other.md": "# Y\n"}


def test_a_page_about_it_goes_and_with_it_the_links_to_it(tmp_path: Path) -> None:
    pages = {"docs/a.md": "# A\n\n`train draw` draws.\n\nMore.\n", "docs/b.md": "# B\n\n- [A](a.md)\n- b\n"}
    assert prune(tmp_path, pages, (), names_of(BRINGS), tables="docs/moving/") == {"docs/b.md": "# B\n\n- b\n"}


def test_a_row_of_a_table_of_equivalents_stays(tmp_path: Path) -> None:
    rows = ("| `x` | `loggers=canvas`, `loggers=csv` |\n", "| `y` | no: `train draw` does so |\n", "| `z` | `name` |\n")
    text = prune(tmp_path, {"docs/moving/a.md": "".join(rows)}, (), names_of(BRINGS), tables="docs/moving/")
    assert text["docs/moving/a.md"] == f"| `x` | `loggers=csv` |\n| `y` | {NOTHING} |\n| `z` | `name` |\n"


def test_without_an_addon_that_is_gone_nothing_changes() -> None:
    assert not names_of({}).search(KEPT)
