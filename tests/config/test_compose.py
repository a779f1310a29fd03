"""What a composition gives, and what it says of each mistake."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from trainer_cli.config.changes import ABSENT, diff
from trainer_cli.config.check import find_wrong_overrides
from trainer_cli.config.composing import compose, from_yaml
from trainer_cli.config.overrides import read_overrides
from trainer_cli.config.search_path import SearchPath
from trainer_cli.config.tree import Node, fill_defaults
from trainer_cli.errors import ConfigError
from trainer_cli.keys.config_keys import defaults, list_keys
from trainer_cli.schema.sections import Dtype, TrainConfig

Write = Callable[[str, str], Path]


def test_the_default_is_a_small_job(project: Path) -> None:
    config = compose([]).config
    assert isinstance(config, TrainConfig)
    assert (config.name, config.run_dir, config.scheduler) == ("default", "runs/default", None)
    assert config.model == {"_target_": "mine.MLP", "hidden": [64]}
    assert type(config.model) is dict
    assert type(config.model["hidden"]) is list
    assert set(config.loggers) == {"console", "jsonl", "media", "tensorboard"}


@pytest.mark.parametrize("override", ["experiment=small", "+experiment=small"])
def test_an_experiment_changes_the_defaults_and_names_the_run(project: Path, override: str) -> None:
    composed = compose([override, "loop.log_interval=10"])
    config = composed.config
    assert (config.name, config.loop.max_duration, config.loop.log_interval) == ("small", "3ep", 10)
    assert config.model["_target_"] == "mine.CNN"
    assert config.optimizer["lr"] == 0.5
    assert composed.overrides == [override, "loop.log_interval=10"]


def test_a_nested_experiment_names_the_run_by_its_last_part(project: Path) -> None:
    assert compose(["experiment=vision/deep"]).config.name == "deep"
    assert compose(["experiment=vision/deep", "name=other"]).config.run_dir == "runs/other"


def test_every_key_of_the_schema_can_be_overridden_without_a_plus(project: Path) -> None:
    values = {"int": "3", "float": "0.5", "bool": "true"}
    groups = {"model", "data", "optimizer", "scheduler", "callbacks", "loggers"}
    # Values that count as true for `needs(…, (name, True))`.
    true = {
        "enabled": "true", "metric": "val/loss", "ephemeral_save_interval": "1st", "max": "1", "max_checkpoints": "9",
        "folder": "x", "command": "x", "url": "json://x",
    }  # fmt: skip
    alone: list[list[str]] = []
    together: list[str] = []
    for field in (field for field in list_keys() if not field.is_section):
        key, plain = field.key, field.default
        if key in groups:
            off = "null" if key in ("optimizer", "scheduler") else "default"
            value = {"model": "cnn", "data": "digits"}.get(key, off)
        else:
            value = values.get(type(plain).__name__, "null") if plain is not None else "null"
            value = "[]" if isinstance(plain, list) and key != "load.states" else value
            mappings = {
                "param_groups": "{a: {lr: 1.0}}",
                "vars": "{a: 1}",
                "load.key_mapping": "{a.*: *}",
                "checkpoint.keep_by_age": "{1d: 7}",
                "loop.eval_loaders": "{val: {steps: 2}}",
            }
            value = {**mappings, "load.states": "[all]"}.get(key, value)
            if isinstance(plain, str):
                text = str(plain).replace("${name}", "x")
                value = f"'{text}'" if "{" in text else text
        with_it = ["parallel.strategy=fsdp"] if key == "parallel.mixed_precision" else []
        for name, needed in field.rules.get("needs", ())[:1]:
            with_it.append(f"{key.rpartition('.')[0]}.{name}={true[name] if needed is True else needed}")
        if with_it:
            alone.append([*with_it, f"{key}={value}"])
        else:
            together.append(f"{key}={value}")
    assert len(together) > 60
    for overrides in (together, *alone):
        assert compose(overrides).config is not None, overrides


def test_a_group_set_to_null_is_off(project: Path) -> None:
    assert compose(["experiment=small", "scheduler=null"]).config.scheduler is None


def test_choices_become_members(project: Path) -> None:
    assert compose(["precision=bf16"]).config.precision.dtype is Dtype.bf16


def test_a_files_place_and_the_command_line_are_known(project: Path) -> None:
    composed = compose(["experiment=small", "seed=4", "ckpt=x"])
    assert composed.where("loop.max_duration") == "configs/experiment/small.yaml:7"
    assert composed.where("model.channels") == "configs/model/cnn.yaml:3"
    assert composed.where("seed") == composed.where("ckpt") == "command line"
    assert composed.where("deterministic") == "default"


def test_a_named_folder_stands_before_the_projects_and_is_the_root(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "o'ther, [x]" / "conf"
    (other / "model").mkdir(parents=True)
    (other / "model/mlp.yaml").write_text("_target_: other.MLP\n")
    (other.parent / "other.py").write_text("class MLP: ...\n")
    (project / "mine.py").rename(other.parent / "mine.py")
    composed = compose(["experiment=small", "model=mlp"], config_dir=other)
    assert composed.config.model == {"_target_": "other.MLP"}
    assert composed.project_root == other.parent
    assert composed.config_dirs[:2] == [other, project / "configs"]


def test_an_odd_path_as_second_folder_is_searched_too(tmp_path: Path, project: Path) -> None:
    odd = tmp_path / "it's a, [b] = {c}"
    project.rename(odd)
    first = tmp_path / "first"
    (first / "loop").mkdir(parents=True)
    (first / "loop/short.yaml").write_text("max_duration: 1ep\n")
    (odd / "mine.py").rename(tmp_path / "mine.py")
    assert compose([], config_dir=first, cwd=odd).config.model["_target_"] == "mine.MLP"


@pytest.mark.parametrize("place", ["  - _self_\n", ""], ids=["that places itself", "that does not"])
def test_a_users_own_primary_config_can_build_on_ours(project: Path, write: Write, place: str) -> None:
    write("mine.yaml", f"defaults:\n  - config\n{place}seed: 9\n")
    assert compose([], config_name="mine").config.seed == compose([], config_name="mine.yaml").config.seed == 9


def test_folders_that_a_primary_config_adds_are_searched_last(
    project: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lr in (("shared", 1), ("mine", 2)):
        folder = tmp_path / name / "optimizer"
        folder.mkdir(parents=True)
        (folder / "slow.yaml").write_text(f"_target_: mine.SGD\nlr: {lr}\n")
    with (project / "mine.py").open("a") as file:
        file.write("\n\ndef SGD(params, lr): ...\n")
    monkeypatch.setenv("SHARED", str(tmp_path / "shared"))
    search = f"hydra:\n  searchpath: ['${{oc.env:SHARED}}', 'file://{tmp_path / 'mine'}']\n"
    write("wide.yaml", f"defaults:\n  - config\n  - _self_\n{search}")
    assert compose(["optimizer=slow"], config_name="wide").config.optimizer["lr"] == 1


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"loop": {"max_duration": "1ep"}, "model": {"_target_": "a.B", "x": {"y": 1}}},
        {"loop": {"max_duration": "2ep"}, "load": {"states": ["all"]}, "optimizer": None},
        {"checkpoint": {"keep_best": {"metric": "${name}"}}, "loggers": {"a": None}, "seed": 3, "more": [{"a": 1}]},
    ],
)
def test_values_lie_over_the_defaults_as_omegaconf_merges_them(values: dict[str, Any]) -> None:
    merged = OmegaConf.merge(defaults(), values)
    assert fill_defaults(Node.of(values)).plain() == OmegaConf.to_container(merged)


@pytest.mark.parametrize("overrides", [["seed=???"], ["+experiment=small", "loop.max_duration=???"]])
def test_a_value_that_is_still_to_be_given_takes_no_default(project: Path, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match="must be given"):
        compose(overrides)


def test_nothing_is_left_behind(project: Path) -> None:
    before, handlers = sorted(project.rglob("*")), list(logging.getLogger().handlers)
    compose(["experiment=small"])
    assert not GlobalHydra.instance().is_initialized()
    assert sorted(project.rglob("*")) == before
    assert Path.cwd() == project
    assert logging.getLogger().handlers == handlers


def test_a_program_that_uses_hydra_itself_keeps_it(project: Path) -> None:
    from hydra import initialize_config_dir

    with initialize_config_dir(str(project / "configs"), version_base="1.3"):
        held = GlobalHydra.instance().hydra
        compose([])
        assert GlobalHydra.instance().hydra is held
    assert not GlobalHydra.instance().is_initialized()


def test_a_folder_without_experiments_does_not_silently_train_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    place = SearchPath([tmp_path], tmp_path, tmp_path, "config")
    ((_, mistake),) = find_wrong_overrides(place, read_overrides(["experiment=small"]))
    assert str(mistake) == f"there are no experiments: no folder experiment/ in {tmp_path} (command line)."


def test_a_primary_config_without_the_schema_is_reported_how_to_begin(project: Path, write: Write) -> None:
    write("bare.yaml", "foo: 1\n")
    with pytest.raises(ConfigError, match="'- train_schema' first"):
        compose(["seed=1"], config_name="bare")


@pytest.mark.parametrize("key", ["seed", "name", "optimizer.lr", "loop.max_duration", "model.channels"])
def test_a_value_that_a_file_asks_for_is_not_that_of_an_earlier_file(project: Path, write: Write, key: str) -> None:
    section, _, name = key.rpartition(".")
    line = f"{section}: {{{name}: '???'}}" if section else f"{key}: ???"
    write("experiment/asks.yaml", f"# @package _global_\ndefaults:\n  - small\n  - _self_\n{line}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{key} must be given")) as raised:
        compose(["experiment=asks"])
    assert raised.value.source == "configs/experiment/asks.yaml:5"
    assert compose(["experiment=asks", f"{key}=3"])
    assert compose(["experiment=asks"], missing_ok=True)


def test_mandatory_values_may_stand_where_they_are_only_shown(project: Path) -> None:
    composed = compose(["experiment=letters"], missing_ok=True)
    assert "path: ???" in composed.to_yaml()
    assert compose(["experiment=letters", "data.path=x"]).config.data["path"] == "x"


def test_secrets_stay_unresolved_on_disk(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    composed = compose(["+model.token=${oc.env:MY_TOKEN}"])
    assert composed.config.model["token"] == "hunter2"
    assert "hunter2" not in composed.to_yaml()
    assert from_yaml(composed.to_yaml()).config.model["token"] == "hunter2"


def test_a_written_config_comes_back_the_same(project: Path) -> None:
    composed = compose(["experiment=small", "+model.deep.list=[1,{a: 2}]", "param_groups={bias: {lr: 0.1}}"])
    again = from_yaml(composed.to_yaml())
    assert again.config == composed.config
    assert again.to_yaml() == composed.to_yaml()
    assert diff(composed.raw, again.raw) == []


def test_values_change_a_recovered_config_and_groups_replace_a_section(project: Path, write: Write) -> None:
    text = compose(["experiment=small", "+optimizer.maximize=true", "+loop.steps_per_epoch=7"]).to_yaml()
    write("loop/default.yaml", "max_duration: 99ep\n")
    again = from_yaml(text, ["optimizer=sgd", "optimizer.lr=0.25", "seed=3", "+model.new=1"]).config
    assert again.optimizer["_target_"] == "torch.optim.SGD"
    assert again.optimizer["lr"] == 0.25
    assert "maximize" not in again.optimizer
    assert (again.seed, again.name, again.loop.max_duration, again.loop.steps_per_epoch) == (3, "small", "3ep", 7)
    assert again.model == {"_target_": "mine.CNN", "channels": 8, "new": 1}
    assert from_yaml(text, ["scheduler=null"]).config.scheduler is None
    assert from_yaml(text, ["~scheduler"]).config.scheduler is None


def test_an_experiment_replaces_everything_recovered(project: Path) -> None:
    text = compose(["seed=5", "loop.eval_steps=9"]).to_yaml()
    again = from_yaml(text, ["experiment=vision/deep"])
    assert (again.config.seed, again.config.loop.eval_steps, again.config.name) == (7, None, "deep")
    assert again.trust.packages is None


def test_what_belongs_to_one_command_is_not_recovered(project: Path) -> None:
    text = compose(["resume=must", "resume_allow=[seed]", "trust=[evil]"]).to_yaml()
    again = from_yaml(text)
    assert (again.config.resume, again.config.resume_allow, again.config.trust) == ("auto", [], [])
    assert again.trust.packages is not None
    assert "evil" not in again.trust.packages
    assert "good" in (from_yaml(text, ["trust=[good]"]).trust.packages or ())


def test_a_mistake_in_a_recovered_config_is_reported_with_file_and_line(project: Path) -> None:
    file = project / "config.yaml"
    file.write_text("name: x\nloop:\n  max_step: 3\n")
    with pytest.raises(ConfigError, match=r"'loop.max_step' \(config.yaml:3\)"):
        from_yaml(file)
    for text in ("[1, 2]", "defaults: [x]", "hydra: {}", "a: [", "a: ${b"):
        with pytest.raises(ConfigError, match="the recovered config"):
            from_yaml(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        from_yaml(project / "nowhere.yaml")


def test_a_mistake_on_top_of_a_recovered_config_is_reported_too(project: Path) -> None:
    text = compose([]).to_yaml()
    for override in ("loop.max_step=3", "model.hiden=3", "optimizer=adamv", "seed=x"):
        with pytest.raises(ConfigError, match="command line"):
            from_yaml(text, [override])


def test_the_difference_names_keys_and_hides_defaults(project: Path) -> None:
    old = {"name": "default", "seed": 1, "model": {"a": 1, "b": [1]}, "loop": {"max_duration": "1ep"}}
    new = {"name": "default", "seed": True, "model": {"b": [2], "c": {"d": None}}, "scheduler": {"x": 1}}
    changes = {change.key: (change.old, change.new) for change in diff(old, new)}
    assert changes == {
        "seed": (1, True),
        "model.b": ([1], [2]),
        "model.c": (ABSENT, {"d": None}),
        "model.a": (1, ABSENT),
        "scheduler": (None, {"x": 1}),
        "loop.max_duration": ("1ep", "10ep"),
    }
    assert [str(change) for change in diff(old, new)][-1] == "loop.max_duration: 1ep -> 10ep"


def test_the_difference_compares_what_is_written_not_what_it_resolves_to(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    config = {"run_dir": "${oc.env:NOT_THERE}"}
    assert diff(config, config) == []


def test_texts_that_look_like_numbers_or_truths_are_written_and_read_again_as_they_are(project: Path) -> None:
    texts = ["0o14", "014", "1,000", "no", "12:30", "inf", "-.5", "2024-01-02", "1e3", "null", "~", "=", "<<", "a: b"]
    listed = ",".join(f"'{text}'" for text in texts)
    composed = compose([f"trust=[{listed}]", f"+model.words=[{listed}]", "+model.by_number={1:one}"])
    again = from_yaml(composed.to_yaml())
    assert again.config.model["words"] == composed.config.model["words"] == texts
    assert again.config.model["by_number"] == {1: "one"}


def test_a_number_where_a_text_belongs_is_taken_as_it_is_written(project: Path, write: Write) -> None:
    write(
        "experiment/y.yaml", "# @package _global_\nname: 7\ncheckpoint: {suffix: '0x1F'}\nloop: {eval_steps: 1_000}\n"
    )
    composed = compose(["experiment=y", "seed=1_000", "validate.folder='1_0'", "trust=[7]"])
    config = composed.config
    assert (config.name, config.checkpoint.suffix, config.validate.folder, config.trust) == ("7", "0x1F", "1_0", ["7"])
    assert (config.seed, config.loop.eval_steps) == (1000, 1000)
    assert from_yaml(composed.to_yaml()).config.validate.folder == "1_0"


@pytest.mark.parametrize("text", ["nan", "NaN", "inf"])
@pytest.mark.parametrize("in_file", [False, True], ids=["typed", "in a file"])
def test_a_word_that_is_read_as_no_finite_number_is_a_text_where_texts_belong(
    project: Path, write: Write, text: str, in_file: bool
) -> None:
    write("experiment/y.yaml", f"# @package _global_\nname: {text}\ncheckpoint: {{suffix: {text}}}\n")
    composed = compose(["experiment=y"] if in_file else [f"name={text}", f"checkpoint.suffix={text}"])
    assert (composed.config.name, composed.config.checkpoint.suffix) == (text, text)
    assert composed.config.run_dir == f"runs/{text}"
    assert from_yaml(composed.to_yaml()).config.name == text
    with pytest.raises(ConfigError, match="must be finite"):
        compose([f"precision.clip_norm={text}"])


def test_a_quoted_none_is_a_text(project: Path, write: Write) -> None:
    write("experiment/y.yaml", "# @package _global_\nmodel: {mode: 'None'}\n")
    composed = compose(["experiment=y", "name='None'", '+model.other="None"'])
    assert (composed.config.name, composed.config.model["mode"], composed.config.model["other"]) == ("None",) * 3
    assert from_yaml(composed.to_yaml()).config.name == "None"


def test_a_primary_config_that_chooses_no_experiment_leaves_the_choice_to_the_command_line(
    project: Path, write: Write
) -> None:
    own = "defaults:\n  - train_schema\n  - _self_\n  - model: mlp\n  - data: digits\n  - optimizer: adamw\n"
    write("without.yaml", f"{own}  - scheduler: null\n")
    for line in ("experiment: null", "optional experiment: null", "/experiment: ~"):
        write("train.yaml", f"{own}  - {line}\n  - scheduler: null\n")
        for overrides in ([], ["experiment=small"], ["+experiment=small"], ["experiment=[small,vision/deep]"]):
            composed = compose(overrides, config_name="train")
            plain = compose(overrides, config_name="without")
            assert composed.config == plain.config
            assert composed.tree.exact(("name",)) == plain.tree.exact(("name",))
        with pytest.raises(ConfigError, match="experiment is chosen twice"):
            compose(["experiment=small", "experiment=small"], config_name="train")
