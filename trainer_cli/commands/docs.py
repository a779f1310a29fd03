"""`train docs`: the pages of the documentation of this very version, where they are, and the text of one."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer_cli.config import shipped_folder
from trainer_cli.errors import UserError
from trainer_cli.patterns import did_you_mean
from trainer_cli.terminal import table

EXAMPLES = """examples:
  train docs             the pages, and the folder that they are in
  train docs faq         the text of one, as Markdown
  train docs patience    the pages that mention a word

They need no network. `scripts/docs` of the source builds them as a site, with a search and a reference.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the page."""
    parser.add_argument(
        "page",
        metavar="PAGE",
        nargs="?",
        help="a page, such as resume; or a word, to list the pages that mention it",
    )


def run(args: argparse.Namespace) -> int:
    """List the pages, or those with a word, or print one."""
    pages = find_pages()
    if not pages:
        raise UserError("this installation has no pages", cure="They are in the folder docs of the source.")
    texts = {name: path.read_text("utf-8") for name, path in pages.items()}
    if args.page in texts:
        sys.stdout.write(texts[args.page])
    elif args.page is None:
        print(table(("page", "title"), [(name, _title(text)) for name, text in texts.items()]))
        print(f"\nfolder: {pages['index'].parent}")
    else:
        _print_mentions(args.page, texts)
    return 0


def _print_mentions(word: str, texts: Mapping[str, str]) -> None:
    """List the pages that mention a word, those that mention it most first.

    Raises:
        UserError: none does.
    """
    pattern = re.compile(re.escape(word), re.IGNORECASE)
    counts = {name: len(pattern.findall(text)) for name, text in texts.items()}
    names = sorted((name for name, count in counts.items() if count), key=lambda name: -counts[name])
    if not names:
        raise UserError(
            f"there is no page '{word}', and none mentions it",
            cure=did_you_mean(word, list(texts)).strip() or "`train docs` lists the pages.",
        )
    rows = []
    for name in names:
        first = next(line for line in texts[name].splitlines() if pattern.search(line))
        rows.append((name, str(counts[name]), _title(texts[name]), first.strip("#|- ")))
    print(f"No page is named '{word}'. These mention it; `train docs PAGE` prints one:\n")
    print(table(("page", "times", "title", "first"), rows, right=["times"], least_important=["title"], cut="first"))


def _title(text: str) -> str:
    """The heading in the first line of a page."""
    return text.partition("\n")[0].lstrip("# ")


def find_pages() -> dict[str, Path]:
    """The name of each page and its file."""
    folder = shipped_folder("docs")
    files = [] if folder is None else sorted(folder.rglob("*.md"))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files if folder is not None}
