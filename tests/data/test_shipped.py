"""The shipped digits and experiments hold what the README and the figures rest on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import trainer_cli.data.datasets as module
from trainer_cli.config.search_path import addon_folders
from trainer_cli.data.datasets import Digits, distort
from trainer_cli.data.random_state import kept_random_state
from trainer_cli.errors import UserError

FILE = Path(module.__file__).with_name("digits.npz")


def test_images_are_grey_levels_from_0_to_1_with_every_digit() -> None:
    digits = Digits(augment=False)
    assert (len(digits.train), len(digits.val)) == (1438, 359)
    for dataset in (digits.train, digits.val):
        images = torch.stack([dataset[index][0] for index in range(len(dataset))])
        assert images.shape[1:] == (1, 8, 8)
        assert images.dtype == torch.float32
        assert (float(images.min()), float(images.max())) == (0.0, 1.0)
        assert {dataset[index][1] for index in range(len(dataset))} == set(range(10))


def test_the_split_is_the_same_whatever_the_training_does() -> None:
    torch.manual_seed(1)
    first = Digits()
    torch.manual_seed(2)
    second = Digits(augment=False)
    assert first.val.fingerprint == second.val.fingerprint
    assert first.train.fingerprint == second.train.fingerprint
    assert first.train.fingerprint != first.val.fingerprint
    assert Digits(seed=1).val.fingerprint != first.val.fingerprint


def test_no_sample_is_both_trained_on_and_held_out() -> None:
    digits = Digits(augment=False)
    with np.load(FILE, allow_pickle=False) as file:
        assert len(digits.train) + len(digits.val) == len(file["images"]) == 1797
        everything = sorted(image.tobytes() for image in file["images"].astype(np.float32) / 16)
    split = [d[i][0].numpy().tobytes() for d in (digits.train, digits.val) for i in range(len(d))]
    assert sorted(split) == everything


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 2.0])
def test_a_split_that_leaves_nothing_is_refused(fraction: float) -> None:
    with pytest.raises(UserError, match="val_fraction"):
        Digits(val_fraction=fraction)


def test_augmented_images_are_moved_and_held_out_ones_never() -> None:
    digits = Digits()
    assert not digits.train.deterministic
    assert digits.val.deterministic
    assert not torch.equal(digits.train[0][0], digits.train[0][0])
    assert torch.equal(digits.val[0][0], digits.val[0][0])


def test_a_moved_image_keeps_its_shape_and_most_of_its_ink() -> None:
    image = Digits(augment=False).train[3][0]
    with kept_random_state():
        torch.manual_seed(0)
        inks = [distort(image) for _ in range(50)]
    assert all(other.shape == image.shape and other.min() >= 0 and other.max() <= 1 for other in inks)
    assert all(0.6 < other.sum() / image.sum() < 1.5 for other in inks)
    assert torch.allclose(distort(image, degrees=0, pixels=0, zoom=0), image, atol=1e-6)


def test_the_file_is_small_and_its_source_and_licence_stand_beside_it() -> None:
    assert FILE.stat().st_size < 100_000
    text = FILE.with_suffix(".txt").read_text()
    assert "CC BY 4.0" in text
    assert "Alpaydin" in text
    assert "Kaynak" in text


# The shipped experiments hold what the README and the figures rest on.


CONFIGS = Path(__file__).parents[2] / "configs"
FILES = {
    path.relative_to(folder).as_posix(): path
    for folder in (CONFIGS, *addon_folders())
    for path in sorted(folder.rglob("*.yaml"))
}


def read(path: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(FILES[path].read_text())
    return content


@pytest.mark.parametrize("name", [path.split("/")[1][:-5] for path in FILES if path.startswith("experiment/")])
def test_an_experiment_is_global_and_described_in_its_first_lines(name: str) -> None:
    lines = FILES[f"experiment/{name}.yaml"].read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# ")
    assert lines[1].endswith(".")


@pytest.mark.parametrize("path", [path for path in FILES if path.startswith(("model/", "data/"))])
def test_a_part_is_described_in_its_first_line_and_names_what_exists(path: str) -> None:
    assert FILES[path].read_text().startswith("# ")
    module, _, attribute = read(path)["_target_"].rpartition(".")
    assert hasattr(__import__(module, fromlist=["_"]), attribute)


@pytest.mark.addon("text")
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
