"""Values that come from environment variables: written down as digests, which tell a change and no secret."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer_cli.config import check
from trainer_cli.config.difference import Change
from trainer_cli.config.overrides import KeyPath
from trainer_cli.config.resumable import why_may_change
from trainer_cli.config.walk import whole_values

_RESOLVER = "${oc.env:"
_LINE = "# digests of values from the environment: "


def line_of_digests(raw: DictConfig, salt: str) -> str:
    """A comment to end a frozen config with, which remembers the values from outside; nothing where there are none."""
    found = {".".join(path): digest for path, digest, _ in _digests(raw, salt)}
    return f"{_LINE}{json.dumps(found, ensure_ascii=False)}\n" if found else ""


def changes_outside(frozen: str, raw: DictConfig, salt: str) -> list[Change]:
    """Which of the values that this comment remembers are others now, though what is written of them is the same."""
    before: Any = {}
    for line in frozen.splitlines():
        if line.startswith(_LINE):
            before = json.loads(line.removeprefix(_LINE))
    return [
        Change(path, text, f"{text}, which has another value now")
        for path, digest, text in _digests(raw, salt)
        if before.get(".".join(path), digest) != digest
    ]


def _digests(raw: DictConfig, salt: str) -> Iterator[tuple[KeyPath, str, Any]]:
    """Path, digest and text of each value that an environment variable has a part in, where a change of it matters."""
    for path, text in whole_values(check.contents(raw)):
        if _RESOLVER not in str(text) or why_may_change(".".join(path)) is not None:
            continue
        node: Any = raw
        for name in path:
            node = node[next(key for key in node if str(key) == name)]
        value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        plain = json.dumps([salt, path, value], default=str)
        yield path, hashlib.sha256(plain.encode()).hexdigest()[:16], text
