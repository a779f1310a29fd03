"""BENCHMARKS.md: what is measured goes there once, after interruptions too, and the README shows some of its rows."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import chart
import publish
from measuring import TableFailed, check, measured
from settings import Settings, Size
from table import Column, Row, Table

ROOT = Path(__file__).parents[2]
README = "# a project\n\nText.\n\n## Documentation\n\nMore.\n"
CLAIM = publish.CLAIMS[0]


class Measurer:
    """Measures tables of two rows; fails, or is interrupted, at those that are named."""

    def __init__(self, *, fails: str = "", interrupted_at: str = "") -> None:
        self.names: list[str] = []
        self._fails, self._interrupted_at = fails, interrupted_at

    def __call__(self, name: str, settings: Settings) -> list[Table]:
        if name == self._interrupted_at:
            raise KeyboardInterrupt
        self.names.append(name)
        if name == self._fails:
            raise TableFailed("TypeError: no such argument")
        if name == "gpu":
            return []
        rows = [Row("bare, fused", {"step": [1.0, 2.0, 3.0]}), Row(CLAIM.ours, {"step": [2.0, 4.0, 6.0]})]
        return [Table(name, f"Title of {name}", "bare, fused", [Column("step", "µs")], rows)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "README.md").write_text(README)
    return folder


def _publish(root: Path, measurer: Measurer, names: tuple[str, ...] = ("loop", "save", "load")) -> int:
    settings = Settings(Size.smoke, None, str(root))
    return publish.publish(names, settings, measurer, state=root.parent / "state" / "published.json", root=root)


def test_a_call_that_was_broken_off_goes_on_with_the_next_table(root: Path) -> None:
    first, second = Measurer(interrupted_at="save"), Measurer()
    with pytest.raises(KeyboardInterrupt):
        _publish(root, first)
    assert not (root / publish.PAGE).exists()
    assert _publish(root, second) == 0
    assert (first.names, second.names) == (["loop"], ["save", "load"])
    text = (root / publish.PAGE).read_text()
    assert [text.count(f"## Title of {name}\n") for name in ("loop", "save", "load")] == [1, 1, 1]


def test_a_failed_table_is_named_and_measured_again_by_the_next_call(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = Measurer(fails="save"), Measurer()
    assert _publish(root, first) == 1
    assert "FAILED: save: TypeError: no such argument" in capsys.readouterr().err
    text = (root / publish.PAGE).read_text()
    assert "**save could not be measured**: TypeError: no such argument." in text
    assert "## Title of load\n" in text
    assert _publish(root, second) == 0
    assert (first.names, second.names) == (["loop", "save", "load"], ["save"])
    assert "could not be measured" not in (root / publish.PAGE).read_text()
    # All are done: the next call begins anew.
    third = Measurer()
    _publish(root, third)
    assert third.names == ["loop", "save", "load"]


def test_a_table_with_nothing_to_measure_is_named(root: Path) -> None:
    assert _publish(root, Measurer(), names=("loop", "gpu")) == 0
    assert "`gpu`: nothing to measure on this machine.\n" in (root / publish.PAGE).read_text()


def test_what_another_commit_measured_is_measured_again(root: Path) -> None:
    _publish(root, Measurer(fails="save"))
    state = root.parent / "state" / "published.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "commit": "another"}))
    second = Measurer()
    _publish(root, second)
    assert second.names == ["loop", "save", "load"]


def test_the_pages_are_written_again_from_the_saved_results(root: Path) -> None:
    _publish(root, Measurer())
    written = {path: path.read_text() for path in root.rglob("*.*") if path.is_file()}
    assert {path.name for path in written} == {
        "README.md", "BENCHMARKS.md", "results.json", "loop.svg", "save.svg", "load.svg",
    }  # fmt: skip
    (root / publish.PAGE).unlink()
    (root / publish.FOLDER / "gone.svg").write_text("a plot of a table that is no more")
    publish.render(root)
    assert {path: path.read_text() for path in root.rglob("*.*") if path.is_file()} == written


def test_the_readme_shows_the_short_rows_of_the_page_and_keeps_its_text(root: Path) -> None:
    _publish(root, Measurer(), names=("loop",))
    readme, page = (root / "README.md").read_text(), (root / publish.PAGE).read_text()
    rows = [line for line in readme.splitlines() if line.startswith("|")]
    assert rows[2] == f"| {CLAIM.text} | 4 µs | plain loop 2 µs |"
    assert rows[3:] == [f"| {claim.text} | not measured | |" for claim in publish.CLAIMS[1:]]
    assert "\n".join(rows) in page
    assert readme.startswith("# a project\n\nText.\n\n## Benchmarks\n")
    assert readme.endswith("\n\n## Documentation\n\nMore.\n")
    assert readme.count("](BENCHMARKS.md)") == 1


def test_the_short_rows_are_no_wider_than_a_page() -> None:
    tables = []
    for claim in publish.CLAIMS:
        rows = [Row(name, {claim.column: [0.123]}, base="base") for name in (claim.ours, *claim.others)]
        base = Row("base", {claim.column: [0.0456]})
        tables.append(Table(claim.table, "", "base", [Column(claim.column, "s")], [*rows, base]))
    lines = publish.short_rows({"tables": {"all": [table.to_json() for table in tables]}})
    assert not [line for line in lines if "not measured" in line]
    assert not [line for line in lines if len(line) > 120]


def test_the_project_shows_what_was_published() -> None:
    """The page, its plots and the section of the README are what the saved results give; or there is none of them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if not (ROOT / publish.RESULTS).exists():
        assert not (ROOT / publish.PAGE).exists()
        assert "BENCHMARKS.md" not in readme
        return
    results = json.loads((ROOT / publish.RESULTS).read_text(encoding="utf-8"))
    pages = publish.pages(results)
    assert {path: (ROOT / path).read_text(encoding="utf-8") for path in pages} == pages
    assert {path.name for path in (ROOT / publish.FOLDER).glob("*.svg")} == {path.name for path in pages} - {
        publish.PAGE.name
    }
    assert publish.with_section(readme, results) == readme
    assert (results["size"], results["failed"]) == (Size.whole, {})
    assert not [row for row in publish.short_rows(results) if "not measured" in row]


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(Table("loop", "A step", "bare", [Column("step", "s")], []), id="no row"),
        pytest.param(
            Table("loop", "A step", "bare", [Column("step", "s")], [Row("bare", {"step": []})]), id="no sample"
        ),
        pytest.param(
            Table("loop", "A step", "bare", [Column("step", "s")], [Row("bare", {"other": [1.0]})]), id="no column"
        ),
    ],
)
def test_a_table_without_figures_has_failed(table: Table) -> None:
    with pytest.raises(TableFailed):
        check([table])


def test_bars_are_svg_from_zero_with_every_row_named() -> None:
    drawn = ElementTree.fromstring(chart.bars("Saves <of>", "time, s", [("train", [1.0, 2.0, 3.0]), ("<peer>", [4.0])]))
    texts = ["".join(one.itertext()) for one in drawn.iter() if one.tag.endswith("text")]
    assert texts == ["Saves <of>", "time, s", "train", "2", "<peer>", "4"]
    widths = [float(one.attrib["width"]) for one in drawn.iter() if one.tag.endswith("rect")][1:]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)


def test_a_table_is_measured_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """The saves of another table are of the names that `files` would leave behind."""
    assert measured("files", Settings(Size.smoke, None, str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
