"""scripts/lowest.py reads the lowest versions of what the package needs out of pyproject.toml. The hashes of files are
of the versions that are tested."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("lowest", ROOT / "scripts" / "lowest.py")
assert SPEC is not None
assert SPEC.loader is not None
lowest = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lowest)


def test_the_lowest_version_of_each_requirement_is_pinned() -> None:
    assert lowest.lowest(["a>=1.2,<2", "b-c>=3"]) == ["a==1.2", "b-c==3"]


def test_a_requirement_without_a_lowest_version_is_refused() -> None:
    with pytest.raises(ValueError, match="'a<2' has no lowest version"):
        lowest.lowest(["a<2"])


def test_every_dependency_of_the_package_has_a_lowest_version() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    assert len(lowest.lowest(dependencies)) == len(dependencies) > 0


def test_every_hash_is_of_a_tested_version() -> None:
    def lines(file: str) -> list[str]:
        return [line for line in (ROOT / file).read_text("utf-8").splitlines() if not line.startswith("#")]

    pins = {line.lower().replace("_", "-") for line in lines("constraints.txt")}
    hashes = dict(line.split(" --hash=sha256:") for line in lines("hashes.txt"))
    assert hashes.keys() <= pins
    assert {len(digest) for digest in hashes.values()} == {64}
    # Torch, and loggers and tools that only scripts/services and benchmarks install.
    assert {pin.split("==")[0] for pin in pins - hashes.keys()} == {
        "lm-eval", "mlflow-skinny", "torch", "trackio", "wandb"
    }  # fmt: skip
