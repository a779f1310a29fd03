"""What files and overrides make of a config is what OmegaConf and Hydra make of it; counts of what that takes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import omegaconf
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from trainer_cli.config import files, hydra_compat
from trainer_cli.config.compose import compose, to_yaml
from trainer_cli.config.merging import MergedConfig
from trainer_cli.config.overrides import read_overrides

NODES: tuple[Any, ...] = (
    None, 1, 0.5, True, "text", "", "???", "${b}", "${b.c}/x", "${none}", [], [1, [2]], ["${b}"], {}, {"c": 1},
    {"c": None}, {"c": "???"}, {"c": {"d": 2}}, {"c": [3]}, {"c": "${b}"}, {1: 2}, {"c": {None: 1}},
)  # fmt: skip
NODES_OF_FILES = NODES[:-2]
"""Without keys that no file may have."""
BELOW = {"b": {"c": {"d": 4}}, "list": [1]}


def made_by_omegaconf(values: list[dict[Any, Any]]) -> Any:
    """What OmegaConf makes of values merged one after another, or its reason."""
    try:
        config = OmegaConf.create(values[0])
        for new in values[1:]:
            config.merge_with(OmegaConf.create(new))
    except (OmegaConfBaseException, TypeError, RecursionError) as error:
        return str(getattr(error, "msg", None) or error).splitlines()[0]
    return OmegaConf.to_container(config)


@pytest.mark.parametrize("old", NODES, ids=repr)
def test_files_merge_as_in_omegaconf(old: Any) -> None:
    for new, last in product(NODES, (None, {"c": {"e": 6}})):
        values = [{**BELOW, "a": old}, {"a": new, "z": new}, {"a": last}]
        before = copy.deepcopy(values)
        config = MergedConfig()
        reason: Any = None
        try:
            reason = next((reason for value in values if (reason := config.merge(value, "")) is not None), None)
        except OmegaConfBaseException as error:
            reason = str(error.msg or error).splitlines()[0]
        assert (reason or config.values) == made_by_omegaconf(values), values
        assert values == before


def test_a_file_is_merged_into_its_package_and_shares_no_value_with_the_config() -> None:
    config, given = MergedConfig(), {"x": {"y": [{"z": 1}]}}
    assert config.merge(given, "a.b") is None
    first = config.values
    assert config.merge({"x": {"w": 2}}, "a.b") is None
    assert first == {"a": {"b": {"x": {"y": [{"z": 1}]}}}}, "values that were read are not changed"
    config.values["a"]["b"]["x"]["y"][0]["z"] = 7
    assert given == {"x": {"y": [{"z": 1}]}}


def test_the_first_values_are_not_changed_by_what_is_added() -> None:
    given = {"x": {"y": [{"z": 1}]}, "w": 1}
    config, before = MergedConfig(given), copy.deepcopy(given)
    assert config.merge({"x": {"y": [{"z": 2}], "v": 3}}, "") is None
    assert all(config.apply(override) is None for override in read_overrides(["x.v=4", "+x.u=5"]).overrides)
    assert config.values == {"x": {"y": [{"z": 2}], "v": 4, "u": 5}, "w": 1}
    assert given == before


LINES = (
    "a=1", "a=null", "a=???", "a=text", "a='${b}'", "a=${b}", "a=[1,{x:2}]", "a={c:7}", "a.c=1", "a.c=null", "a.c.d=2",
    "+a=1", "+a.c=1", "++a.c=2", "++a.x.y=2", "~a", "~a.c", "b.c.d=5", "b.c=5", "list=6", "nope=1", "b.nope=1",
    "list.0=2", "x/y=1",
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_an_override_is_applied_as_by_hydra(line: str) -> None:
    # In struct mode a mapping is merged only by `+`, as hydra_compat.apply_override does.
    first, mapping, last = read_overrides([f"++{line}" if line == "a={c:7}" else line, "++a={c:8}", "a=9"]).overrides
    for old, override in product(NODES_OF_FILES, (mapping, last)):
        values = {**BELOW, "a": old}
        before = copy.deepcopy(values)
        config, expected = MergedConfig(values), OmegaConf.create(values)
        OmegaConf.set_struct(expected, True)
        try:
            refusals = [_is_refused(expected, first), _is_refused(expected, override)]
        except (TypeError, ValueError):
            continue  # A key below a list: override_values refuses it before.
        assert [config.apply(each) is not None for each in (first, override)] == refusals, values
        assert config.values == OmegaConf.to_container(expected), values
        assert values == before


def _is_refused(config: Any, override: Any) -> bool:
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], config)
    except (HydraException, OmegaConfBaseException, RecursionError):
        return True
    return False


CHOICES = ["experiment=digits_mlp", "optimizer=sgd", "scheduler=warmup_cosine"]
VALUES = ["loop.max_duration=3", "optimizer.lr=0.5", "run_dir=x", "loop.eval_interval=null", "notes='a: b'"]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of what composing took most of its time for, from a process that has composed nothing."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str, label: Callable[..., str] = lambda *_: "") -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            calls[label(*args) or name] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    monkeypatch.setattr(hydra_compat, "_listed", {})
    count(hydra_compat, "create_defaults_list")
    count(BaseContainer, "merge_with")
    count(ConfigLoaderImpl, "_apply_overrides_to_config")
    count(omegaconf.AnyNode, "__init__", lambda *_: "nodes")
    count(files, "read_file", lambda path, name: f"read {name}")
    return calls


def test_usual_files_and_overrides_are_merged_without_omegaconf(counts: Counter[str]) -> None:
    compose([*CHOICES, *VALUES])
    assert {name: number for name, number in counts.items() if name.startswith(("merge", "_apply"))} == {}
    assert {number for name, number in counts.items() if name.startswith("read ")} == {1}, "each file once"


def test_the_same_choices_are_made_once_in_a_process(counts: Counter[str]) -> None:
    texts = [to_yaml(compose([*CHOICES, f"seed={seed}"])) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    assert counts["create_defaults_list"] == 1
    before = counts["nodes"]
    compose([*CHOICES, *VALUES])
    # Of interpolations alone; a config has a hundred values.
    assert counts["nodes"] - before < 20
    compose([*CHOICES[:1], *VALUES])
    assert counts["create_defaults_list"] == 2


def chooses(model: str) -> str:
    return f"# @package _global_\ndefaults:\n  - override /model: {model}\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("experiment/small.yaml", chooses("mlp"), id="another option"),
        pytest.param("experiment/small.yaml", chooses("other"), id="an option that does not exist"),
        pytest.param("experiment/small.yaml", "# @package _global_\nseed: 1\n", id="no defaults list"),
        pytest.param("experiment/small.yaml", None, id="no such file"),
        pytest.param("model/cnn.yaml", "# @package data\nchannels: 8\n", id="another package"),
        pytest.param("model/cnn.yaml", "defaults: [mlp, _self_]\n_target_: mine.CNN\n", id="a defaults list"),
        pytest.param("model/cnn.yaml", None, id="no such option"),
        pytest.param("optimizer/adamw.yaml", "defaults: [sgd]\n", id="a file that hides another"),
        pytest.param("config.yaml", "defaults: [train_schema, model: mlp, data: digits]\n", id="another primary"),
    ],
)
def test_choices_are_made_again_where_a_file_differs(
    project: Path, name: str, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def composed() -> str:
        try:
            return to_yaml(compose(["experiment=small"], missing_ok=True))
        except Exception as error:
            return f"{type(error)}: {error}"

    before, file = composed(), project / "configs" / name
    assert before.startswith("name: small")
    if text is None:
        file.unlink()
    else:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    after = composed()
    monkeypatch.setattr(hydra_compat, "_listed", {})
    assert after == composed() != before


def test_a_choice_by_an_environment_variable_is_made_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "configs/experiment/small.yaml").write_text(chooses("${oc.env:MODEL_CHOICE}"))
    found = []
    for name in ("mlp", "cnn", "mlp"):
        monkeypatch.setenv("MODEL_CHOICE", name)
        found.append(to_yaml(compose(["experiment=small"], missing_ok=True)))
    assert found[0] == found[2] != found[1]
