"""Print the lowest versions that pyproject.toml allows of what the package needs, as constraints for pip."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest(requirements: list[str]) -> list[str]:
    """`name>=1.2,<2` as `name==1.2`.

    Raises:
        ValueError: a requirement has no lowest version.
    """
    pins = []
    for requirement in requirements:
        match = re.match(r"([\w.-]+)>=([\w.]+)", requirement)
        if match is None:
            raise ValueError(f"{requirement!r} has no lowest version")
        pins.append(f"{match[1]}=={match[2]}")
    return pins


if __name__ == "__main__":
    print("\n".join(lowest(tomllib.loads(PROJECT.read_text("utf-8"))["project"]["dependencies"])))
