"""A composed config put into a file and taken back as it is, whatever has become of the YAML it came from."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from trainer_cli.config import check, locate
from trainer_cli.config.compose import Composed
from trainer_cli.config.origins import Origins, Source, label
from trainer_cli.config.targets import Trust


def freeze(composed: Composed, run_dir: str) -> str:
    """The config as YAML, with this directory; unresolved, so that `${oc.env:…}` tells no secret."""
    raw = copy(composed.raw)
    raw["run_dir"] = run_dir
    return OmegaConf.to_yaml(raw)


def run_dir_of(composed: Composed) -> str:
    """The run's directory as the config says it, unresolved."""
    return str(check.contents(composed.raw)["run_dir"])


def thaw(file: Path, overrides: Sequence[str], *, config_dir: Path | None = None) -> Composed:
    """The config that `freeze` gave; no other file is read. `overrides` are what it was composed with."""
    text = file.read_text("utf-8")
    frozen = OmegaConf.create(text)
    assert isinstance(frozen, DictConfig)
    raw = check.completed(frozen)
    here = Path.cwd()
    origins = Origins([Source(label(file.resolve(), here), yaml.compose(text, Loader=yaml.SafeLoader))])
    root = locate.project_root(config_dir, here)
    return Composed(check.to_config(raw, origins), raw, list(overrides), root, [], origins, Trust())
