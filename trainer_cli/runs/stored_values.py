"""The values of a config as it is stored: references to other keys are not resolved."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from trainer_cli.bounds import read_yaml


def read_text(config: Mapping[str, Any] | str, key: str) -> str | None:
    """The string at a key of a stored config, or of its text, references resolved; None if it is no string.

    Raises:
        ValueError: it refers to a value that is unknown.
    """
    values = parse_values(config) if isinstance(config, str) else config
    value: Any = values
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(value, str):
        return None
    return resolve_value(values, key) if "${" in value else value


def resolve_value(config: Mapping[str, Any], key: str) -> str:
    """The value of a key that refers to other keys.

    Raises:
        ValueError: it cannot be resolved.
    """
    # Imported here: plain YAML answers for most configs, and OmegaConf takes 0.1 s to import.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return str(OmegaConf.select(OmegaConf.create(dict(config)), key, throw_on_missing=True))
    except (OmegaConfBaseException, RecursionError) as error:
        raise ValueError(str(error).splitlines()[0]) from None


# The end of a run asks for its config several times.
@lru_cache(maxsize=2)
def parse_values(text: bytes | str) -> dict[str, Any]:
    """The values of a stored config, unresolved; empty if it is not a config. Callers do not change them."""
    try:
        config = read_yaml(text.decode() if isinstance(text, bytes) else text)
    except UnicodeDecodeError:
        return {}
    return config if isinstance(config, dict) else {}
