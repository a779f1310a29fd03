"""Hydra, run quietly: no `@hydra.main`, no chdir, no logging, and its one global given back afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra import compose as hydra_compose
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig

from trainer_cli.config import check, locate
from trainer_cli.config.origins import Source, label
from trainer_cli.config.overrides import line_of
from trainer_cli.config.place import Place
from trainer_cli.config.refusals import SCHEMA


def run(place: Place, primary: str, overrides: Sequence[Override]) -> tuple[DictConfig, list[ResultDefault]]:
    """The composed config, and the files it was merged from, in order."""
    lines = [_for_hydra(place, override) for override in overrides]
    ConfigStore.instance().store(SCHEMA, check.plain())
    # hydra.initialize_config_dir takes one folder, and finds a primary config in no other.
    search = create_config_search_path(str(place.dirs[0]))
    for folder in reversed(place.dirs[1:]):
        search.append("train", f"file://{folder}", SearchPathQuery("main", None))
    with _alone():
        version.setbase("1.3")
        Hydra.create_main_hydra2("train", search)
        composed = hydra_compose(primary, lines)
        loader = GlobalHydra.instance().config_loader()
        return composed, loader.compute_defaults_list(primary, lines, RunMode.RUN).defaults


@contextmanager
def _alone() -> Iterator[None]:
    """Hydra's one global, cleared for us and given back to a program that uses it too."""
    held = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = held


def _for_hydra(place: Place, override: Override) -> str:
    """The override in Hydra's words: `group=null` is `~group`, and a mapping in an open section needs `++`."""
    text = line_of(override)
    if override.is_delete():
        return text
    value = override.value()
    if place.is_group(override):
        return "~" + text.lstrip("+").partition("=")[0] if value is None else text
    known_mapping = isinstance(value, dict) and override.key_or_group in check.typed()
    return "++" + text.lstrip("+") if known_mapping else text


def sources(place: Place, defaults: Sequence[ResultDefault]) -> Iterator[Source]:
    """The files of a composition as sources of values."""
    for default in defaults:
        file = locate.find(place.dirs, default.config_path or "")
        if file is not None:
            package = default.package or ""
            path = tuple(package.split(".")) if package not in ("", "_global_") else ()
            yield Source(label(file, place.cwd), file.read_text("utf-8"), path)
