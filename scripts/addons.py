"""Write what the shipped add-ons bring, for type checkers, the docs and the errors about an add-on that is missing.

    python scripts/addons.py

`trainer_cli/addons/shipped.json` has the names of all verbs, public names, parts and configs of each add-on. It stays
when an add-on's folder is deleted, so that an error can name it. `trainer_cli/addons/__init__.pyi` imports the public
names; a type checker takes those of a missing add-on for `Any`. From the pages in `docs`, entries that link to a page
that was deleted with its add-on are removed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "trainer_cli" / "addons"
sys.path.insert(0, str(ROOT))

from trainer_cli.addon import AddOn, each_addon  # noqa: E402
from trainer_cli.parts import CKPT_ACTIONS  # noqa: E402


def _shipped_addons() -> Iterator[tuple[str, AddOn]]:
    """Those of this program, without those of other distributions."""
    return ((name, addon) for name, addon in each_addon() if (FOLDER / name).is_dir())


def _configs_in(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def shipped() -> str:
    """The text of `shipped.json`."""
    brings = {}
    for name, addon in _shipped_addons():
        module, _, attribute = addon.parts.get(CKPT_ACTIONS.name, "").partition(":")
        actions = getattr(import_module(module), attribute) if module else ()
        brings[name] = {
            "verbs": [*(verb for verb, entry in addon.verbs.items() if entry.summary), *(f"ckpt {a}" for a in actions)],
            "names": sorted(each for names in addon.names.values() for each in names.split()),
            "parts": sorted(addon.parts),
            "configs": sorted(_configs_in(Path(addon.configs))) if addon.configs is not None else [],
        }
    return json.dumps(brings, indent=1) + "\n"


def stub() -> str:
    """The text of `__init__.pyi`."""

    def imports() -> Iterator[str]:
        for _, addon in _shipped_addons():
            for module, names in addon.names.items():
                for name in names.split():
                    yield f"from {module} import {name} as {name}\n"

    return '"""The public names that add-ons bring. Written by scripts/addons.py."""\n\n' + "".join(sorted(imports()))


ENTRY = re.compile(r"^(?:- .*\n(?:  .*\n)*|\| .*\n|\*\*(?:.+\n)+\n?)", re.MULTILINE)
"""What a page lists: an item, a row of a table, or a question with its answer."""


def prune(page: Path) -> str:
    """The text of a page without the entries that link to a page that was deleted with its add-on."""

    def keep(entry: re.Match[str]) -> str:
        links = re.findall(r"\]\(([\w./-]+\.md)[)#]", entry[0])
        return entry[0] if all((page.parent / link).exists() for link in links) else ""

    return ENTRY.sub(keep, page.read_text(encoding="utf-8"))


FILES = {FOLDER / "shipped.json": shipped, FOLDER / "__init__.pyi": stub}

if __name__ == "__main__":
    for file, text in FILES.items():
        file.write_text(text(), encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        page.write_text(prune(page), encoding="utf-8")
