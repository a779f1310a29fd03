"""`${now:…}` has one value for a run, and the functions of configs/resolvers.py are known wherever its config is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainer_cli.config.changes import changed_env_values, diff, line_of_digests
from trainer_cli.config.composing import Composed, compose, from_yaml
from trainer_cli.config.resolvers import TIME_VARIABLE, share_time
from trainer_cli.errors import ConfigError

Write = Callable[[str, str], Path]
RESOLVERS = "def mul(a, b):\n    return a * b\n"
LINES = ["+experiment=small", 'optimizer.lr="${mul:${seed},0.5}"', "seed=3"]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda time: monkeypatch.setenv(TIME_VARIABLE, f"2031-04-05T{time}")


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("name='x-${now:%H-%M}'", "name", "x-06-07"),
        ("run_dir='runs/${now:%Y-%m-%d}/${name}'", "run_dir", "runs/2031-04-05/small"),
        ("seed='${now:%Y}'", "seed", 2031),
        ("+model.day='${now:%d}'", "model", {"_target_": "mine.CNN", "channels": 8, "day": "05"}),
        ("+model.days='[a,\"${now:%d}\"]'", "model", {"_target_": "mine.CNN", "channels": 8, "days": ["a", "05"]}),
    ],
)
def test_the_time_is_resolved_once_into_the_config(
    project: Path, at: Callable[[str], None], line: str, key: str, expected: Any
) -> None:
    at("06:07:08")
    composed = compose(["+experiment=small", line.replace("'[", "[").replace("]'", "]")])
    assert getattr(composed.config, key) == expected
    assert "now" not in composed.to_yaml()
    at("16:17:18")
    for trusted in (True, False):
        recovered = from_yaml(composed.to_yaml(), trusted=trusted)
        assert getattr(recovered.config, key) == expected
        assert diff(recovered.raw, composed.raw) == []


def test_the_same_command_at_another_time_shows_what_changed(project: Path, at: Callable[[str], None]) -> None:
    at("06:07:08")
    before = compose(["+experiment=small", "seed='${now:%S}0'"])
    at("06:07:09")
    after = compose(["+experiment=small", "seed='${now:%S}0'"])
    assert [str(change) for change in diff(before.raw, after.raw)] == ["seed: 80 -> 90"]


def test_a_format_that_is_an_interpolation_is_refused_by_name(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"name: the format in \$\{now:\$\{run_dir\}\} is an interpolation itself"):
        compose(["+experiment=small", "name='${now:${run_dir}}'"])


def test_a_command_and_what_it_starts_have_one_time(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TIME_VARIABLE, raising=False)
    with share_time():
        first, second = (compose(["+experiment=small", "name='${now:%f}'"]).config.name for _ in range(2))
        assert first == second
    assert compose(["+experiment=small", "name='${now:%f}'"]).config.name != first


def test_a_projects_resolvers_are_known_wherever_its_config_is(project: Path, write: Write, tmp_path: Path) -> None:
    write("resolvers.py", RESOLVERS)
    composed = compose(LINES)
    assert composed.config.optimizer["lr"] == 1.5
    assert "lr: ${mul:${seed},0.5}" in composed.to_yaml()
    assert from_yaml(composed.to_yaml(), ["seed=5"]).config.optimizer["lr"] == 2.5
    frozen = tmp_path / "frozen.yaml"
    frozen.write_text(composed.freeze("below"))
    assert Composed.thaw(frozen, []).config.optimizer["lr"] == 1.5
    jobs = pytest.importorskip("trainer_cli.addons.jobs.sweep").plan_jobs([*LINES[:2], "seed=1,2"])
    assert [from_yaml(job.frozen).config.optimizer["lr"] for job in jobs] == [0.5, 1.0]


def test_the_file_of_the_folder_that_is_named_counts(project: Path, write: Write, tmp_path: Path) -> None:
    write("resolvers.py", RESOLVERS)
    other = tmp_path / "other/configs"
    (other / "model").mkdir(parents=True)
    (other / "model/x.yaml").write_text("_target_: mine.Net\n")
    (other / "resolvers.py").write_text("def mul(a, b):\n    return 10 * a * b\n")
    assert compose(LINES, config_dir=other, sections=()).config.optimizer["lr"] == 15
    assert compose(LINES).config.optimizer["lr"] == 1.5


def test_another_project_does_not_know_them(
    project: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("resolvers.py", RESOLVERS)
    text = compose(LINES).to_yaml()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(
        ConfigError, match=r"asks for 'mul', which is not a resolver.* 'def mul\(…\)' in configs/resolv"
    ):
        from_yaml(text, trusted=True)


def test_a_value_that_a_resolver_changed_is_noticed(project: Path, write: Write) -> None:
    write("resolvers.py", RESOLVERS)
    before = compose(LINES)
    frozen = before.to_yaml() + line_of_digests(before.raw, "salt")
    assert changed_env_values(frozen, compose(LINES).raw, "salt") == []
    write("resolvers.py", "def mul(a, b):\n    return a + b\n")
    assert [change.key for change in changed_env_values(frozen, compose(LINES).raw, "salt")] == ["optimizer.lr"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from omegaconf import OmegaConf\nOmegaConf.register_new_resolver('eval', eval)\n",
         "configs/resolvers.py registers eval by OmegaConf.register_new_resolver (configs/resolvers.py). Define a "
         "function instead: def eval(…)."),
        ("import os\n\ndef mul(a, b):\n    return a * b\n\nos.nothing\n",
         "configs/resolvers.py fails: AttributeError: module 'os' has no attribute 'nothing' "
         "(configs/resolvers.py:6)."),
        ("def mul(a b):\n", "configs/resolvers.py fails: SyntaxError: invalid syntax"),
        ("def now(a):\n    return 1\n", "configs/resolvers.py defines 'now', which is a resolver already"),
        ("from operator import mul\n_mul = eval\n", "optimizer.lr: ${mul:${seed},0.5} asks for 'mul'"),
        ("def mul(a, b):\n    return a / 0\n", "${mul:${seed},0.5} fails: ZeroDivisionError: division by zero"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_resolvers_is_one_message(project: Path, write: Write, text: str, said: str) -> None:
    write("resolvers.py", text)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            compose(LINES)
        assert said in str(caught.value)
    assert not OmegaConf.has_resolver("eval")
