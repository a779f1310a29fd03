"""Write values in Hydra's grammar, as overrides."""

from __future__ import annotations

import re
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString, Transformer

from trainer_cli.config import parse_override


def text_of(value: Any) -> str:
    """A value in Hydra's grammar, quoted only if necessary; different values are written differently."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        # repr gives the shortest text that reads back as the same float; Hydra's grammar has no e+.
        return repr(value).replace("e+", "e")
    if isinstance(value, list):
        return f"[{','.join(map(text_of, value))}]"
    if isinstance(value, dict):
        # The grammar has no quotes for the keys of a mapping.
        items = (f"{Transformer.str(key)}:{text_of(item)}" for key, item in value.items())
        return f"{{{','.join(items)}}}"
    if isinstance(value, str):
        return value if _is_plain(value) else QuotedString(value, Quote.single).with_quotes()
    return str(value)


def _is_plain(text: str) -> bool:
    """Whether Hydra reads a string without quotes as that very string."""
    if not re.fullmatch(r"[\w./:@%+-]+", text):
        return False
    override = parse_override(f"x={text}")
    return override is not None and override.value() == text
