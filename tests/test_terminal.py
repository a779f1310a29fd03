"""Tables are as wide as the terminal, whole lines in a pipe; numbers have one form each."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import trainer_cli
from trainer_cli import terminal
from trainer_cli.terminal import (
    COLOURS,
    beside,
    cell_width,
    cut_begin,
    cut_end,
    format_age,
    format_bytes,
    format_clock,
    format_count,
    format_first,
    format_rate,
    padded,
    table,
    with_headings,
    wrapped,
    wrapped_message,
)

LONG = "x" * 300


@pytest.fixture(autouse=True)
def _without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


def test_a_pipe_gets_a_whole_line_for_each_row() -> None:
    text = table(["name", "none", "step"], [[f"[b]{LONG}", "", "5"], ["b", "", "10"]], right=["step"], indent="  ")
    assert [line.split() for line in text.splitlines()] == [["name", "step"], [f"[b]{LONG}", "5"], ["b", "10"]]
    assert text.splitlines()[2].endswith("    10")
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_on_a_terminal_no_line_is_wider_and_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = table(["name", "step"], [[LONG, "5"]], indent="  ").splitlines()
    assert max(map(len, lines)) <= 40
    assert "".join(lines).count("x") == 300


LISTING = (
    ["name", "kind", "val/accuracy", "reason"],
    [["step0", "permanent", "0.5", "before the first step"], ["step90", "ephemeral", "", "every epoch"]],
)


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (
            "80",
            [
                "name    kind       val/accuracy  reason",
                "step0   permanent           0.5  before the first step",
                "step90  ephemeral                every epoch",
            ],
        ),
        (
            "50",
            [
                "name    kind       val/accuracy  reason",
                "step0   permanent           0.5  before the first",
                "                                 step",
                "step90  ephemeral                every epoch",
            ],
        ),
        (
            "35",
            [
                "                       val/",
                "name    kind       accuracy  reason",
                "step0   permanent       0.5  before",
                "                             the",
                "                             first",
                "                             step",
                "step90  ephemeral            every",
                "                             epoch",
            ],
        ),
    ],
)
def test_a_narrow_terminal_breaks_a_table_between_words(
    columns: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert table(*LISTING, right=["val/accuracy"]).splitlines() == lines


def test_rows_of_which_no_words_fit_become_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert table(*LISTING, right=["val/accuracy"]).splitlines() == [
        "name          step0",
        "kind          permanent",
        "val/accuracy  0.5",
        "reason        before the first",
        "              step",
        "",
        "name          step90",
        "kind          ephemeral",
        "reason        every epoch",
    ]


def test_a_header_is_bold_and_a_cell_has_its_colour_where_there_are_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["*", "step[1]"], ["", "step2"]]
    plain = table(["", "name"], rows, colours={"*": "green"})
    assert plain.splitlines() == ["   name", "*  step[1]", "   step2"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert table(["", "name"], rows, colours={"*": "green"}) == plain, "NO_COLOR"
    monkeypatch.delenv("NO_COLOR")
    coloured = table(["", "name"], rows, colours={"*": "green"})
    assert "\x1b[1mname" in coloured
    assert coloured.splitlines()[1].startswith("\x1b[1;38;5;28m*\x1b[0m")
    assert max(cell_width(line) for line in coloured.splitlines()) == 10
    monkeypatch.setenv("COLUMNS", "10")
    assert "\x1b[2mname\x1b[0m" in table(["name", "reason"], [["step0", LONG]]), "a label"


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        ("38", ["  name   size  reason             mark", "  step0     5  every 100 seconds  best"]),
        ("37", ["  name   size  reason            mark", "  step0     5  every 100 secon…  best"]),
        ("33", ["  name   size  reason        mark", "  step0     5  every 100 s…  best"]),
        ("32", ["  name   reason             mark", "  step0  every 100 seconds  best"]),
        ("26", ["  name   mark", "  step0  best"]),
    ],
)
def test_a_table_of_one_line_a_row_cuts_a_column_and_leaves_out_others(
    columns: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    settings: dict[str, Any] = {
        "right": ["size"],
        "indent": "  ",
        "least_important": ["size", "reason"],
        "cut": "reason",
    }
    header, rows = ["name", "size", "reason", "mark"], [["step0", "5", "every 100 seconds", "best"]]
    whole = table(header, rows, **settings)
    assert whole.splitlines() == ["  name   size  reason             mark", "  step0     5  every 100 seconds  best"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert table(header, rows, **settings).splitlines() == lines


def test_headings_are_bold_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "usage: train top [-h]\n\noptions:\n  -h  usage: of it\n\nexamples:\n  train: this\nExit codes: 0 done"
    assert with_headings(text, sys.stdout) == text
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    bold = re.findall("\x1b\\[1m(.*?)\x1b\\[0m", with_headings(text, sys.stdout))
    assert bold == ["usage:", "options:", "examples:"]


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_phrase_is_whole_where_a_path_is_broken(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    path = "trainer_cli/configs/experiment/digits.yaml:16"
    text = table([""] * 4, [["may change (where it ends)", "loop.max_duration", "8ep -> 20ep", path]], indent="  ")
    # In less than 80 columns the row is a paragraph.
    assert "8ep -> 20ep" in (text if columns >= 80 else " ".join(text.split()))
    assert (path in text) is (columns != 80)


def test_what_is_in_quotes_is_not_broken() -> None:
    text = "To replace the user's data, write 'data={_target_: trainer_cli.Text}' or `train list data`."
    assert wrapped_message(text, 30).splitlines() == [
        "To replace the user's data,",
        "  write",
        "  'data={_target_: trainer_cli.Text}'",
        "  or `train list data`.",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234, "1.23 kB"), (512_300_000, "512 MB"), (999_600_000, "1 GB"),
        (12_345_678_901, "12.3 GB"), (2_500_000_000_000, "2.5 TB"), (1_234_000_000_000_000, "1,234 TB"),
    ],
)  # fmt: skip
def test_bytes_have_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (59.9, "60 s"), (60, "1 min"), (7199, "1 h"), (200_000, "2 d")]
)
def test_an_age_is_in_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


@pytest.mark.parametrize(
    ("per_s", "text"), [(0.5, "0.5"), (1.234, "1.23"), (45.678, "45.7"), (160.2, "160"), (18213.4, "18,213")]
)
def test_a_rate_has_three_digits_or_more(per_s: float, text: str) -> None:
    assert format_rate(per_s) == text


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (125, "2:05"), (3725.2, "1:02:05"), (90000, "25:00:00")])
def test_a_time_is_shown_as_on_a_clock(seconds: float, shown: str) -> None:
    assert format_clock(seconds) == shown


@pytest.mark.parametrize(
    ("values", "text"), [([], ""), (["a"], "a"), ([1, 2], "1, 2"), (["a", "b", "c"], "a, b and 1 more")], ids=str
)
def test_a_long_list_ends_with_the_number_of_the_others(values: list[object], text: str) -> None:
    assert format_first(values, 2) == text


def _luminance(red: int, green: int, blue: int) -> float:
    """Relative luminance of WCAG 2: 0 is black, 1 is white."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in
              (red / 255, green / 255, blue / 255)]  # fmt: skip
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", COLOURS)
@pytest.mark.parametrize("background", [0.0, 1.0], ids=["black", "white"])
def test_a_colour_can_be_read_on_white_and_on_black(name: str, background: float) -> None:
    number = COLOURS[name]
    assert 16 <= number < 232, "the others depend on the palette of the terminal"
    levels = (0, 95, 135, 175, 215, 255)
    shade = _luminance(*(levels[(number - 16) // part % 6] for part in (36, 6, 1)))
    darker, lighter = sorted([shade, background])
    assert (lighter + 0.05) / (darker + 0.05) > 3.8


NAMES = {
    "Latin": ("accuracy", 8),
    "accents": ("précision", 9),
    "combining accents": ("pre\u0301cision", 9),
    "Chinese": ("精度と損失", 10),
    "emoji": ("😀 loss", 7),
    "Hebrew": ("שלום", 4),
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_text_takes_the_columns_that_a_terminal_gives_it(kind: str) -> None:
    name, width = NAMES[kind]
    assert cell_width(name) == width
    assert padded(name, 12) == name + " " * (12 - width)
    assert padded(name, 12, right=True) == " " * (12 - width) + name
    for columns in range(width + 2):
        begin, end = cut_end(name, columns), cut_begin(name, columns)
        assert max(cell_width(begin), cell_width(end)) <= columns
        assert (begin == name) is (end == name) is (columns >= width)


def test_a_long_text_is_measured_a_few_times_and_not_for_each_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure(text: str) -> int:
        measured.append(len(text))
        return cell_width(text)

    monkeypatch.setattr(terminal, "cell_width", measure)
    text = "→精" * 10_000
    assert (cut_end(text, 10), cut_begin(text, 10)) == ("→精→精→精…", "…→精→精→精")
    assert sum(measured) < 3 * len(text)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("columns", [24, 40])
def test_lines_are_broken_before_the_column_in_which_the_terminal_breaks_them(kind: str, columns: int) -> None:
    name, _ = NAMES[kind]
    text = f"{name} 0.5  " * 12
    quoted = f"{text} '{name} x'"
    lines = {
        "wrapped": wrapped(text, columns),
        "wrapped_message": wrapped_message(quoted, columns),
        "beside": beside(f"{name}  ", text, columns),
    }
    assert {
        kind: max(map(cell_width, shown.splitlines())) <= columns for kind, shown in lines.items()
    } == dict.fromkeys(lines, True)
    assert f"'{name} x'" in lines["wrapped_message"]


def test_a_digest_that_does_not_fit_beside_its_label_is_whole_below_it() -> None:
    digest = f"sha256:{'0' * 64}"
    assert beside("config    ", digest, 80) == f"config\n      {digest}"
    assert beside("config    ", digest, 81) == f"config    {digest}"


def test_records_of_a_narrow_terminal_have_their_values_in_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    header = [name for name, _ in NAMES.values()]
    lines = table(header, [["0.123456789"] * len(header)], right=header).splitlines()
    assert {cell_width(line.partition("0.1")[0]) for line in lines} == {12}


@pytest.mark.parametrize(
    ("noun", "plural"),
    [("step", "steps"), ("batch", "batches"), ("process", "processes"), ("stretch", "stretches"), ("job", "jobs")],
)
def test_a_count_agrees_with_its_noun_and_has_separators(noun: str, plural: str) -> None:
    counts = [format_count(count, noun) for count in (0, 1, 2, 1234)]
    assert counts == [f"0 {plural}", f"1 {noun}", f"2 {plural}", f"1,234 {plural}"]


_NOUNS = (
    "step", "sample", "batche", "run", "checkpoint", "job", "file", "record", "chart", "tensor", "processe", "stretche",
    "byte", "token", "window", "row", "sequence", "document", "worker", "rank", "failure", "attempt", "parameter",
    "layer", "value", "optimizer", "schedule", "machine", "evaluation", "time", "stop", "mapping", "element", "metric",
    "epoch", "number", "task", "mistake", "loader", "dataset", "group", "key", "warning", "node", "column", "block",
)  # fmt: skip
_NOUN = re.compile(rf" (more )?({'|'.join(_NOUNS)})s\b(?!/s)")
_LOGGED = re.compile(rf"%d (more )?({'|'.join(_NOUNS)})s\b(?!/s)")
# Counts that are at least 2, by the condition before them or by what they count; and what is no count.
_SEVERAL = {
    "self._second_ctrl_c()", "token_dtype.name", "LOADING", "COLLATING",
    "len(step.batches)", "len(named)", "len(paths)", "len(chosen)", "len(matches)", "most", "len(winners)",
    "len(rates)", "len(result.rates)", "len(records)", "group.world_size", "world_size", "ranks.world_size",
    "group.data_size", "accumulated", "between", "tensor_size", "processes", "group.machines", "self.num_workers",
    "ranks", "self.world_size", "len(mistakes)", "tasks", "size", "LARGEST_COUNT",
    "_MOST_FILES", "', '.join(map(str, rows[:5]))",
}  # fmt: skip


def test_a_count_in_a_message_is_written_by_format_count() -> None:
    package = Path(trainer_cli.__file__).parent
    bare = []
    for file in sorted(package.rglob("*.py")):
        for text in ast.walk(ast.parse(file.read_text())):
            if isinstance(text, ast.JoinedStr):
                bare += [
                    f"{file.relative_to(package)}:{value.lineno}: {ast.unparse(value.value)}{after.value!s}"
                    for value, after in zip(text.values, text.values[1:], strict=False)
                    if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant)
                    if _NOUN.match(str(after.value)) and ast.unparse(value.value) not in _SEVERAL
                ]
            elif isinstance(text, ast.Call) and text.args and isinstance(text.args[0], ast.Constant):
                found = _LOGGED.search(str(text.args[0].value))
                bare += [f"{file.relative_to(package)}:{text.lineno}: {found[0]}"] if found else []
    assert "\n".join(bare) == ""
