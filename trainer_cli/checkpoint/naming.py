"""Names of checkpoints, and of folders that are on their way in or out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

MANIFEST_FILE = "manifest.json"
PINNED_FILE = "pinned"
CONFIG_FILE = "config.yaml"

_STEP = re.compile(r"step(0|[1-9][0-9]{0,17})")
_UNFIT = r"/\\\x00-\x1f\x7f\ud800-\udfff"
_PLAIN = re.compile(rf"[^.{_UNFIT}][^{_UNFIT}]{{0,199}}")
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HIDDEN = re.compile(r"\.(tmp|trash|aside)\.(.+)\.([A-Za-z0-9_-]{1,64})\.([0-9]+)(?:-([0-9]+))?")


class Hidden(StrEnum):
    """Why a folder has a hidden name."""

    tmp = "tmp"
    """Being written."""
    trash = "trash"
    """Being removed."""
    aside = "aside"
    """Partial or damaged, and it stood in the way of a save. Never removed by us."""


@dataclass(frozen=True, slots=True)
class HiddenName:
    """The parts of a hidden name: whose it is, and of which checkpoint."""

    kind: Hidden
    name: str
    run_id: str
    attempt: int
    serial: int = 0

    def __str__(self) -> str:
        text = f".{self.kind}.{self.name}.{self.run_id}.{self.attempt}"
        return f"{text}-{self.serial}" if self.serial else text


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step{step}"


def parse_step(name: str) -> int | None:
    """The step that a name says, or None where it is no checkpoint's name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def parse_hidden(name: str) -> HiddenName | None:
    """The parts of a hidden name of ours, or None: such a folder is somebody else's."""
    match = _HIDDEN.fullmatch(name)
    if match is None:
        return None
    kind, plain, run_id, attempt, serial = match.groups()
    return HiddenName(Hidden(kind), plain, run_id, int(attempt), int(serial or 0))


def removed_marker(run_id: str) -> str:
    """What the manifest is called once its folder is condemned: a removal that died is finished from it."""
    return f".removed.{run_id}"


def is_plain(name: str) -> bool:
    """True for a name that is one thing right here: no separator, no leading dot, no control character."""
    return _PLAIN.fullmatch(name) is not None


def is_run_id(text: str) -> bool:
    """True where a run id can be part of a folder's name."""
    return _RUN_ID.fullmatch(text) is not None
