"""`train config --diff OTHER` and `--provenance`: what they say of overrides, files, and interpolations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from printed import message

from trainer_cli.commands.main import main
from trainer_cli.config.json_schema import json_schema

Printed = Callable[..., list[str]]


@pytest.fixture
def printed(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> Printed:
    """The lines that `train config` prints in an empty folder."""

    def printed(*arguments: str) -> list[str]:
        assert main(["config", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    return printed


def changes(lines: list[str]) -> dict[str, tuple[str, str]]:
    """Key -> `old -> new`, and what set the new value; from the end of the file's path."""
    rows = (line.partition("  #") for line in lines if not line.startswith("#"))
    return {text.partition(": ")[0]: (text.partition(": ")[2].strip(), by.strip()) for text, _, by in rows}


def test_diff_with_other_overrides_reports_both_and_where_the_new_values_come_from(printed: Printed) -> None:
    lines = printed("experiment=digits", "optimizer.lr=0.5", "--diff=+experiment=digits_mlp seed=7")
    assert lines[:2] == ["# from: +experiment=digits_mlp seed=7", "# to: experiment=digits optimizer.lr=0.5"]
    message = changes(lines)
    assert message["optimizer.lr"] == ("0.003 -> 0.5", "command line: optimizer.lr=0.5")
    assert message["seed"][0] == "7 -> 0"
    assert message["name"] == ("digits_mlp -> digits", "command line: experiment=digits")
    value, by = message["model.channels"]
    assert (value, by.rpartition("/")[2]) == ("(not set) -> [16, 32, 64]", "cnn.yaml:5")
    value, by = message["model.hidden"]
    assert (value, by.rpartition("/")[2]) == ("[128] -> (not set)", "digits.yaml:5: model=cnn")


def test_other_overrides_are_split_as_a_shell_does(printed: Printed) -> None:
    lines = printed("name='a b'", "--diff=\"name='a c'\" ~trust seed=0")
    assert changes(lines)["name"][0] == "a c -> a b"


def test_diff_alone_compares_with_no_overrides(printed: Printed) -> None:
    assert printed("seed=3", "--diff") == [
        "# from: no overrides",
        "# to: seed=3",
        "seed: 0 -> 3  # command line: seed=3",
    ]
    assert printed("--diff") == ["no difference"]
    assert printed("--diff=seed=3")[2].startswith("seed: 3 -> 0")


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
def test_an_override_after_diff_is_one_of_this_config(printed: Printed, words: list[str], seed: int) -> None:
    assert changes(printed(*words)) == {"seed": (f"0 -> {seed}", f"command line: seed={seed}")}


@pytest.mark.parametrize("words", [["--diff", "{}", "seed=3"], ["--diff={}", "seed=3"], ["seed=3", "--diff", "{}"]])
@pytest.mark.parametrize("other", ["old.yaml", "run", "sweep/lr=0.1"])
def test_a_file_or_run_after_diff_is_what_is_compared_with(printed: Printed, words: list[str], other: str) -> None:
    file = Path(other) if other.endswith(".yaml") else Path(other, "config.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("seed: 5\n")
    lines = printed(*(word.format(other) for word in words))
    assert lines[:2] == [f"# from: {file}", "# to: seed=3"]
    assert changes(lines)["seed"] == ("5 -> 3", "command line: seed=3")


def test_an_override_with_an_at_is_no_run_though_a_folder_has_the_name_before_it(
    printed: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert changes(printed("--diff=name=x@latest"))["name"][0] == "x@latest -> default"
    Path("model").mkdir()
    assert main(["config", "--diff=model@other=mlp"]) == 2
    assert "model@other is not in the defaults list" in capsys.readouterr().err


def test_diff_with_a_file(printed: Printed) -> None:
    Path("old.yaml").write_text("seed: 5\nname: x\n")
    assert "# from: old.yaml" in printed("--diff", "old.yaml")


BAD = {
    "digits_mlp": "there is no 'digits_mlp', and it is no list of overrides (--diff). Name a run directory",
    "runs/nothing": "there is no 'runs/nothing'",
    "runs/nothing@latest": "runs/nothing@latest: there is no runs/nothing (--diff). The current folder is empty.",
    "seed='1": 'cannot read "seed=\'1": No closing quotation (--diff)',
    "sed=1": "there is no key 'sed' (command line). Did you mean 'seed'?",
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
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    lines = printed("name=${oc.env:TOKEN}", "seed=3", "model.classes=${seed}", "--provenance")
    # One would lead to the secret by way of the other.
    assert "hunter2" not in "\n".join(lines)
    message = {line.strip().partition(":")[0]: line.partition("  # ")[2] for line in lines}
    assert message["run_dir"] == "default"
    assert message["classes"] == "command line: model.classes=${seed} (3)"
    assert message["style"].endswith("default.yaml:5 (auto)")


def test_provenance_reports_first_which_experiment_was_chosen(printed: Printed) -> None:
    lines = printed("experiment=digits", "model=mlp", "--provenance")
    assert lines[0] == "# command line: experiment=digits"
    (model,) = [line for line in lines if line.startswith("model:")]
    assert model.endswith("# command line: model=mlp")
    (data,) = [line for line in lines if line.startswith("data:")]
    assert data.endswith("experiment/digits.yaml:6: data=digits")


def test_schema_is_printed_as_json(printed: Printed) -> None:
    assert json.loads("\n".join(printed("--schema"))) == json_schema()
