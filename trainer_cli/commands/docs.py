"""`train docs`: the pages of the documentation of this very version, where they are, and the text of one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer_cli.config.search_path import PACKAGE, shipped_folder
from trainer_cli.errors import UserError
from trainer_cli.terminal import table

EXAMPLES = """examples:
  train docs             the pages, and the folder that they are in
  train docs faq         the text of one, as Markdown

They need no network. `scripts/docs` of the source builds them as a site, with a search and a reference.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the page."""
    parser.add_argument("page", metavar="PAGE", nargs="?", choices=_pages(), help="the name of a page, such as resume")


def run(args: argparse.Namespace) -> int:
    """List the pages, or print one."""
    pages = _pages()
    if not pages:
        raise UserError("this installation has no pages", cure="They are in the folder docs of the source.")
    if args.page is not None:
        sys.stdout.write(pages[args.page].read_text("utf-8"))
        return 0
    titles = [(name, path.read_text("utf-8").partition("\n")[0].lstrip("# ")) for name, path in pages.items()]
    print(table(("page", "title"), titles))
    print(f"\nfolder: {pages['index'].parent}")
    return 0


def _pages() -> dict[str, Path]:
    """The name of each page and its file."""
    folder = shipped_folder(PACKAGE, "docs")
    files = [] if folder is None else sorted([*folder.glob("*.md"), *folder.glob("moving/*.md")])
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files if folder is not None}
