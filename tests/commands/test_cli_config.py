"""`train config` and `train list`: what they print, with the sources of values and the differences to other configs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from printed import message

import trainer_cli
from trainer_cli.commands.command_line import main
from trainer_cli.keys.config_keys import whole_values
from trainer_cli.keys.editor_schema import json_schema
from trainer_cli.schema.sections import LoopConfig, TrainConfig

ConfigLines = Callable[..., list[str]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a model, data and an experiment."""
    files = {
        "model/mlp.yaml": "# A small one.\n_target_: mine.MLP\nhidden: [64]\n",
        "data/digits.yaml": "# Pictures.\n_target_: mine.Digits\npath: ???\n",
        "experiment/odd.yaml": "# @package _global_\n# An odd one.\nloop:\n  max_duration: 3ep\n",
    }
    for name, text in files.items():
        file = tmp_path / "configs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "mine.py").write_text("class MLP:\n    def __init__(self, **settings): ...\nDigits = MLP\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


@pytest.fixture
def config_lines(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> ConfigLines:
    """The lines that `train config` prints in an empty folder."""

    def config_lines(*arguments: str) -> list[str]:
        assert main(["config", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    return config_lines


def test_config_prints_yaml_that_can_be_read_again(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(printed(capsys, "config", "experiment=odd", "seed=3"))
    assert list(config) == [field.name for field in dataclasses.fields(TrainConfig)]
    assert (config["name"], config["seed"], config["loop"]["max_duration"]) == ("odd", 3, "3ep")
    assert config["data"]["path"] == "???"


def test_an_experiment_can_be_named_by_its_name_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for words in (["odd", "seed=3"], ["+experiment=odd", "seed=3"], ["experiment=odd", "seed=3"], ["seed=3", "odd"]):
        assert main(["config", *words]) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1
    assert main(["config", "odd", "odd"]) == 2, "one experiment"
    assert main(["config", "mlp"]) == 2, "an option of another group needs its group"


def test_provenance_names_file_and_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "config", "--provenance", "experiment=odd", "seed=3")
    rows = dict(line.strip().split("  # ") for line in out.splitlines() if "  # " in line)
    rows = {key.strip(): origin for key, origin in rows.items()}
    assert rows["max_duration: 3ep"] == "configs/experiment/odd.yaml:4"
    assert rows["seed: 3"] == "command line: seed=3"
    assert rows["hidden: [64]"] == "configs/model/mlp.yaml:3"
    assert yaml.safe_load(out)["loop"]["max_duration"] == "3ep"


def test_provenance_shows_what_is_set_and_counts_the_defaults(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = dict(whole_values(yaml.safe_load(printed(capsys, "config", "experiment=odd", "seed=3"))))
    *lines, last = printed(capsys, "config", "--provenance", "experiment=odd", "seed=3").splitlines()
    shown = dict(whole_values(yaml.safe_load("\n".join(lines))))
    assert "default" not in {line.partition("  # ")[2] for line in lines}
    assert shown.items() <= whole.items()
    assert last == f"# {len(whole) - len(shown)} of {len(whole)} values are defaults; train config shows them"


def test_fields_reports_every_key_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "config", "--fields")
    assert set(yaml.safe_load(out)) == {field.name for field in dataclasses.fields(TrainConfig)}
    keys = [line for line in out.splitlines() if not line.startswith("#") and not line.endswith(":")]
    assert all("# " in line for line in keys), [line for line in keys if "# " not in line]


def test_fields_of_a_key_are_that_key_and_those_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    loop = printed(capsys, "config", "--fields", "loop")
    assert [line.split(":")[0].strip() for line in loop.splitlines()[1:]] == [
        "loop", *(field.name for field in dataclasses.fields(LoopConfig))
    ]  # fmt: skip
    assert printed(capsys, "config", "--fields", "checkpoint.keep_best.mode").count("\n") == 5
    assert main(["config", "--fields", "lop"]) == 2
    assert message(capsys.readouterr().err) == "there is no key 'lop' (--fields). Did you mean 'loop'?"
    assert main(["config", "--fields", "xyzzy"]) == 2
    assert "The topmost keys are name, run_dir, " in message(capsys.readouterr().err)


def test_list_shows_groups_options_and_descriptions_experiments_first(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, "list")
    assert out.startswith("experiment\n")
    assert "An odd one." in out
    assert "model=mlp" in out
    only = printed(capsys, "list", "optimizer")
    assert [line.split()[0] for line in only.partition("\n\n")[0].splitlines()] == [
        "optimizer",
        "optimizer=adam",
        "optimizer=adamw",
        "optimizer=sgd",
    ]


def test_list_shows_ours_first_and_marked(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for override, listed in (("experiment=odd", ["list"]), ("model=mlp", ["list", "model"])):
        group, _, option = override.partition("=")
        rows = printed(capsys, *listed).partition(f"{group}\n")[2].partition("\n\n")[0].splitlines()
        assert rows[0].split()[:2] == ["*", option if group == "experiment" else override]
        assert [row for row in rows if row.startswith("*")] == rows[:1]


def test_list_of_a_group_reports_the_file_of_each_option(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "list", "model")
    assert "  mlp: configs/model/mlp.yaml\n" in out
    if "GPT" in trainer_cli.__all__:
        assert "  gpt: trainer_cli/addons/text/configs/model/gpt.yaml\n" in out, "the same name in each installation"


def test_list_of_a_section_reports_its_keys_as_they_can_be_set(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, "list", "loop")
    message = [line.split()[0] for line in out.partition("\nkeys\n")[2].splitlines()]
    assert [one.partition("=")[0] for one in message] == [f"loop.{one.name}" for one in dataclasses.fields(LoopConfig)]
    assert printed(capsys, "config", *message)
    assert "\nkeys\n" not in printed(capsys, "list", "model")


def test_list_shows_an_option_without_a_description(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "configs/model/bare.yaml").write_text("_target_: mine.MLP\n")
    assert "\n* model=bare\n" in printed(capsys, "list")


def test_what_lies_about_in_the_folder_of_configs_is_no_option(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "configs/experiment/.#odd.yaml").symlink_to("somebody@somewhere.1234")
    (project / "configs/model/old.yaml").mkdir()
    (project / "configs/.#config.yaml").symlink_to("somebody@somewhere.1234")
    assert "model=old" not in printed(capsys, "list")
    monkeypatch.setenv("TRAIN_COMPLETE_LINE", "train fit experiment=")
    assert ".#odd" not in printed(capsys, "complete", "--answer")
    monkeypatch.setenv("TRAIN_COMPLETE_LINE", "train fit -cn ")
    assert printed(capsys, "complete", "--answer").split() == ["config"]
    assert main(["config", "model=old"]) == 2
    said = message(capsys.readouterr().err)
    assert "there is no model called 'old' (command line). Available: " in said
    assert "Did you mean 'old'?" not in said


def test_a_folder_that_is_a_link_is_a_group_and_its_files_are_options(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "configs/experiment").rename(project / "team")
    (project / "configs/experiment").mkdir()
    (project / "configs/experiment/team").symlink_to("../../team")
    assert "* team/odd  " in printed(capsys, "list")
    assert yaml.safe_load(printed(capsys, "config", "experiment=team/odd"))["loop"]["max_duration"] == "3ep"


def test_every_shipped_option_has_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line for line in printed(capsys, "list").splitlines() if line.startswith("  ")]
    assert all(len(line.split()) > 1 for line in rows), rows


def test_an_unknown_group_is_reported_with_the_nearest(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "optimiser"]) == 2
    assert "Did you mean 'optimizer'?" in capsys.readouterr().err


def test_a_mistake_prints_nothing_on_stdout(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "seed=x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: seed is 'x', but it must be a whole number\n  --> command line\n"


def test_json_holds_what_yaml_and_table_show(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("config", "experiment=odd", "seed=3")
    assert json.loads(printed(capsys, *words, "--json")) == yaml.safe_load(printed(capsys, *words))
    whole = json.loads(printed(capsys, "list", "--json"))
    odd = {
        "option": "odd",
        "description": "An odd one.",
        "file": str(project / "configs/experiment/odd.yaml"),
        "own": True,
    }
    assert odd in whole["experiment"]
    assert json.loads(printed(capsys, "list", "model", "--json")) == {"model": whole["model"]}
    assert "model=mlp" in printed(capsys, "list", "model")


def changes(lines: list[str]) -> dict[str, tuple[str, str]]:
    """Key -> `old -> new`, and what set the new value; from the end of the file's path."""
    rows = (line.partition("  #") for line in lines if not line.startswith("#"))
    return {text.partition(": ")[0]: (text.partition(": ")[2].strip(), by.strip()) for text, _, by in rows}


def test_diff_with_other_overrides_reports_both_and_where_the_new_values_come_from(config_lines: ConfigLines) -> None:
    lines = config_lines("experiment=digits", "optimizer.lr=0.5", "--diff=+experiment=digits_mlp seed=7")
    assert lines[:2] == ["# from: +experiment=digits_mlp seed=7", "# to: experiment=digits optimizer.lr=0.5"]
    message = changes(lines)
    assert message["optimizer.lr"] == ("0.003 -> 0.5", "command line: optimizer.lr=0.5")
    assert message["seed"][0] == "7 -> 0"
    assert message["name"] == ("digits_mlp -> digits", "command line: experiment=digits")
    value, by = message["model.channels"]
    assert (value, by.rpartition("/")[2]) == ("(not set) -> [16, 32, 64]", "cnn.yaml:5")
    value, by = message["model.hidden"]
    assert (value, by.rpartition("/")[2]) == ("[128] -> (not set)", "digits.yaml:5: model=cnn")


def test_other_overrides_are_split_as_a_shell_does(config_lines: ConfigLines) -> None:
    lines = config_lines("name='a b'", "--diff=\"name='a c'\" ~trust seed=0")
    assert changes(lines)["name"][0] == "a c -> a b"


def test_diff_alone_compares_with_no_overrides(config_lines: ConfigLines) -> None:
    assert config_lines("seed=3", "--diff") == [
        "# from: no overrides",
        "# to: seed=3",
        "seed: 0 -> 3  # command line: seed=3",
    ]
    assert config_lines("--diff") == ["no difference"]
    assert config_lines("--diff=seed=3")[2].startswith("seed: 3 -> 0")


@pytest.mark.parametrize(
    ("words", "seed"),
    [
        (["--diff", "seed=3"], 3),
        (["seed=1", "--diff", "seed=3"], 3),
        (["--diff", "seed=3", "seed=4"], 4),
        (["--diff", "~trust", "seed=3"], 3),
        (["--diff", "--config-name", "config", "seed=3"], 3),
    ],
)
def test_an_override_after_diff_is_one_of_this_config(config_lines: ConfigLines, words: list[str], seed: int) -> None:
    assert changes(config_lines(*words)) == {"seed": (f"0 -> {seed}", f"command line: seed={seed}")}


@pytest.mark.parametrize(
    ("words", "other"),
    [
        (["--diff", "{}", "seed=3"], "old.yaml"),
        (["--diff={}", "seed=3"], "run"),
        (["seed=3", "--diff", "{}"], "sweep/lr=0.1"),
    ],
)
def test_a_file_or_run_after_diff_is_what_is_compared_with(
    config_lines: ConfigLines, words: list[str], other: str
) -> None:
    file = Path(other) if other.endswith(".yaml") else Path(other, "config.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("seed: 5\n")
    lines = config_lines(*(word.format(other) for word in words))
    assert lines[:2] == [f"# from: {file}", "# to: seed=3"]
    assert changes(lines)["seed"] == ("5 -> 3", "command line: seed=3")


@pytest.mark.parametrize("words", [["--diff", "a", "b"], ["--diff=a", "b"], ["b", "--diff", "a"]])
def test_two_runs_after_diff_are_compared_with_each_other(config_lines: ConfigLines, words: list[str]) -> None:
    for seed, run in enumerate(("a", "b")):
        Path(run).mkdir()
        Path(run, "config.yaml").write_text(f"seed: {seed}\n")
    lines = config_lines(*words)
    assert lines[:2] == ["# from: a/config.yaml", "# to: b/config.yaml"]
    assert changes(lines) == {"seed": ("0 -> 1", "b/config.yaml:1")}


def test_an_override_with_an_at_is_no_run_though_a_folder_has_the_name_before_it(
    config_lines: ConfigLines, capsys: pytest.CaptureFixture[str]
) -> None:
    assert changes(config_lines("--diff=name=x@latest"))["name"][0] == "x@latest -> default"
    Path("model").mkdir()
    assert main(["config", "--diff=model@other=mlp"]) == 2
    assert "model@other is not in the defaults list" in capsys.readouterr().err


BAD = {
    "nothing": "there is no 'nothing', and it is not a list of overrides (--diff). Name a run directory",
    "runs/nothing": "there is no 'runs/nothing'",
    "runs/nothing@latest": "runs/nothing@latest: there is no runs/nothing (--diff). The current folder is empty.",
    "seed='1": 'cannot read "seed=\'1": No closing quotation (--diff)',
    "sed=1": "there is no key 'sed' (command line). Did you mean 'seed=1'?",
    ".": ". is neither a run directory nor a checkpoint (--diff). Name a run directory",
}


@pytest.mark.parametrize("other", BAD)
def test_what_cannot_be_compared_with_is_reported(
    other: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", f"--diff={other}"]) in (2, 3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert BAD[other] in message(captured.err)


def test_an_interpolation_is_shown_with_what_it_comes_to_and_a_secret_is_not(
    config_lines: ConfigLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    lines = config_lines("name=${oc.env:TOKEN}", "seed=3", "model.classes=${seed}", "--provenance")
    # One would lead to the secret by way of the other.
    assert "hunter2" not in "\n".join(lines)
    message = {line.strip().partition(":")[0]: line.partition("  # ")[2] for line in lines}
    assert "run_dir" not in message
    assert message["classes"] == "command line: model.classes=${seed} (3)"
    assert message["style"].endswith("default.yaml:5 (auto)")


def test_provenance_reports_first_which_experiment_was_chosen(config_lines: ConfigLines) -> None:
    lines = config_lines("experiment=digits", "model=mlp", "--provenance")
    assert lines[0] == "# command line: experiment=digits"
    (model,) = [line for line in lines if line.startswith("model:")]
    assert model.endswith("# command line: model=mlp")
    (data,) = [line for line in lines if line.startswith("data:")]
    assert data.endswith("experiment/digits.yaml:6: data=digits")


def test_schema_is_printed_as_json(config_lines: ConfigLines) -> None:
    assert json.loads("\n".join(config_lines("--schema"))) == json_schema()
