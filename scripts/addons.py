"""Write what the shipped add-ons bring, for type checkers, the docs and the errors about an add-on that is missing.

    python scripts/addons.py

`trainer_cli/addons/shipped.json` has the names of all verbs, public names, parts and configs of each add-on. It stays
when an add-on's folder is deleted, so that an error can name it. `trainer_cli/addons/__init__.pyi` imports the public
names; a type checker takes those of a missing add-on for `Any`. When an add-on was deleted, its page `docs/NAME.md` and
what other pages say of it go too (scripts/prune.py).
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
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "trainer_cli/scaffold/AGENTS.md.tmpl")
TOPS = ("docs", "examples")

from prune import Brings, names_of, prune  # noqa: E402
from trainer_cli.addon import AddOn, each_addon  # noqa: E402
from trainer_cli.parts import CHECKS, CKPT_ACTIONS  # noqa: E402


def _shipped_addons() -> Iterator[tuple[str, AddOn]]:
    """Those of this program, without those of other distributions."""
    return ((name, addon) for name, addon in each_addon() if (FOLDER / name).is_dir())


def _configs_in(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def shipped() -> str:
    """The text of `shipped.json`."""
    brings = {}
    for name, addon in _shipped_addons():
        actions = []
        for verb, part in {"ckpt": CKPT_ACTIONS.name, "check": CHECKS.name}.items():
            module, _, attribute = addon.parts.get(part, "").partition(":")
            actions += [f"{verb} {action}" for action in (getattr(import_module(module), attribute) if module else ())]
        brings[name] = {
            "verbs": [*(verb for verb, entry in addon.verbs.items() if entry.summary), *actions],
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


def deleted() -> Brings:
    """What the add-ons brought that `shipped.json` has, and that were deleted since it was written."""
    brings: Brings = json.loads((FOLDER / "shipped.json").read_text(encoding="utf-8"))
    return {name: each for name, each in brings.items() if not (FOLDER / name).is_dir()}


def prune_pages(gone: Brings) -> dict[Path, str | None]:
    """Each page, and each example, that changes when add-ons go -> its new text, None without any.

    Args:
        gone: what these brought; a page of docs with their name goes with them.
    """
    names, own = names_of(gone), {f"docs/{name}.md" for name in gone}
    files = [*(ROOT / name for name in PAGES), *(path for top in TOPS for path in sorted((ROOT / top).rglob("*.md")))]
    before = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}
    texts, without = dict(before), set[Path]()
    for config in sorted((ROOT / "examples").rglob("*.yaml")):
        if names.search(config.read_text(encoding="utf-8")):
            folder = ROOT / "examples" / config.relative_to(ROOT / "examples").parts[0]
            without |= {path for path in folder.rglob(f"{config.stem}.*") if "__pycache__" not in path.parts}
            page = (folder / "README.md").relative_to(ROOT).as_posix()
            texts[page] = re.sub(rf"(?m)^\| \[{config.stem}\]\(.*\n", "", texts[page])
    pruned = prune(ROOT, texts, own, names, tables="docs/moving/")
    return {
        **{ROOT / path: pruned.get(path) for path in before if pruned.get(path) != before[path]},
        **dict.fromkeys(without),
    }


def prune_claims() -> dict[Path, str]:
    """Each table of claims of other trainers' suites, without the rows whose test was deleted with its add-on."""
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    known = set(re.findall(r"^ *def (test_\w+)", tests, re.MULTILINE))
    found = {}
    for table in sorted((ROOT / "tests/peers").glob("*.md")):
        rows = table.read_text(encoding="utf-8").splitlines(keepends=True)
        tested = (re.match(r"\| `.* \| .* \| `(test_\w+)` \| .* \|$", row) for row in rows)
        found[table] = "".join(row for row, test in zip(rows, tested, strict=True) if not test or test[1] in known)
    return found


FILES = {FOLDER / "shipped.json": shipped, FOLDER / "__init__.pyi": stub}


def main() -> None:
    """Write the files, and with a deleted add-on the pages."""
    gone = deleted()
    for file, text in FILES.items():
        file.write_text(text(), encoding="utf-8")
    if gone:
        for file, remaining in {**prune_pages(gone), **prune_claims()}.items():
            if remaining is None:
                file.unlink()
            else:
                file.write_text(remaining, encoding="utf-8")


if __name__ == "__main__":
    main()
