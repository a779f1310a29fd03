"""Takes out of pages what a deleted add-on brought; `scripts/addons.py` does it to all of them.

A page consists of blocks: headings, paragraphs, items, rows of a table, code. A block that names what is gone goes; of
code only the commands or entries that do. An item, a row or an answer that links to what is gone goes too; another link
to it becomes its text. With a heading, or with the first sentence or code below it, goes its section, and with those of
a title the page.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Brings = Mapping[str, Mapping[str, Sequence[str]]]
"""Add-on -> what it brings, as in `shipped.json`."""
NOTHING = "no: it was in an add-on that is deleted"
"""What a table of equivalents says where all is gone: its rows stay."""

_BLOCK = re.compile(
    r"(?P<code>```.*\n(?:.*\n)*?```\n)|(?P<heading>#+ .*\n)|(?P<row>\|.*\n)|(?P<item>(?:- |\d+\. ).*\n(?:  .*\n)*)"
    r"|(?P<gap>\n+)|(?P<paragraph>(?:(?!```|#+ |\||- |\d+\. ).+\n)+)"
)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<page>[\w./-]+\.md)?(?:#(?P<anchor>[\w-]+))?\)")
_ASIDE = re.compile(rf"(?:(?<=,)\s|\s(?=\())(?P<bracket>\()?{_LINK.pattern}(?(bracket)\)|,)")
"""A link in brackets, or one of several between commas."""
_COMMAND = re.compile(r"(?:.*\\\n)*.*\n")
_ENTRY = re.compile(r"(?:  #.*\n)*  (?!_target_)\S.*\n(?:   .*\n)*|.*\n")
"""One of a section of a config."""
_WIDTH = 120
_WHOLE = re.compile(r"(?:.*\n)+")
_PARTS = {"sh": _COMMAND, "yaml": _ENTRY}


def names_of(brings: Brings) -> re.Pattern[str]:
    """Finds what add-ons bring in a page: commands, classes, values of settings, and their own files."""

    settings = [re.split(r"[./]", each) for addon in brings.values() for each in (*addon["configs"], *addon["parts"])]
    """A part such as format.archive is a value of a setting, as a config such as loggers/wandb is."""

    def any_of(names: Iterable[str]) -> str:
        return f"(?:{'|'.join(map(re.escape, names)) or '(?!)'})"

    def options(group: str) -> str:
        return any_of(option for of_group, *_, option in settings if of_group == group)

    verbs = any_of(verb for addon in brings.values() for verb in addon["verbs"])
    names = any_of(name for addon in brings.values() for name in addon["names"])
    return re.compile(
        rf"(?:`|^ *|[;&|(] *|'|-m )train(?:er_cli)? (?:{verbs}|(?:fit|plan|config) {options('experiment')})(?![\w-])"
        rf"|\btrainer_cli\.{names}\b|`{names}[`(]|\bimport .*\b{names}\b"
        + "".join(
            rf"|\b{group}(?:=(?:\[[\w,]*\b)?{options(group)}(?![\w-])|\.{options(group)}\.)|/{group}: {options(group)}$"
            for group in sorted({group for group, *_ in settings})
        )
        + rf"|^\| `{any_of(option for *_, option in settings)}` \|"
        rf"|(?:trainer_cli[./]|`)addons[./]{any_of(brings)}\b",
        re.MULTILINE,
    )


def prune(
    root: Path, pages: Mapping[str, str], own: Collection[str], gone: re.Pattern[str], tables: str
) -> dict[str, str]:
    """What remains of pages, by path, without what is gone, and without links to what goes with that.

    Args:
        root: where the paths begin.
        pages: path of a page -> its text.
        own: the paths of those that are gone.
        gone: finds what else is gone.
        tables: the folder of the pages with tables of equivalents.
    """
    left = {path: text for path, text in pages.items() if path not in own}
    while True:
        anchors = {path: _anchors(left[path]) if path in left else None for path in pages}
        found = {
            path: _Page(root, path, text, gone, anchors, path.startswith(tables)).prune() for path, text in left.items()
        }
        pruned = {path: text for path, text in found.items() if text}
        if pruned == left:
            return pruned
        left = pruned


def _anchors(text: str) -> set[str]:
    titles = (match["heading"].lstrip("#").strip() for match in _BLOCK.finditer(text) if match["heading"])
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _wrapped(text: str, indent: bool) -> str:
    lines = textwrap.wrap(
        " ".join(text.split()),
        _WIDTH,
        subsequent_indent="  " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) + "\n"


@dataclass
class _Group:
    """A block, or the items of a list, or the rows of a table, and the empty lines after it."""

    kind: str
    old: list[str]
    gap: str = ""
    new: list[str] = field(default_factory=list)

    @property
    def level(self) -> int:
        """Of a heading."""
        return self.old[0].index(" ") if self.kind == "heading" else 9


def _groups(text: str) -> list[_Group]:
    groups: list[_Group] = []
    for match in _BLOCK.finditer(text):
        kind = str(match.lastgroup)
        if kind == "gap":
            groups[-1].gap = match[0]
        elif kind in ("item", "row") and groups and groups[-1].kind == kind and not groups[-1].gap:
            groups[-1].old.append(match[0])
        else:
            groups.append(_Group(kind, [match[0]]))
    return groups


@dataclass
class _Page:
    root: Path
    path: str
    text: str
    gone: re.Pattern[str]
    anchors: Mapping[str, set[str] | None]
    """Of each page, None of one that is gone."""
    keeps_rows: bool

    def prune(self) -> str:
        groups = list(self._without_sections(_groups(self.text)))
        for number, group in enumerate(groups):
            group.new = [new for block in group.old if (new := self._without_names(group.kind, block))]
            if group.kind == "row" and len(group.new) == 2 < len(group.old):
                group.new = []
            before = groups[number - 1]
            # What commands print, if one of them is gone.
            if group.old[0].startswith("```text") and before.kind == "code" and before.new != before.old:
                group.new = []
            # The words before it.
            if not group.new and before.kind == "paragraph" and before.old[0].endswith(":\n"):
                before.new = []
        kept: list[_Group] = []
        for number, group in enumerate(groups):
            below = groups[number + 1 :]
            until = next((n for n, each in enumerate(below) if each.level <= group.level), len(below))
            is_empty = (
                group.kind == "heading"
                and until > 0
                and not any(each.new for each in below[:until] if each.kind != "heading")
            )
            if group.new and not is_empty:
                kept.append(group)
            elif kept and not kept[-1].gap:
                kept[-1].gap = group.gap
        return "".join("".join(group.new) + group.gap for group in kept).rstrip("\n") + "\n" if kept else ""

    def _without_sections(self, groups: list[_Group]) -> Iterator[_Group]:
        """Those outside sections about what is gone."""
        within = 9
        for group, below in zip(groups, [*groups[1:], None], strict=True):
            if group.level <= within < 9:
                within = 9
            if group.kind == "heading" and within == 9:
                about = group.old[0]
                if below and below.kind == "paragraph" and not below.old[0].startswith("**"):
                    about += re.split(r"(?<=[.:])\s(?=[A-Z`])", below.old[0])[0]
                elif below and below.kind == "code":
                    about += "" if self._without_names("code", below.old[0]) else below.old[0]
                if self.gone.search(about):
                    within = group.level
            if within == 9:
                yield group

    def _without_names(self, kind: str, block: str) -> str:
        """What remains of a block."""
        if kind == "code":
            return self._without_parts(block)
        if kind == "row" and self.keeps_rows:
            return self._without_equivalents(block)
        has_links = any(map(self._is_gone, _LINK.finditer(block)))
        is_entry = kind in ("item", "row") or block.startswith("**")
        if self.gone.search(block) or (has_links and is_entry):
            return ""
        left = _ASIDE.sub(lambda match: "" if self._is_gone(match) else match[0], block)
        left = _LINK.sub(lambda match: match["text"] if self._is_gone(match) else match[0], left)
        is_long = left != block and max(map(len, left.splitlines())) > _WIDTH
        return _wrapped(left, indent=kind == "item") if is_long else left

    def _without_parts(self, block: str) -> str:
        """Code without the commands or entries that name what is gone; nothing, if the rest is no code."""
        if not self.gone.search(block):
            return block
        part = _PARTS.get(block[3 : block.index("\n")], _WHOLE)
        parts = [(each, self.gone.search(each) is not None) for each in part.findall(block)]
        left = "".join(each for each, is_gone in parts if not is_gone)
        # A mapping without one of its lines, or a section without entries, is another config.
        is_cut = part is _ENTRY and any(is_gone and not re.match("  (?!_target_)", each) for each, is_gone in parts)
        is_empty = not re.search(r"^[^#`\n]", left, re.MULTILINE) or re.search(r"^\w+:\n(?! )", left, re.MULTILINE)
        return "" if is_cut or is_empty else left

    def _without_equivalents(self, row: str) -> str:
        """A row without those that are gone of its second cell."""
        if not self.gone.search(row):
            return row
        theirs, ours = re.findall(r"(?<=\| )\S.*?(?= \|)", row)
        kept = [each for each in re.split(r"; |, (?:or )?(?![^(]*\))", ours) if not self.gone.search(each)]
        return f"| {theirs} | {'; '.join(kept) if '`' in ''.join(kept) else NOTHING} |\n"

    def _is_gone(self, link: re.Match[str]) -> bool:
        """Whether the page or the heading of a link is missing; those that are no pages of these are not asked for."""
        page = os.path.normpath(os.path.join(os.path.dirname(self.path), link["page"])) if link["page"] else self.path
        if page not in self.anchors:
            return bool(link["page"]) and not (self.root / page).exists()
        anchors = self.anchors[page]
        return anchors is None or (bool(link["anchor"]) and link["anchor"] not in anchors)
