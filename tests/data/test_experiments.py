"""The shipped experiments hold what the README and the figures rest on."""

from pathlib import Path
from typing import Any

import pytest
import yaml

CONFIGS = Path(__file__).parents[2] / "configs"


def read(path: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((CONFIGS / path).read_text())
    return content


@pytest.mark.parametrize("name", ["digits", "digits_mlp", "text", "char_gpt"])
def test_an_experiment_is_global_and_described_in_its_first_lines(name: str) -> None:
    lines = (CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# ")
    assert lines[1].endswith(".")


@pytest.mark.parametrize("path", sorted(path for group in ("model", "data") for path in (CONFIGS / group).glob("*")))
def test_a_part_is_described_in_its_first_line_and_names_what_exists(path: Path) -> None:
    assert path.read_text().startswith("# ")
    module, _, attribute = read(str(path))["_target_"].rpartition(".")
    assert hasattr(__import__(module, fromlist=["_"]), attribute)


def test_char_gpt_has_nanogpts_cpu_settings() -> None:
    experiment = read("experiment/char_gpt.yaml")
    assert experiment["model"] == {"layers": 4, "heads": 4, "width": 128, "dropout": 0.0, "bias": False}
    data = {**read("data/characters.yaml"), **experiment["data"]}
    assert (data["path"], data["unit"]) == ("???", "characters")
    assert (data["context"], data["val_fraction"], data["batch_size"]) == (64, 0.1, 12)
    assert experiment["optimizer"] == {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}
    assert experiment["scheduler"] == {"warmup": 100, "min_ratio": 0.1}
    assert experiment["precision"] == {"clip_norm": 1.0}
    assert experiment["loop"]["max_duration"] == "2000st"
    assert experiment["loop"]["eval_interval"] == experiment["checkpoint"]["save_interval"] == "500st"
