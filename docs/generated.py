"""Sphinx extension: generates the reference from schema, parsers and docstrings, and the menu from the index.

Generated text is appended to a page when Sphinx reads it, so that the files of the pages stay plain Markdown.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import yaml

import trainer_cli
from trainer_cli.commands.command_line import actions_of, listed_verbs, parser_of
from trainer_cli.config.changes import shown
from trainer_cli.config.search_path import addon_folders
from trainer_cli.keys.config_keys import ConfigKey, list_keys, whole_values
from trainer_cli.trainer import hooks

PACKAGE = Path(trainer_cli.__file__).parent
ROOT = Path(__file__).parents[1]
CONFIGS = next(folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir())
OPTIONS = sorted(
    (path for folder in (CONFIGS, *addon_folders()) for path in folder.glob("*/*.yaml")),
    key=lambda path: (path.parent.name, path.name),
)
"""The files of the shipped options, also of those of add-ons."""


def commands() -> Iterator[str]:
    """The help of every verb, and of its actions."""
    os.environ["COLUMNS"] = "100"
    for verb, entry in listed_verbs().items():
        parser = parser_of(verb, entry)
        yield f"## train {verb}\n\n```text\n{parser.format_help()}```\n"
        for action, inner in actions_of(parser).items():
            yield f"### train {verb} {action}\n\n```text\n{inner.format_help()}```\n"


def config() -> Iterator[str]:
    """Every key with its default and meaning: an object of the site, which its search finds by name."""
    by_section: dict[tuple[str, ...], list[ConfigKey]] = {}
    meanings = {(): "Keys of the config itself."}
    for config_key in list_keys():
        if config_key.is_section:
            meanings[config_key.path] = config_key.meaning
        else:
            by_section.setdefault(config_key.path[:-1], []).append(config_key)
    for section, keys in by_section.items():
        name = ".".join(section)
        yield f"## {f'`{name}`' if name else 'The run'}\n\n{meanings[section]}\n"
        for key in keys:
            may_change = " It may change on a resume." if key.may_change else ""
            yield f"```{{confval}} {key.key}\n{key.meaning} Default: `{shown(key.default)}`.{may_change}\n```\n"
    yield from options({key.key for key in list_keys()})


def options(described: set[str]) -> Iterator[str]:
    """The file of each shipped option, with its keys, except those described already, as objects of the site."""
    yield "## Shipped options\n\n`GROUP=OPTION` on the command line, such as `optimizer=sgd`, selects one of these.\n"
    for path in OPTIONS:
        group, text = path.parent.name, re.sub("# yaml-language-server:.*\n", "", path.read_text(encoding="utf-8"))
        if text.startswith("# @package"):
            continue
        keys = (f"{group}.{'.'.join(key)}" for key, _ in whole_values(yaml.safe_load(text) or {}))
        for key in dict.fromkeys(keys):
            if key not in described and not key.endswith("_target_"):
                described.add(key)
                yield f"```{{confval}} {key}\n:no-typesetting:\n```\n"
        yield f"### `{group}={path.stem}`\n\n```yaml\n{text}```\n"


def hook_list() -> Iterator[str]:
    """The loop in pseudo-code, then every hook."""
    story = inspect.cleandoc(hooks.__doc__ or "").partition("\n\n")[2]
    code = re.sub(
        r"(?m)^((?: {4}.*\n|\n)+)",
        lambda block: f"```text\n{dedent(block[1])}```\n\n",
        story.partition("\n\n")[2],
        count=1,
    )
    yield f"{story.partition(chr(10) * 2)[0]}\n\n{code}\n"
    yield "```{eval-rst}"
    for name in hooks.VOCABULARY:
        yield f".. automethod:: trainer_cli.Callback.{name}"
    yield "```"


def classes() -> Iterator[str]:
    """Every public name of the package, then every component that a shipped config names."""
    yield "## Public names\n\n```{eval-rst}"
    for name in sorted(trainer_cli.__all__, key=str.lower):
        value = getattr(trainer_cli, name)
        kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
        yield f".. auto{kind}:: trainer_cli.{name}"
        if name == "Callback":
            # The hooks have a page of their own.
            yield f"   :exclude-members: {', '.join(hooks.VOCABULARY)}"
    yield "```\n\n## Components of the shipped configs\n\n```{eval-rst}"
    text = "".join(path.read_text("utf-8") for path in OPTIONS)
    public = {getattr(trainer_cli, name) for name in trainer_cli.__all__}
    for target in sorted(set(re.findall(r"_target_: (trainer_cli\.[\w.]+)", text))):
        module, _, name = target.rpartition(".")
        component = getattr(import_module(module), name)
        if component not in public:
            yield f".. auto{'class' if inspect.isclass(component) else 'function'}:: {target}"
    yield "```"


def packages() -> Iterator[str]:
    """The docstring of every package, in the order in which the page on architecture names them, and its names."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    folders = {path.parent for path in PACKAGE.rglob("__init__.py") if path.parents[1] in (PACKAGE, PACKAGE / "addons")}
    names = {f"trainer_cli/{folder.relative_to(PACKAGE)}": folder for folder in folders if folder.name != "addons"}
    for name in sorted(names, key=lambda name: (page.find(f"`{name}`") % len(page), name)):
        package = import_module(name.replace("/", "."))
        yield f"## {name}\n\n{_below(inspect.cleandoc(package.__doc__ or ''))}\n"
        if offered := ", ".join(f"`{each}`" for each in getattr(package, "__all__", ())):
            yield f"Names: {offered}.\n"


def peers() -> Iterator[str]:
    """The tables of tests/peers: claims of other trainers' test suites, the tests here, and what differs."""
    for path in sorted((ROOT / "tests/peers").glob("*.md")):
        yield _below(path.read_text(encoding="utf-8"))


def _below(text: str) -> str:
    """A page with headings one level lower, for use within another page. Comments in blocks of code stay."""
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        block if block.startswith("```") else re.sub("^#", "##", block, flags=re.MULTILINE) for block in blocks
    )


def benchmarks() -> Iterator[str]:
    """BENCHMARKS.md without its title."""
    text = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    yield text.partition("\n")[2].replace("](docs/benchmarks/", "](../benchmarks/")


def reliability() -> Iterator[str]:
    """RELIABILITY.md without its title; links to tests become text."""
    text = (ROOT / "RELIABILITY.md").read_text(encoding="utf-8").partition("\n")[2]
    yield _without_links(text.replace("](docs/", "](../"), to="(?!\\.\\./)")


def _without_links(text: str, to: str) -> str:
    """The text without links whose address begins with this pattern; pictures stay."""
    return re.sub(rf"(?<!!)\[([^\]]+)\]\({to}[^)]*\)", r"\1", text)


def examples() -> Iterator[str]:
    """The page of each example; links to its files become text."""
    for path in sorted((ROOT / "examples").glob("*/README.md")):
        yield _without_links(_below(path.read_text(encoding="utf-8")), to="(?!https?:)")


def llms(pages: Mapping[str, str]) -> str:
    """The text of llms.txt: what the project is, and each page with its address and its description in the index.

    A page without a description in the index is described by its first sentence.
    """
    lines = ["# trainer-cli", "", "> " + _first_sentence(pages["index"]), ""]
    for section in pages["index"].split("\n## ")[1:]:
        lines += [f"## {section.splitlines()[0]}", ""]
        for page in re.findall(r"\]\(([\w/-]+)\.md\)", section):
            title = pages[page].partition("\n")[0].removeprefix("# ")
            description = re.search(rf"^- \[[^\]]+\]\({page}\.md\)[:,] ((?:(?!\]\().)+)$", section, re.MULTILINE)
            lines.append(f"- [{title}]({page}.html): {description[1] if description else _first_sentence(pages[page])}")
        lines.append("")
    return "\n".join(lines)


def _first_sentence(page: str) -> str:
    """The first sentence of a page outside headings, blocks, tables and lists."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    paragraphs = (paragraph for paragraph in text.split("\n\n")[1:] if re.match(r"[`*\[\w]", paragraph.lstrip()))
    first = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(next(paragraphs, "").split()))
    return re.split(r"(?<=[.:])\s(?=[A-Z`])", first)[0]


def menu(index: str) -> Iterator[str]:
    """The pages that the index links to, under its headings, as the site's menu."""
    for section in index.split("\n## ")[1:]:
        pages = re.findall(r"\]\(([\w/-]+)\.md\)", section)
        top = [page for page in pages if not (ROOT / "docs" / page).parent.with_suffix(".md").exists()]
        yield "\n".join(["```{toctree}", ":hidden:", f":caption: {section.splitlines()[0]}", "", *top, "```\n"])


def submenu(page: str, text: str) -> Iterator[str]:
    """The pages of the folder of a page, which stand below it in the menu."""
    if pages := list(dict.fromkeys(re.findall(rf"\]\(({page}/[\w-]+)\.md\)", text))):
        yield "\n".join(["```{toctree}", ":hidden:", "", *pages, "```\n"])


PAGES: Mapping[str, Callable[[], Iterator[str]]] = {
    "reference/benchmarks": benchmarks,
    "reference/commands": commands,
    "reference/config": config,
    "reference/examples": examples,
    "reference/hooks": hook_list,
    "reference/packages": packages,
    "reference/peers": peers,
    "reference/python": classes,
    "reference/reliability": reliability,
}


def add(_app: Any, page: str, source: list[str]) -> None:
    """Append its generated text to a page; called for each page that is read."""
    # The site has no files outside this folder: a link to one is replaced by its text.
    source[0] = _without_links(source[0], to=re.escape("../" * (page.count("/") + 1)))
    if page in PAGES:
        # The names of hundreds of tests would hide the pages that explain a word.
        front = "---\nnosearch: true\n---\n" if page == "reference/peers" else ""
        source[0] = f"{front}{source[0]}\n" + "\n".join(PAGES[page]())
    elif page == "index":
        source[0] += "\n" + "\n".join(menu(source[0]))
    else:
        title, _, rest = source[0].partition("\n")
        source[0] = "\n".join([title, *submenu(page, rest), rest])


def as_rst(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Convert a docstring from Markdown: single backticks become literals, and stars are escaped."""
    parts = re.split(r"(?<!`)`([^`]+)`(?!`)", "\n".join(lines))
    parts[0::2] = [text.replace("*", r"\*") for text in parts[0::2]]
    parts[1::2] = [f"``{' '.join(code.split())}``" for code in parts[1::2]]
    lines[:] = "".join(parts).splitlines()


def write_llms(app: Any, error: Exception | None) -> None:
    """Write llms.txt, a description of each page for programs that read the site (llmstxt.org)."""
    if error is None:
        folder = Path(app.srcdir)
        pages = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.md")}
        texts = {name: path.read_text(encoding="utf-8") for name, path in pages.items()}
        (Path(app.outdir) / "llms.txt").write_text(llms(texts), encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("build-finished", write_llms)
    app.connect("source-read", add)
    app.connect("autodoc-process-docstring", as_rst, priority=100)  # Before napoleon's, which makes rst.
    return {"parallel_read_safe": True}
