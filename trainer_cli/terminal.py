"""Text for people and programs: colours, wrapped lines, tables, HTML, bytes, times, rates and JSON."""

from __future__ import annotations

import html
import io
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, TextIO

COLOURS = {"red": 196, "yellow": 130, "blue": 32, "cyan": 30, "green": 28}
"""Name -> number in the palette of 256 colours, of which each can be read on white and on black.

Not of the 16 first: their yellow, green and cyan cannot be read on white in most palettes.
"""
_CODE = re.compile(r"\x1b\[[\d;]*m")
_CODES = {"dim": "2", "bold": "1"} | {name: f"1;38;5;{number}" for name, number in COLOURS.items()}


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can move its cursor."""
    try:
        # A dumb terminal, such as that of an editor, would show the escape codes as text.
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # The stream is closed.
        return False


def has_colours(stream: TextIO) -> bool:
    """Whether text on the stream may be coloured: on a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def is_utf8(stream: TextIO) -> bool:
    """Whether the stream can show every letter, such as those of lines."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def painted(text: str, colour: str, stream: TextIO) -> str:
    """The text in bold and a colour (red, yellow, blue, cyan, green), or bold or dim, where the stream has colours."""
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if has_colours(stream) else text


LOADING_TORCH = "loading torch …"
_CLEAR_LINE = "\x1b[K"
_status_may_be_shown = True


def show_status(text: str) -> None:
    """Show a text on stderr, if it is a terminal, until `clear_status`."""
    global _status_may_be_shown
    _status_may_be_shown = True
    if is_terminal(sys.stderr):
        # The cursor returns: what is printed meanwhile, such as a message of the interpreter, replaces the text.
        sys.stderr.write(f"{cut_end(text, columns(sys.stderr) - 1)}{_CLEAR_LINE}\r")
        sys.stderr.flush()


def clear_status() -> None:
    """Clear the status before the first message of this process; the status may be that of its parent process."""
    global _status_may_be_shown
    if _status_may_be_shown:
        _status_may_be_shown = False
        if is_terminal(sys.stderr):
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()


def stamp(stream: TextIO, seconds: float | None = None) -> str:
    """Prefix of a log line: date and time (of a unix time, or now), or an empty text on a terminal."""
    return "" if stream.isatty() else time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(seconds))


def columns(stream: TextIO) -> int:
    """Width of the terminal in columns; COLUMNS, or 80, if the stream is not a terminal."""
    try:
        # Some terminals, such as those of CI, report 0.
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return shutil.get_terminal_size((80, 24)).columns


_UNBOUNDED = 100_000
_QUOTED = re.compile(r"(?<!\w)'[^'\n]*'(?!\w)|`[^`\n]*`")
_NARROWEST = 16
"""Columns that a text beside a label has at least."""


def cell_width(text: str) -> int:
    """Columns that a text takes on a terminal: two for a letter of Chinese or an emoji, none for a combining accent and
    the codes of `painted`."""
    if "\x1b" in text:
        text = _CODE.sub("", str(text))
    if text.isascii():
        return str.__len__(text)
    # Imported here: most texts do not need it.
    from rich.cells import cell_len

    return cell_len(str(text))


def padded(text: str, width: int, *, right: bool = False) -> str:
    """The text with spaces behind it up to `width` columns, or in front of it if it is flush `right`."""
    spaces = " " * (width - cell_width(text))
    return f"{spaces}{text}" if right else f"{text}{spaces}"


def cut_end(text: str, width: int) -> str:
    """The text if it fits into `width` columns, else its beginning and an ellipsis."""
    if cell_width(text) <= width:
        return text
    # At first to as many letters as columns: each letter that is taken away measures the rest again.
    text = text[: max(width, 0)]
    while text and cell_width(text) >= width:
        text = text[:-1]
    return f"{text}…" if width > 0 else ""


def cut_begin(text: str, width: int) -> str:
    """The text if it fits into `width` columns, else an ellipsis and its end, in which names of runs differ."""
    if cell_width(text) <= width:
        return text
    text = text[len(text) - min(len(text), max(width, 0)) :]
    while text and cell_width(text) >= width:
        text = text[1:]
    return f"…{text}" if width > 0 else ""


class _Cells(str):
    """A text whose length is the number of columns that it takes on a terminal."""

    __slots__ = ()

    def __len__(self) -> int:
        # NUL stands for a space, see `wrapped_message`.
        return cell_width(self.replace("\0", " "))


class _Wrapper(textwrap.TextWrapper):
    """Breaks lines between words by the columns that words take, and keeps each word whole."""

    def __init__(self, width: int, **settings: Any) -> None:
        super().__init__(width, break_long_words=False, break_on_hyphens=False, **settings)

    def _split(self, text: str) -> list[str]:
        return [_Cells(chunk) for chunk in super()._split(text)]


def line_width(stream: TextIO) -> int:
    """Columns of a terminal; on another stream, whose lines are not broken, a very large number."""
    return columns(stream) if is_terminal(stream) else _UNBOUNDED


def wrapped_message(text: str, width: int) -> str:
    """Like `wrapped`, but what is in quotes, such as a command to copy, is not broken."""
    # NUL in place of spaces, which textwrap takes for a letter of the word.
    joined = _QUOTED.sub(lambda match: match[0].replace(" ", "\0"), text)
    return wrapped(joined, width).replace("\0", " ")


def beside(label: str, text: str, width: int, sign: str = "") -> str:
    """A text to the right of a label, in lines of at most `width` columns; below the label if the terminal is narrow
    or a word fits only there.

    Args:
        sign: the end of the label, with which further lines begin too, such as that of a comment.
    """
    label_width = cell_width(label)
    if not text or label_width + cell_width(text) <= width:
        return f"{label}{text}".rstrip()
    longest = max(map(cell_width, text.split()), default=0)
    # A digest that is only whole below the label is there.
    is_below = width - label_width < _NARROWEST or width - label_width < longest <= width - 6
    indent = " " * (6 if is_below else label_width - len(sign)) + sign
    first = indent if is_below else label
    lines = _Wrapper(width, initial_indent=_Cells(first), subsequent_indent=indent).wrap(text)
    return "\n".join([label.removesuffix(sign).rstrip(), *lines] if is_below else lines)


def wrapped(text: str, width: int, indent: int = 2) -> str:
    """The text with its lines broken between words, before the terminal breaks them inside words.

    A word longer than a line stays whole. A continued line is indented by `indent` spaces more than its first.
    """
    lines = []
    for line in text.split("\n"):
        if len(_Cells(line)) <= width:
            lines.append(line)
            continue
        spaces = line[: len(line) - len(line.lstrip())]
        wrapper = _Wrapper(width, subsequent_indent=spaces + " " * indent, replace_whitespace=False, expand_tabs=False)
        lines += wrapper.wrap(line)
    return "\n".join(lines)


def wrapped_report(text: str, width: int) -> str:
    """Like `wrapped`, for rows of a title and a text. Lines that are commands stay whole, to be copied."""
    return "\n".join(
        line if line.lstrip().startswith("train ") else wrapped(line, width, 14 if line.startswith("  ") else 2)
        for line in text.split("\n")
    )


def with_headings(text: str, stream: TextIO) -> str:
    """The text with its headings bold: lines of words at the margin that end with a colon, and `usage:`."""
    return re.sub(r"^(?:[a-z][a-z ]*:$|usage:)", lambda match: painted(match[0], "bold", stream), text, flags=re.M)


def wrapped_help(text: str, width: int) -> str:
    """A text of help with its paragraphs filled, and its indented lines, such as examples, broken between words.

    What follows a gap in an indented line, such as the comment of an example, moves to a line of its own.
    """
    lines: list[str] = []
    for is_indented, block in groupby(text.split("\n"), key=lambda line: line.startswith(" ") or line.endswith(":")):
        if not is_indented:
            lines += (textwrap.fill(line, width, break_on_hyphens=False) for line in _joined(block))
            continue
        for line in block:
            command, *comment = re.split(r"(?<=\S) {3,}", line, maxsplit=1) if len(line) > width else [line]
            if len(command) > width and command.lstrip().startswith("train "):
                # Continued as a shell reads it, so that it can be copied.
                command = wrapped_message(command, width - len(" \\")).replace("\n", " \\\n")
            lines.append(wrapped(command, width))
            lines += (wrapped(f"{' ' * 6}{words}", width) for words in comment)
    return "\n".join(lines)


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """The paragraphs of lines, each as one line; an empty line ends a paragraph."""
    for is_text, block in groupby(lines, key=bool):
        if is_text:
            yield " ".join(block)
        else:
            yield from block


def format_bytes(count: int) -> str:
    """Bytes with three significant digits, such as `1.23 GB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        # 999.5 would be rounded to 1e+03.
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB" if value < 999.5 else f"{value:,.0f} TB"


def format_age(seconds: float) -> str:
    """Seconds in the largest unit that fits, such as `3 h`."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def format_clock(seconds: float) -> str:
    """Minutes and seconds as `2:05`, or hours, minutes and seconds as `1:02:05`; a clock set back gives `0:00`."""
    # Rounded before the division, or 59.6 s would become 0:60.
    minutes, second = divmod(round(max(seconds, 0)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_count(count: int, noun: str) -> str:
    """A number and its noun, such as `1 step`, `1,234 steps` or `2 processes`."""
    plural = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def format_rate(per_s: float) -> str:
    """A number per second with three digits or more."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


_is_answered = False


def begin_answer() -> None:
    """Note that this command has printed no JSON yet."""
    global _is_answered
    _is_answered = False


def is_answered() -> bool:
    """Whether this command has printed its answer as JSON."""
    return _is_answered


def print_json(value: object) -> None:
    """Print standard JSON: NaN and infinity, which it lacks, become texts."""
    # Imported here: a training prints none.
    from trainer_cli.strict_json import strict_json

    global _is_answered
    _is_answered = True
    # What has no form in JSON is text.
    print(strict_json(value, indent=2, default=str))


_COMFORTABLE = 16
"""Width of a column of text that is read without effort."""
_LONG_WORD = 24
"""Letters of a word, such as a path, that may be broken on a narrow terminal."""


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Iterable[str] = (),
    indent: str = "",
    *,
    least_important: Sequence[str] = (),
    cut: str | None = None,
    colours: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Format rows as text, as wide as the terminal, or as the longest cells if stdout is not a terminal.

    Columns named in `right` are flush right, empty ones are left out. A header whose names are all empty is not shown.
    Where the terminal is too narrow, texts are broken between words, names of columns after a slash, and long words
    anywhere. If that is not enough, each row becomes lines, one for each column.

    Args:
        right: columns that are flush right.
        least_important: columns that a narrow terminal leaves out first, in this order, so that a row is one line.
        cut: the column whose texts are cut at their ends before that, to at least 12 columns.
        colours: text of a cell -> its colour on a terminal.
    """
    # Imported here: rich takes longer to import than most commands take to run.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    has_weight = has_colours(sys.stdout)
    style = "bold" if has_weight else ""
    grid = Table(box=None, show_header=any(header), padding=(0, 2, 0, 0), pad_edge=False, header_style=style)
    shown, width = _filled(header, rows), _table_width(indent)
    if least_important or cut:
        shown, rows = _one_line(header, rows, shown, width, least_important, cut)
    names = [header[column] for column in shown]
    room = width - 2 * (len(shown) - 1)

    def measure(pattern: str) -> list[int]:
        """The width of the longest part of each column, if its texts are divided by a pattern."""
        return [
            max(cell_width(text) for cell in (name, *(row[column] for row in rows)) for text in re.split(pattern, cell))
            for name, column in zip(names, shown, strict=True)
        ]

    def least_widths(least: int, longest_word: int = _UNBOUNDED) -> list[int]:
        """The width of the longest word of each column, at most `longest_word`, and at least `least` of its texts;
        columns of numbers stay whole."""
        return [
            line if header[column] in right else max(min(word, longest_word), min(line, least))
            for column, line, word in zip(shown, measure(r"\n"), measure(r"\s"), strict=True)
        ]

    if sum(least_widths(_COMFORTABLE)) > room:
        names = [name.replace("/", "/\n") for name in names]
    if sum(least_widths(0 if any(header) else _COMFORTABLE, _LONG_WORD)) > room:
        return _as_records(
            [header[column] for column in shown], [[row[column] for column in shown] for row in rows], width, indent
        )
    widths = measure(r"\n")
    for least, longest_word in (
        (_COMFORTABLE, _UNBOUNDED),
        (_COMFORTABLE, _LONG_WORD),
        (0, _UNBOUNDED),
        (0, _LONG_WORD),
    ):
        widths = _shrink(widths, least_widths(least, longest_word), room)
    for name, column, column_width in zip(names, shown, widths, strict=True):
        justify = "right" if header[column] in right else "left"
        grid.add_column(Text(name), justify=justify, overflow="fold", width=column_width)  # type: ignore[arg-type]
    for row in rows:
        # As Text: rich would take brackets in a string for markup.
        cells = [row[column] for column in shown]
        grid.add_row(
            *(Text(cell, f"bold color({COLOURS[colours[cell]]})" if cell in colours else "") for cell in cells)
        )
    out = io.StringIO()
    Console(file=out, width=width, color_system="256" if has_weight else None, force_terminal=has_weight).print(grid)
    return "\n".join(f"{indent}{line}".rstrip() for line in out.getvalue().splitlines())


_SHORTEST_CUT = 12
"""Columns that a text which is cut keeps at least."""


def left_out_of_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], least_important: Sequence[str]
) -> list[str]:
    """The columns that `table` leaves out of these `least_important` ones."""
    shown = _filled(header, rows)
    kept, _ = _one_line(header, rows, shown, _table_width(""), least_important, None)
    return [header[column] for column in shown if column not in kept]


def _filled(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns that are not empty."""
    return [column for column, _ in enumerate(header) if any(row[column] for row in rows)]


def _table_width(indent: str) -> int:
    # A program that reads the output gets each row on one line.
    return shutil.get_terminal_size().columns - len(indent) if sys.stdout.isatty() else _UNBOUNDED


def _one_line(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    shown: Sequence[int],
    width: int,
    least_important: Sequence[str],
    cut: str | None,
) -> tuple[list[int], list[list[str]]]:
    """The columns that fit side by side, and the rows with the texts of one column cut to the room that it has."""
    least = {}
    for column in shown:
        longest = max(cell_width(text) for text in (header[column], *(row[column] for row in rows)))
        least[column] = min(longest, _SHORTEST_CUT) if header[column] == cut else longest
    for name in least_important:
        if sum(least.values()) + 2 * (len(least) - 1) <= width:
            break
        least = {column: size for column, size in least.items() if header[column] != name}
    room = width - sum(size + 2 for column, size in least.items() if header[column] != cut)
    cut_rows = [
        [cut_end(cell, room) if name == cut else cell for name, cell in zip(header, row, strict=True)] for row in rows
    ]
    return list(least), cut_rows


def _as_records(header: Sequence[str], rows: Sequence[Sequence[str]], width: int, indent: str) -> str:
    """Format each row as lines of `column  value`, with an empty line between rows; without a header as a paragraph."""
    label_width = max(map(cell_width, header)) + 2
    if not any(header):
        return "\n".join(wrapped(f"{indent}{'  '.join(filter(None, row))}", width + len(indent), 4) for row in rows)
    records = [
        "\n".join(
            beside(f"{indent}{padded(name, label_width)}", text, width + len(indent)).replace(
                name, painted(name, "dim", sys.stdout), 1
            )
            for name, text in zip(header, row, strict=True)
            if text
        )
        for row in rows
    ]
    return "\n\n".join(records)


def _shrink(widths: list[int], least: Sequence[int], room: int) -> list[int]:
    """Make columns narrower, the widest first, until they fit into the room or have their least widths."""
    widths = list(widths)
    while sum(widths) > room and (above := [column for column, width in enumerate(widths) if width > least[column]]):
        widths[max(above, key=widths.__getitem__)] -= 1
    return widths


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts as HTML, for a notebook."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_metrics(
    header: Sequence[str], rows: Sequence[tuple[Sequence[str], Mapping[str, float]]], digits: int = 6
) -> str:
    """A table of rows of texts and metrics as HTML, with a column for each metric in the order of its first appearance.

    Args:
        header: the names of the columns of texts, which come first.
        digits: significant digits of a metric.
    """
    names = list(dict.fromkeys(name for _, metrics in rows for name in metrics))
    cells = [
        [*texts, *(f"{metrics[name]:.{digits}g}" if name in metrics else "" for name in names)]
        for texts, metrics in rows
    ]
    return html_table([*header, *names], cells)


def format_first(values: Sequence[object], most: int = 8) -> str:
    """The first values, and the number of the others: `a, b and 3 more`."""
    hidden = len(values) - most
    return ", ".join(map(str, values[:most])) + (f" and {hidden} more" if hidden > 0 else "")
