"""The words of other trainers: what each is written as here composes, and is what the command line suggests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from command import ROOT

from trainer_cli.config.composing import compose
from trainer_cli.elsewhere import _ELSEWHERE, _SETTINGS, translate_setting
from trainer_cli.errors import ConfigError
from trainer_cli.keys.config_keys import OPEN, list_keys, unknown_key, why_refused

VALUES = {
    "checkpoint.keep_best.metric": "val/loss",
    "checkpoint.keep_best.mode": "min",
    "compile.mode": "max-autotune",
    "device": "cpu",
    "loggers": "csv",
    "logging.level": "debug",
    "loop.eval_at_start": "true",
    "model": "cnn",
    "optimizer": "adam",
    "parallel.find_unused_parameters": "true",
    "scheduler": "warmup_linear",
}
"""Key -> a value for its `{}`; 2 for others."""
GROUPS = ["scheduler=warmup_cosine", "loop.max_duration=9000", "checkpoint.keep_best.metric=val/loss"]
SETTINGS = [ours for ours in _ELSEWHERE if "=" in ours and not ours.endswith(".")]


def list_with_marks(settings: Iterable[str]) -> list[Any]:
    """Each, skipped if its add-on was deleted."""
    trackers = re.compile("wandb|mlflow")
    return [
        pytest.param(one, marks=[pytest.mark.addon("trackers")] if trackers.search(one) else []) for one in settings
    ]


@pytest.mark.parametrize("ours", list_with_marks(one for ours in SETTINGS for one in ours.split(" | ")))
def test_what_a_word_is_written_as_here_composes(ours: str) -> None:
    key = ours.rpartition(" ")[2].partition("=")[0]
    filled = ours.replace("cuda:{}", "cuda:2").replace("{}", VALUES.get(key, "2")).replace("=N", "=2")
    compose([*GROUPS, *([ours] if ours.startswith("+") else filled.split(" "))])


@pytest.mark.parametrize("theirs", [word for words in _ELSEWHERE.values() for word in words.split() if "=" in word])
def test_a_word_with_a_value_is_found_whatever_its_case(theirs: str) -> None:
    name, _, glob = theirs.partition("=")
    value = glob.replace("[[]", "[").replace("[1-9]", "3").replace("[0-9]", "3").replace("*", "x").upper()
    assert fnmatchcase(value.lower(), glob)
    assert translate_setting(name.upper().replace("_", "-"), value) is not None


def test_no_word_that_is_a_key_here_is_taken_for_one_of_others() -> None:
    words = [word for ours, words in _ELSEWHERE.items() if not ours.isidentifier() for word in words.split()]
    keys = [word for word in words if "=" not in word and unknown_key(tuple(word.split("."))) is None]
    # Any key may be below an open section.
    assert [word for word in keys if word.partition(".")[0] not in OPEN] == []


@pytest.mark.parametrize("word", ["fast_dev_run", "overwrite", "ema", "early_stopping", "mlflow", "deepspeed"])
def test_what_others_switch_off_is_left_out(word: str) -> None:
    assert translate_setting(word, "False") == "It is off by default: leave it out."
    assert "=" in (translate_setting(word, "true") or "")


@pytest.mark.parametrize("page", ["lightning", "huggingface"])
def test_the_pages_on_moving_name_the_same_keys(page: str) -> None:
    table = (ROOT / f"docs/moving/{page}.md").read_text("utf-8")
    compared = 0
    for theirs, ours in re.findall(r"^\| (`.*?) \| (.*`[\w.+]+=.*) \|$", table, re.MULTILINE):
        for name in set(re.findall(r"`(\w+)`", theirs)).difference(OPEN):
            settings = [one for _, one in _SETTINGS.get(name, ()) if not one.endswith(".")]
            keys = [word.partition("=")[0] for one in settings for word in re.split(r" \| | ", one)]
            # `a.b.c=1` may be written `a.b={c: 1}` there.
            assert not keys or any(key in ours or key.rpartition(".")[0] + "=" in ours for key in keys), name
            compared += bool(keys)
    assert compared > 25


@pytest.mark.parametrize(
    "line",
    list_with_marks([
        "max_epochs=5", "trainer.max_epochs=5", "+trainer.max_epochs=5", "loop.num_train_epochs=5", "training.lr=0.1",
        "optim.weight_decay=0.1", "val_check_interval=0.25", "save_steps=500", "fp16=true", "precision=16-mixed",
        "wandb=true", "wandb.project=a", "logger=csv", "report_to=none", "patience=3", "lr_scheduler_type=cosine",
        "gradient_clip_val=1.0", "devices=2", "nproc_per_node=2", "accelerator=gpu", "seed_everything=42",
        "fast_dev_run=true", "torch_compile=true", "detect_anomaly=true", "gradient_checkpointing=true",
        "overfit_batches=2", "run_name=a", "output_dir=out", "checkpoint.monitor=val/loss", "greater_is_better=true",
        "save_weights_only=true", "enable_progress_bar=false", "verbose=1", "ema_decay=0.99", "hydra.run.dir=out",
        "warmup_steps=100", "warmup_ratio=0.1", "datamodule.batch_size=16", "model.batch_size=16",
    ]),
)  # fmt: skip
def test_the_command_that_an_error_suggests_composes(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*GROUPS, line])
    hint = caught.value.hint or ""
    suggestion = re.split(r"['`](?: or|\?)", hint.partition("Did you mean ")[2][1:])[0]
    assert suggestion, hint
    words = [suggestion] if suggestion.startswith("+") else shlex.split(suggestion)
    option = suggestion if "=" in suggestion else f"{line.partition('=')[0]}={suggestion}"
    compose([*GROUPS, *(words if "=" in suggestion else [option])])


@pytest.mark.parametrize(
    ("chosen", "line", "suggestion"),
    [
        ("[ema, early_stopping]", "patience=3", "callbacks.early_stopping.patience=3"),
        ("[ema, early_stopping]", "ema_decay=.9", "callbacks.ema.decay=.9"),
        ("ema", "swa=true", "callbacks=[ema,swa]"),
        (
            "ema",
            "patience=3",
            "callbacks=[ema,early_stopping] callbacks.early_stopping.metric=val/loss "
            "callbacks.early_stopping.patience=3",
        ),
        ("ema", "callbacks.early_stopping.patience=3", "callbacks=[ema,early_stopping]"),
        ("default", "ema_decay=.9", "callbacks=ema callbacks.ema.decay=.9"),
        ("default", "callbacks.ema.decay=.9", "callbacks=ema"),
    ],
)
def test_a_suggested_callback_leaves_those_of_the_experiment(
    chosen: str, line: str, suggestion: str, project: Path
) -> None:
    file = project / "configs/experiment/own.yaml"
    head = f"# @package _global_\ndefaults:\n  - override /callbacks: {chosen}\n"
    for text, typed in ((head, [line]), (f"{head}{line.replace('=', ': ')}\n", [])):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            compose(["experiment=own", *typed])
        hint = caught.value.hint or ""
        assert (suggestion if typed else suggestion.split("=")[0]) in hint
        assert not typed or ("The metric may" in hint) is ("metric" in suggestion)
    file.write_text(head)
    compose(["experiment=own", *suggestion.split()])


def test_a_suggested_callback_is_named_also_in_a_project_below_a_folder_of_that_name(tmp_path: Path) -> None:
    folder = tmp_path / "callbacks/project/configs"
    (folder / "callbacks").mkdir(parents=True)
    (folder / "callbacks/own.yaml").write_text("own:\n  _target_: trainer_cli.EMA\n")
    with pytest.raises(ConfigError, match=re.escape("'callbacks=[own,swa]'")):
        compose([*GROUPS, "callbacks=own", "swa=true"], config_dir=folder)


@pytest.mark.parametrize("value", [3, -1, 1.5, True, None, [], [1], ["a"], {"a": 1}, "", "x", "~/x", "s3://x/y"])
def test_a_value_of_any_type_is_accepted_or_refused_in_words_for_each_key_that_is_suggested(value: Any) -> None:
    for config_key in list_keys():
        reason = why_refused(config_key.key, value)
        assert reason is None or config_key.path[0] in reason, config_key.key


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("checkpoint_dir=3", "Did you mean 'checkpoint.folder=3'?"),
        ("run_name=3", "Did you mean 'name=3'?"),
        ("output_dir=1.5", "run_dir is 1.5, but it must be"),
        ("checkpoint_dir=true", "checkpoint.folder is true, but it must be"),
        ("checkpoint_dir=[a]", "checkpoint.folder is [a], but it must be"),
    ],
)
def test_a_text_of_another_trainer_that_is_no_text_gets_its_hint(line: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([line])
    assert hint in (caught.value.hint or "")
