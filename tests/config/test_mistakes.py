"""Mistakes that are this program's own to find: the code, the place and the cure of each.

Those that Hydra and OmegaConf refuse too are in test_refused_lines.py, those of YAML in
test_yaml.py, and whole messages in test_golden_errors.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from printed import message
from wrong_configs import OWN, Wrong, body, check, left_out, line, own, part, shown, typed, value

from trainer_cli.commands.command_line import main
from trainer_cli.config.composing import compose
from trainer_cli.errors import Code, ConfigError, ConfigErrors

KEY, OPTION, TYPE, VALUE = Code.unknown_key, Code.unknown_option, Code.wrong_type, Code.wrong_value
LINE = Code.override
HEADER = "# @package _global_\n"
LONG = "x" * 256


def file(text: str, line: int, code: Code, says: str, cure: str, *, name: str = "experiment/own.yaml") -> Wrong:
    """A wrong file of the project, which the command line chooses."""
    choice = f"+{Path(name).parent}={Path(name).stem}".replace("+model", "model")
    return Wrong([choice], code, f"configs/{name}:{line}", says, cure, {name: text})


ROWS = [
    # Names of other trainers
    *[typed(line, KEY, "there is no key", shown()) for line in (
        "lr=0.1", "batch_size=3", "training.lr=0.1",
        "save_total_limit=2", "max_epochs=5", "loop.epochs=5", "checkpoint.monitor=val/loss",
        "train.batch_size=3")],
    typed("trainer.strategy=ddp", KEY, "there is no key", "`parallel=ddp parallel.processes_per_node=N`?"),
    typed("limit_train_batches=2", KEY, "there is no key", "Did you mean 'loop.limit_train_batches=2'?"),
    *[typed(line, KEY, "there is no key", left_out) for line in ("devices=1", "trainer.devices=1")],
    typed("devices=auto", KEY, "there is no key", "Did you mean 'device=auto'?"),
    typed("threads=1", KEY, "there is no key", "OMP_NUM_THREADS=1 before the command sets it"),
    typed("device.threads=1", LINE, "device is not a mapping", "OMP_NUM_THREADS=1 before the command sets it"),
    typed("backend=gloo", KEY, "there is no key", "nccl on GPUs, gloo on the CPU. Leave it out"),
    typed("optimizer={name: sgd}", KEY, "no key 'optimizer.name'", "Did you mean 'optimizer=sgd'?"),
    typed("data.num_worker=2", KEY, "no key 'data.num_worker'", "Did you mean 'data.num_workers=2'?"),
    typed("data.shuffle=false", KEY, "no key 'data.shuffle'", "leave it out. An IterableDataset orders its samples it"),
    typed("data.pin_memory=true", KEY, "no key 'data.pin_memory'", left_out),
    typed("device=0,1", LINE, "gives several values", "processes_per_node=2`; CUDA_VISIBLE_DEVICES=0,1 before"),
    typed("devices=0,1,2", LINE, "gives several values", "the number of GPUs as N; CUDA_VISIBLE_DEVICES=0,1,2 before"),
    typed("gpus=2", KEY, "there is no key", "Did you mean `parallel=ddp parallel.processes_per_node=2`?"),
    typed("project=a", KEY, "there is no key", "Did you mean `run_dir='a/${name}'` or `loggers=wandb loggers.wandb."),
    typed("resume_training=true", KEY, "there is no key", left_out),
    typed("resume=true", TYPE, "resume is true, but it must be auto, never, must, anew or a path", left_out),
    typed("device=1", TYPE, "device is 1", "Did you mean 'device=cuda:1'?"),
    typed("cuda_visible_devices=1", KEY, "there is no key", "A sweep's `--devices 1` gives each run one of these"),
    typed("device=0", TYPE, "device is 0", shown()),
    typed("zzzz=640", KEY, "there is no key", "`train config NAME` the arguments of your own classes."),
    body("zzzz: 640", KEY, "there is no key", "`train config NAME` the arguments of your own classes."),
    typed("trainer.foo=3", KEY, "there is no key", "Did you mean 'loop'?"),
    typed("model.name=cnn", KEY, "there is no key", "Did you mean 'model=cnn'? To add it, write '+model.name=cnn'."),
    typed("model=unet", OPTION, "no model called", "A file configs/model/unet.yaml would be one."),
    body("max_epochs: 5", KEY, "there is no key", "Did you mean 'loop.max_duration: 5ep'?"),
    body("trainer.max_epochs: 5", KEY, "there is no key 'trainer'", "Did you mean 'loop.max_duration: 5ep'?",
         line=1),
    body("trainer: {accelerator: cpu, gradient_clip_val: 1.0, max_epochs: 3, callbacks: [{a: 1}]}", KEY,
         "there is no key 'trainer'", "'device: cpu', 'precision.clip_norm: 1.0', 'loop.max_duration: 3ep'"),
    body("fp16: true", KEY, "there is no key", "Did you mean '- override /precision: fp16'?"),
    body("device: 0", TYPE, "device is 0", line()),
    typed("+precision=bf16-mixed", OPTION, "no option of precision called", shown()),
    typed("precision.dtype=float16", TYPE, "one of fp32, bf16, fp16", part("float16")),
    # Keys and choices
    *[typed(f"{sign}loop.max_step=3", KEY, "no key 'loop.max_step'", "'loop.max_duration=3'")
      for sign in ("+", "++", "~")],
    typed("optimizer=[{_target_: mine.SGD}]", TYPE, "optimizer is a list", "'optimizer={first: {_target_: …}}'"),
    file(f"{HEADER}optimizer:\n  - {{_target_: mine.SGD}}\n", 2, Code.yaml, "optimizer is a list",
         "optimizer: {first: {_target_: …}}"),
    typed("experiment=null", LINE, "chooses no experiment", "Leave it out, or choose one: "),
    typed("+experiment=[]", LINE, "chooses no experiment", "Leave it out, or choose one: "),
    typed("experiment=None", OPTION, "no experiment called 'None'", left_out),
    typed("scheduler=None", OPTION, "no scheduler called 'None'", shown()),
    typed("experiment={seed: 3}", TYPE, "takes the name of an option", "Choose one of: "),
    typed("model=configs/model/cnn.yaml", OPTION, "no model called", shown()),
    typed("experiment=away", OPTION, "conf/experiment/away.yaml is not read", "Rename conf to configs",
          **{"../conf/experiment/away": HEADER}),
    Wrong(["experiment=x"], OPTION, "command line", "configs/experiment/x.yml is not read", "Rename it to x.yaml.",
          {"experiment/x.yml": HEADER}),
    typed("callbacks.ema.decay=0.5", KEY, "no key 'callbacks.ema", "Choose it first, as in callbacks=ema."),
    typed("vars=5", TYPE, "vars is 5, but it must be a mapping", "To add a value, write '+vars.NAME=VALUE'."),
    typed("loggers.mine._target_=my.Logger", KEY, "no key 'loggers.mine", "'+loggers.mine={_target_: my.Logger}'"),
    typed("loggers.mine.path=x", KEY, "no key 'loggers.mine", "'+loggers.mine={_target_: TARGET, path: x}'"),
    typed("model.cnn.channels=5", KEY, "no key 'model.cnn.channels'", "Choose it first, as in model=cnn."),
    typed("optimizer={lrr: 0.1}", KEY, "no key 'optimizer.lrr'", shown(after="To add it, write ")),
    typed("model={_target_: mine.Net, width: 3}", KEY, "no key 'model.width'", "put model=null before it"),
    file("max_duration: 1ep\nmax_step: 3\n", 2, KEY, "no key 'loop.max_step'", "'loop.max_duration: 3'",
         name="loop/own.yaml"),
    typed("loop=null", TYPE, "loop is a section, and never null", ""),
    typed("compile=true", TYPE, "compile is true, but it must be a section", shown()),
    *[typed(f"resume_allow=[{key}]", KEY, f"names '{key}', and there is no such key", f"Did you mean '{nearest}'?")
      for key, nearest in (("model.", "model"), ("optimzer.lr", "optimizer"), ("loop.evl_*", "loop.eval_steps"))],
    # What nothing runs without
    typed("model=null", Code.not_given, "model is null, but nothing runs without", "Choose one with model=NAME"),
    body("model: null", Code.not_given, "model is null, but nothing runs without", "`train list model` shows them"),
    own("override /model: null", Code.not_given, "model is null, but nothing runs", "Choose one with model=NAME"),
    # Names and folders
    typed("name=..", VALUE, "names what is below runs/", "Write NAME or GROUP/NAME."),
    body("run_dir: ~/x", VALUE, "only a shell expands ~", "Write the whole path, or ${oc.env:HOME}."),
    body("checkpoint.folder: ~/x", VALUE, "only a shell expands ~", "${oc.env:HOME}"),
    typed("validate.folder='~'", VALUE, "only a shell expands ~", "${oc.env:HOME}"),
    *[typed(f"{key}=s3://a/b", VALUE, "it must be a local folder", "") for key in ("run_dir", "validate.folder")],
    *[typed(f"{key}={value}", VALUE, "contains a name of 256 bytes", "Choose a shorter name.") for key, value in (
        ("run_dir", f"a/b/{LONG}"), ("run_dir", f"'{'é' * 128}'"), ("checkpoint.folder", f"x/{LONG}/y"),
        ("checkpoint.copy_to.folder", f"x/{LONG}"), ("validate.folder", LONG))],
    Wrong([f"name={LONG}"], VALUE, "default", "run_dir contains a name of 256 bytes", "Choose a shorter name."),
    Wrong([f"name={LONG}", "run_dir=x", "checkpoint.folder='y/{run_name}'"], VALUE, "command line",
          "checkpoint.folder contains a name of 256 bytes", "Choose a shorter name."),
    *[typed(f"{key}={empty}", VALUE, "is empty", hint) for key, empty, hint in (
        ("name", "", "Write name=NAME, or leave it out."), ("run_dir", "", "Write run_dir=NAME, or leave it out."),
        ("checkpoint.folder", "", "Write null for `checkpoints/` in the run directory."),
        ("validate.folder", "' '", "Write null for `validation/` in the run directory."))],
    # Components
    file("target: torch.nn.Linear\n", 1, Code.target, "model has no _target_", "'_target_' for 'target'",
         name="model/own.yaml"),
    file("model:\n  _target_: mine.Net\n", 1, Code.target, "model has no _target_",
         "Leave out 'model:' and indent the rest less", name="model/own.yaml"),
    body("model.hidden: {a: 1}", Code.yaml, "is a mapping, but configs/model/mlp.yaml:2 makes it a list",
         "A list and a mapping do not merge"),
    body("callbacks: [ema, early_stopping]", Code.yaml, "callbacks is a list",
         "write '- override /callbacks: [ema, early_stopping]' in the defaults list"),
    body("loggers: [jsonl]", Code.yaml, "loggers is a list", "write '- override /loggers: [jsonl]' in the defaults"),
    body("callbacks: {ema: {decay: 0.99}}", Code.target, "callbacks.ema has no _target_",
         "in a file by '- override /callbacks: [ema]' in its defaults list"),
    body("model: [mlp]", Code.yaml, "model is a list", value("[mlp]", "{_target_: mine.Net}")),
    body("scheduler: {first: 3}", TYPE, "scheduler.first is 3", value("3", "null")),
    # Numbers, and texts that are read as something else
    typed("loop.max_time=3600", VALUE, "it must be counted in seconds", shown()),
    typed("loop.grad_accum_steps=0", VALUE, "a finite number of at least 1", value("0", "1")),
    typed("+model.extra=[1,{a: -inf}]", VALUE, "model.extra.1.a is -inf, but it must be finite", value("-inf", "1")),
    typed("param_groups={bias: {lr: nan}}", VALUE, "param_groups.bias.lr is nan", value("nan", "1")),
    typed("name=1.50e1", TYPE, "name is 15.0, but it must be a string", shown()),
    typed("+model.depth=014", TYPE, "is a string here, and no number", value("014", "14")),
    typed("+model.bias=no", TYPE, "is a string here, and not false", value("no", "false")),
    typed("=3", LINE, "'=3' is not an override", "Write key=value, group=option, +key=value for a new key"),
    typed("run_dir='${name'", LINE, "'${name' is not an interpolation", "Write ${key}."),
    typed("loop.max_step+=1", KEY, "no key 'loop.max_step'", shown()),
    typed("resume_allow+=None", TYPE, "None is a string here, and not null", "or '\"None\"' for the string."),
    typed("scheduler.x+=1", LINE, "scheduler is null", ""),
    typed("+model.inner={a: {null: 2}}", TYPE, "model.inner.a has the key null", value("null", "b")),
    *[typed(f"{line}None", TYPE, "None is a string here, and not null", value("None", "null")) for line in (
        "name=", "checkpoint.folder=", "checkpoint.keep_best.metric=", "data.worker_timeout=", "loop.hard_stop=",
        "checkpoint.max_checkpoints=")],
    typed("callbacks.x=None", TYPE, "None is a string here, and not null", "Write null, or '\"None\"' for the string."),
    typed("+model.sizes={a:None}", TYPE, "model.sizes.a: None is a string here", value("None", "null")),
    typed("ckpt=None", LINE, "None is a string here", shown()),
    *[body(text, Code.yaml, "read by YAML as a string, not as null", "or 'None' in quotes") for text in (
        "name: None", "model.hidden: None", "optimizer.betas: [0.9, None]", "loop.hard_stop: None")],
    own("override /scheduler: None", Code.yaml, "read by YAML as a string, not as null", value("None", "null")),
    *[typed(line, VALUE, "is read as the number", shown(after=" or ")) for line in (
        "name=2024_06_01", "checkpoint.suffix=2024_06_01")],
    *[typed(line, VALUE, "1_0 is read as the number 10", "Write 10, or '\"1_0\"' for the string.") for line in (
        "resume_allow=[seed,1_0]", "resume_allow+=1_0")],
    *[body(f"{key}: {text}", VALUE, f"read by YAML as the number {number}", f"or '{text}' in quotes")
      for key, text, number in (("name", "0x1F", 31), ("checkpoint.name", "2024_06_01", 20240601),
                                ("checkpoint.suffix", "0b11", 3))],
    # Values that do not go together
    typed("precision.clip_value=1", VALUE, "are both set", "Set one of them to null.", "precision.clip_norm=1"),
    typed("parallel.mixed_precision=true", VALUE, "is of fsdp, and parallel.strategy is ddp",
          "precision=bf16 works with both", "+parallel=ddp", "+precision=bf16"),
    typed("checkpoint.ephemeral_save_interval=10", VALUE, "must be shorter than checkpoint.save_interval (5 steps)",
          "Make it shorter, or set checkpoint.save_interval=null.", "checkpoint.save_interval=5"),
    *[typed(f"checkpoint.ephemeral_save_interval={often}", VALUE, f"({words}) must be shorter than",
            "Make it shorter, or set checkpoint.save_interval=null.", *others)
      for often, words, *others in (
          (300, "300 steps", "checkpoint.save_interval=0.1dur", "loop.max_duration=1000"),
          ("0.5dur", "5 epochs", "checkpoint.save_interval=2ep", "loop.max_duration=10ep"),
          (60, "60 steps", "checkpoint.save_interval=1ep", "loop.steps_per_epoch=50"),
          ("2ep", "2 epochs", "checkpoint.save_interval=100", "loop.steps_per_epoch=50"))],
    # Hydra's own settings
    file(f"{HEADER}hydra:\n  sweeper:\n    params: {{}}\n", 3, Code.yaml, "hydra.sweeper has no effect",
         "Hydra only composes the config here."),
]  # fmt: skip


@pytest.mark.parametrize("wrong", ROWS, ids=str)
def test_a_mistake_has_its_code_its_place_and_its_cure(small_project: Path, wrong: Wrong) -> None:
    check(wrong)


@pytest.mark.parametrize(
    ("words", "location"),
    [
        (["loop.max_step=3"], "loop.max_step"),
        (["model=cn"], None),
        (["seed=x"], "seed"),
        (["seed=-1"], "seed"),
        (["data=text"], "data.path"),
        (["name=${no}"], "name"),
        (["+model.inner={_target_: mine.Nett}"], "model.inner._target_"),
        (["+model._odd_=1"], "model"),
    ],
)
def test_a_mistake_carries_the_key_that_it_is_at(small_project: Path, words: list[str], location: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(words).check_targets(sections=("model",))
    assert caught.value.location == location
    assert caught.value.message.rstrip(".") != str(caught.value).rstrip("."), "the place and the cure are added to it"


def test_several_mistakes_of_all_stages_are_one_error_that_holds_each(small_project: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        compose(["loop.max_step=3", "name=x(", "model=cmn", "seed=x", "loop.eval_steps=0"])
    assert caught.value.code is Code.several
    assert [(mistake.code, mistake.location) for mistake in caught.value.mistakes] == [
        (Code.override, None),
        (Code.unknown_key, "loop.max_step"),
        (Code.unknown_option, None),
        (Code.wrong_type, "seed"),
        (Code.wrong_value, "loop.eval_steps"),
    ]


def test_mistakes_of_a_file_and_of_the_command_line_are_reported_together(small_project: Path) -> None:
    Path("configs/experiment/own.yaml").write_text(f"{HEADER}loop:\n  max_time: 12:30:45\nseed: x\n")
    with pytest.raises(ConfigErrors) as caught:
        compose(["+experiment=own", "loop.max_step=3", "optimizer.lr=nan"])
    assert [mistake.source for mistake in caught.value.mistakes] == [
        "command line",
        f"{OWN}:3",
        f"{OWN}:4",
        "command line",
    ]


def test_what_an_unknown_experiment_would_have_had_is_no_mistake_beside_it(small_project: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        compose(["experiment=smal", "model.channels=[1]", "seed=x"])
    assert [mistake.code for mistake in caught.value.mistakes] == [Code.unknown_option, Code.wrong_type]


@pytest.mark.parametrize(
    ("folder", "cure"), [("nowhere", "nowhere is not a folder"), ("empty", "no .yaml in it or below it")]
)
def test_a_folder_without_configs_is_refused_by_its_flag(empty_folder: Path, folder: str, cure: str) -> None:
    Path("empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        compose([], config_dir=Path(folder))
    assert (caught.value.code, caught.value.place) == (Code.wrong_value, "--config-dir")
    assert cure in str(caught.value)


def test_fit_reports_mistakes_before_torch_is_imported(small_project: Path) -> None:
    Path("configs/experiment/odd.yaml").write_text(f"{HEADER}loop:\n  max_time: 12:30:45\n")
    Path("configs/experiment/bad.yaml").write_text("a: [")
    commands = [
        ["loop.max_step=3"], ["experiment=odd"], ["experiment=bad"], ["experiment=nope"], ["optimizer.lr=nan"],
        ["run_dir='${nope}'"], ["model=null"], ["seed+=3"], ["loop.eval_steps=0"], ["data=text"],
    ]  # fmt: skip
    code = (
        "import sys\nfrom trainer_cli.commands.command_line import main\n"
        f"assert [main(['fit', *words]) for words in {commands!r}] == [2] * {len(commands)}\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("runs").exists()


@pytest.mark.parametrize("verb", ["fit", "plan"])
def test_all_mistakes_in_arguments_are_reported_together_before_anything_is_written(
    verb: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "digits_mlp", "+model.hiden=3", "optimizer.lr=fast"]) == 2
    text = message(capsys.readouterr().err)
    assert "MLP takes no argument 'hiden' (model.hiden, command line). Did you mean 'hidden'?" in text
    assert "optimizer.lr is 'fast', but it must be a number (command line)" in text
    assert not list(empty_folder.iterdir())


@pytest.mark.parametrize("verb", ["fit", "plan"])
def test_a_logger_without_its_package_is_refused_before_anything_is_written(
    verb: str, empty_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pytest.importorskip("trainer_cli.addons.trackers.wandb").WandbLogger, "needs_package", "no_such"
    )
    assert main([verb, "digits_mlp", "loggers=wandb"]) == 2
    text = message(capsys.readouterr().err)
    assert "loggers.wandb needs the package no_such, which is not installed" in text
    assert not list(empty_folder.iterdir())


def test_arguments_left_of_a_component_with_another_target_name_the_way_to_replace_it(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "model._target_=torch.nn.Flatten"]) == 2
    text = message(capsys.readouterr().err)
    assert text.count("To replace the whole model, write model=null 'model={_target_: torch.nn.Flatten}'.") == 4
    assert main(["fit", "model._target_=torch.nn.Flatten", "+model.hiden=3"]) == 2
    assert "(model.hiden, command line). It takes: start_dim, end_dim." in message(capsys.readouterr().err)
