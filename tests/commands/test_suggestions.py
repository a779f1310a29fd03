"""The likeliest mistakes in a command: one line each, with the cure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from printed import message

from trainer_cli.commands import choices
from trainer_cli.commands.command_line import actions_of, listed_verbs, main, parser_of


@pytest.mark.parametrize(
    ("command", "cure"),
    [
        ("+experiment=digits", "Did you mean 'train fit +experiment=digits'?"),
        ("digits seed=1", "Did you mean 'train fit digits seed=1'?"),
        ("mine", "Did you mean 'train fit mine'?"),
        ("fti", "Did you mean 'fit'?"),
        ("zzz", "Available: fit, validate, "),
        ("export runs/a out", "Did you mean 'train ckpt export runs/a --format safetensors -o out'?"),
        ("export runs/a@best", "Did you mean 'train ckpt export runs/a@best --format safetensors -o FILE'?"),
        ("export runs/a -o out", "Did you mean 'train ckpt export runs/a -o out'?"),
        ("export", "Did you mean 'train ckpt export runs/NAME@best --format safetensors -o FILE'?"),
        ("fork runs/a", "Did you mean 'train fit NAME name=OTHER ckpt=runs/a'?"),
        ("fork runs/a seed=1", "Did you mean 'train fit NAME name=OTHER ckpt=runs/a seed=1'?"),
        ("fork", "Did you mean 'train fit NAME name=OTHER ckpt=RUN@latest'?"),
        pytest.param(
            "ckpt export",
            "train ckpt export needs --format. For example: train ckpt export runs/digits@best --format safetensors",
            marks=pytest.mark.addon("formats"),
        ),
        pytest.param(
            "ckpt average",
            "train ckpt average needs -o/--output. For example: train ckpt average 'runs/digits/checkpoints/step*' "
            "--output runs/mean",
            marks=pytest.mark.addon("formats"),
        ),
        ("ckpt diff", "train ckpt diff needs CKPT. For example: train ckpt diff runs/digits@step180"),
        ("eval", "Did you mean `train validate ckpt='runs/NAME/checkpoints/step*'`?"),
        ("ls", "Did you mean 'train ckpt ls RUN'?"),
        ("ckpt compare runs/a@best runs/b@best", "train ckpt has no action 'compare'. Did you mean 'diff'?"),
        ("ckpt remove runs/a@step1", "Did you mean 'rm'?"),
        ("top runs/a runs/b", "train top takes one path, and got runs/a runs/b. `train report runs/a runs/b` draws"),
        ("tail runs/a runs/b", "`train diverge runs/a runs/b` finds the first step that differs"),
        ("tail -n 3 runs/a runs/b --follow", "train tail takes one path, and got runs/a runs/b. `train report runs/a"),
        ("resume runs/a seed=1", "Did you mean 'train fit resume=runs/a seed=1'?"),
        ("resume", "Did you mean 'train fit resume=RUN'?"),
        ("eval runs/a/checkpoints/step1", "Did you mean 'train validate ckpt=runs/a/checkpoints/step1'?"),
        ("test ckpt=runs/a@best", "Did you mean 'train validate ckpt=runs/a@best'?"),
        ("tail runs/a/train.txt", "runs/a/train.txt holds no run. Did you mean 'runs/a'?"),
        ("logs runs/a", "Did you mean 'train tail runs/a'?"),
        ("tensorboard", "Did you mean 'tensorboard --logdir runs'?"),
        ("train mine", "Did you mean 'train fit mine'?"),
        ("fit runs/a", "Did you mean 'resume=runs/a'?"),
        ("fit runs/a@best", "Did you mean 'resume=runs/a@best'?"),
        pytest.param("predict runs/a@best", "Did you mean 'ckpt=runs/a@best'?", marks=pytest.mark.addon("predict")),
        ("plan runs/a seed=1", "Did you mean 'resume=runs/a'?"),
        ("fit runs/a/checkpoints/step1", "Did you mean 'ckpt=runs/a/checkpoints/step1'?"),
        ("config optimizer=sgd optimizer.betas=1", "optimizer has lr, momentum, weight_decay, nesterov. To add it,"),
        ("config optimizer.foreach=true", "write '+optimizer.foreach=true', if torch.optim.AdamW takes it."),
        ("config optimizer.betsa=1", "Did you mean 'optimizer.betas=1'?"),
        ("config optimizer._target_=torch.optim.SGD optimizer.betsa=1", "(command line). To add it,"),
        ("--experiment=digits fit", "Write train VERB first"),
        ("fit digit", "Did you mean 'digits'?"),
        ("fit +mine", "Did you mean 'mine'?"),
        ("fit large experiment=mine", "Did you mean 'model=large'?"),
        ("fit experiment digits", "Did you mean 'digits'?"),
        ("fit seed 3 experiment=mine", "Did you mean 'seed=3'?"),
        ("fit optimizer sgd", "Did you mean 'optimizer=sgd'?"),
        ("fit optimizer.lr = 0.1", "Write 'optimizer.lr=0.1', without spaces."),
        ("fit optimizer.lr= 0.1 seed=1", "Write 'optimizer.lr=0.1', without spaces."),
        ("fit seed=1 optimizer.lr =0.1", "Write 'optimizer.lr=0.1', without spaces."),
        ("fit experiment= digits", "Write 'experiment=digits', without spaces."),
        ("fit model", "Write model=VALUE."),
        ("fit configs/experiment/mine.yaml", "Did you mean 'mine'?"),
        ("fit --experiment digits", "Did you mean 'digits'?"),
        ("fit --experiment=digits", "Did you mean 'digits'?"),
        ("fit --lr 0.1", "Did you mean 'optimizer.lr=0.1'?"),
        ("fit +experiment=mine --noise 0", "Did you mean 'data.noise=0'?"),
        ("fit --batch-size=64", "Did you mean 'data.batch_size=64'?"),
        ("fit --optimizer.lr=0.1", "Did you mean 'optimizer.lr=0.1'?"),
        ("fit --loop.max_duration 3ep", "Did you mean 'loop.max_duration=3ep'?"),
        ("fit --epochs 5", "Did you mean 'loop.max_duration=5ep'?"),
        ("fit --max-steps=5", "Did you mean 'loop.max_duration=5'?"),
        ("fit --seed", "Did you mean 'seed=VALUE'?"),
        ("fit --confg-dir x", "Did you mean '--config-dir'?"),
        ("fit --zzz", "Values are given as key=value, without dashes. See train fit --help."),
        ("list --zzz", "See train list --help."),
        ("list experiment model", "unrecognized arguments: model. See train list --help."),
        ("validate runs/mine/checkpoints/step10", "Did you mean 'ckpt=runs/mine/checkpoints/step10'?"),
        ("validate runs/a/step1 runs/a/step2", "Write ckpt='GLOB', in quotes"),
        ("fit zzzz", "Write key=value, or the name of an experiment: mine, "),
        ("fit a*b", "'a*b' is not an override"),
        ("fit optimizer.lr 0.1", "Did you mean 'optimizer.lr=0.1'?"),
        ("fit optimizer.lr", "Write optimizer.lr=VALUE."),
        ("fit alone.yaml", "Move it into the folder configs, and write --config-name alone."),
        ("fit runs/alone.yaml", "Did you mean '--config-dir runs --config-name alone'?"),
        ("fit --config-name=mine", "It is an experiment: write its name alone, as in `train fit mine`."),
        ("fit --config alone.yaml", "Move it into the folder configs, and write --config-name alone."),
        ("fit --config=alone.yaml", "Move it into the folder configs, and write --config-name alone."),
        ("fit --config configs/experiment/mine.yaml", "Did you mean 'train fit mine'?"),
        ("fit -c configs/experiment/mine.yaml", "Did you mean 'train fit mine'?"),
        ("configs/experiment/mine.yaml", "Did you mean 'train fit mine'?"),
        ("train.py", "'train.py' is not a verb. No script is run"),
        ("fit.py", "'train new DIR' writes one, and 'train fit mine' trains one."),
        ("alone.yaml", "'alone.yaml' is not a verb, but a file. Move it into"),
        ("fit train.py", "No script is run: an experiment names the classes of its model and data."),
        ("-m mine seed=1,2", "Write train VERB first, as in 'train fit -m mine seed=1,2'"),
        ("-m fit mine seed=1,2", "Write train VERB first, as in 'train fit -m mine seed=1,2'"),
        (
            "fit --help optimizer",
            "`train list optimizer` lists its options, `train config --fields optimizer` e",
        ),
        ("help loop.max_duration", "max_duration` explains it, and `train config mine` shows its values."),
        ("vs runs/a runs/b", "`train report runs/a runs/b` draws their curves, `train diverge runs/a runs/b`"),
        ("vs runs/a runs/b", "`train config --diff runs/a runs/b` compares their configs."),
        ("my.yaml", "Write 'train fit NAME' with the name of an experiment: mine, "),
        ("validate mine", "For example: train validate ckpt='runs/mine/checkpoints/step*'"),
        pytest.param(
            "predict mine",
            "For example: train predict ckpt=runs/mine@best.",
            marks=pytest.mark.addon("predict"),
        ),
        ("config --diff runs/a runs/gone", "not a list of overrides (--diff). runs holds a, alone.yaml. Name a run"),
        ("fit callbacks=EarlyStopping", "Did you mean 'callbacks=early_stopping'? Available: "),
        ("fit callbacks=[default,EarlyStopping]", "Did you mean 'callbacks=[default,early_stopping]'? Available: "),
        ("fit model=yolov8n.pt", "configs/model, and `ckpt=yolov8n.pt` loads weights into it."),
        ("fit mine seed=1,2", "To run each: `train fit -m mine seed=1,2`."),
        ("fit mine num_nodes=2", "`torchrun --nnodes 2 --nproc-per-node GPUS "),
        ("fit mine num_nodes=2", "`srun --nodes 2 --ntasks-per-node GPUS train fit NAME parallel=ddp`."),
        ("fit mine project=vision", "Did you mean `run_dir='vision/${name}'` or "),
        ("fit mine save_top_k=3", "The metric may also be one of your own, such as val/accuracy."),
        ("fit mine resume=true", "it must be auto, never, must, anew or a path (command line). The same command"),
        ("fit mine resume=last", "no such directory (command line). The same command resumes where the run stopped"),
        ("fit mine --max_epochs 5", "Did you mean 'loop.max_duration=5ep'?"),
        ("fit mine --trainer.max_epochs=5", "Did you mean 'loop.max_duration=5ep'?"),
        ("fit mine --resume", "The same command resumes where the run stopped: leave it out."),
        ("fit mine --fp16", "Did you mean 'precision=fp16'?"),
        ("fit mine --nproc-per-node 2", "Did you mean `parallel=ddp parallel.processes_per_node=2`?"),
        ("fit mine --config-path conf", "Did you mean '-cd conf'?"),
        pytest.param(
            "report", "train report needs RUN. For example: train report runs/digits", marks=pytest.mark.addon("view")
        ),
        ("fit gone.yaml", "Write key=value, or the name of an experiment: mine, "),
        ("config runs/a --diff runs/b --provenance", "not allowed with argument --diff. Leave one of them out."),
        ("complete fish", "it must be one of bash, zsh"),
        ("docs resumq", "there is no page 'resumq', and none mentions it. Did you mean 'resume'?"),
        # Verbs and arguments of other tools, translated together
        ("test mine --ckpt_path runs/a/step5", "Did you mean 'train validate ckpt=runs/a/step5'?"),
        ("val model=runs/a/step5", "Did you mean 'train validate ckpt=runs/a/step5'?"),
        ("test mine", "Did you mean 'train validate ckpt=runs/mine@best'?"),
        ("test mine ckpt_path=best", "Did you mean 'train validate ckpt=runs/mine@best'?"),
        ("test mine --ckpt_path last", "Did you mean 'train validate ckpt=runs/mine@latest'?"),
        ("test mine ckpt=runs/a/step5", "Did you mean 'train validate ckpt=runs/a/step5'?"),
        # Paths as other trainers have them in a run
        ("val model=runs/a/weights/best.pt", "Did you mean 'train validate ckpt=runs/a@best'?"),
        ("fit mine --ckpt_path runs/a/checkpoints/last.ckpt", "resume=runs/a@latest continues a run from that"),
        ("fit mine init_from=runs/a/checkpoints/last.ckpt", "Did you mean 'ckpt=runs/a@latest'?"),
        ("fit mine resume=runs/a/checkpoints/last.ckpt", "Did you mean 'runs/a@latest'?"),
        ("fit mine resume=last.ckpt", "Write RUN@best or RUN@latest, such as runs/a@best."),
        ("fit mine resume=runs/a/checkpoints/step1", "To continue a run, write resume=runs/a; to begin one with these"),
        ("validate mine --checkpoint model.pth", "Did you mean 'ckpt=model.pth'?"),
        ("validate mine --resume runs/a/checkpoints/step1", "Did you mean 'ckpt=runs/a/checkpoints/step1'?"),
        ("validate mine --model mlp", "Did you mean 'model=mlp'?"),
        # Experiments by their files
        ("--config configs/experiment/mine.yaml", "is not a verb, but a file. Did you mean 'train fit mine'?"),
        ("--config=configs/experiment/mine.yaml fit", "Did you mean 'train fit mine'?"),
        ("fit --config-path configs/experiment --config-name mine", "write its name alone, as in `train fit mine`."),
        ("fit --config-path configs --config-name experiment/mine", "write its name alone, as in `train fit mine`."),
        ("fit -cd configs --config-name experiment/mine", "write its name alone, as in `train fit mine`."),
        ("config runs/a", "is runs/a/config.yaml; `train config --diff runs/a OTHER` compares two."),
        ("config runs/a --diff runs/b foo=bar", "is runs/a/config.yaml; `train config --diff runs/a OTHER` compares"),
        # A misspelt key with a misspelt option
        ("fit mine optimiser=sdg", "Did you mean 'optimizer=sgd'?"),
        ("fit mine optimiser=sgd", "Did you mean 'optimizer=sgd'?"),
        ("fit mine schedular=cosine", "Did you mean 'scheduler=warmup_cosine'?"),
        ("fit mine optimiser=foo", "Did you mean 'optimizer'? Available: adam"),
        pytest.param(
            "ckpt export runs/a --format onxx",
            "archive. ONNX is not written: torch.onnx.export does it",
            marks=pytest.mark.addon("formats"),
        ),
        pytest.param(
            "ckpt export runs/a --format safetensor",
            "one of huggingface, safetensors, torch, archive. Did you mean 'safetensors'?",
            marks=pytest.mark.addon("formats"),
        ),
        (
            "export model=runs/a/step5 format=onnx",
            "'train ckpt export runs/a/step5 --format safetensors -o FILE'? ONNX",
        ),
        ("model=mine data=spiral epochs=3", "Did you mean 'train fit mine data=spiral loop.max_duration=3ep'?"),
        ("train mine --epochs 3", "Did you mean 'train fit mine loop.max_duration=3ep'?"),
        # Words of other tools, and what the schema refuses of them
        ("fit mine batch=-1", "-1 is no batch size: data.batch_size=32 sets one, data.batch_size=auto"),
        ("fit mine batch=0", "It is 'data.batch_size' here. data.batch_size is 0, but it must be a whole number of"),
        ("fit mine epochs=abc", "It is 'loop.max_duration' here. loop.max_duration: 'abcep' is not a duration"),
        ("fit mine parallel.backend=gloo", "nccl on GPUs, gloo on the CPU. Leave it out"),
        ("fit mine load_best_model_at_end=true", "Leave it out and add checkpoint.keep_best.metric=val/loss: the run"),
        (
            "fit mine restore_best_weights=true",
            "RUN@best`. The metric may also be one of your own, such as val/accuracy.",
        ),
        ("fit mine metric_for_best_model=accuracy", "Did you mean 'checkpoint.keep_best.metric=val/accuracy'?"),
        ("fit mine metric_for_best_model=val/f1", "Did you mean 'checkpoint.keep_best.metric=val/f1'?"),
        ("fit mine validation_split=0.2", "its `val` is the dataset for validation"),
        ("fit mine loss=mse", "The model's forward returns the loss: change it there"),
        ("fit mine metrics=[accuracy]", "The model's forward may return further values beside the loss"),
        ("fit mine callbacks=model_checkpoint", "Did you mean 'checkpoint.keep_best.metric=val/loss'? The metric may"),
        ("fit mine save_best_only=true", "`checkpoint.keep_best.metric=val/loss checkpoint.max_checkpoints=1`"),
        ("fit mine imgsz=640", "give it to your own class as data.NAME=640."),
        ("fit mine pin_memory=true", "Batches for a GPU are in page-locked memory already: leave it out."),
        ("fit mine eval_strategy=steps", "give the number as in loop.eval_interval=500, and leave this out."),
        ("fit mine verbose=2", "loop.log_interval=50 sets the steps between two, and logging.level=debug says more"),
        ("fit mine shuffle=false", "Training data is shuffled and validation data is not: leave it out."),
        ("fit model=yolo", "No model for detection is shipped: `train docs own-model`"),
        ("fit mine optimizer=rmsprop", "write optimizer=null 'optimizer={_target_: torch.optim.RMSprop, lr: 0.001}'."),
        ("fit mine parallel=deepspeed", "the nearest to ZeRO-3 is `parallel=fsdp parallel.processes_per_node=N` (N: "),
        ("fit mine --trainer.strategy=ddp", "`parallel=ddp parallel.processes_per_node=N`? N is the number of GPUs."),
        ("model=mine strategy=ddp", "Did you mean 'train fit mine parallel=ddp parallel.processes_per_node=N'?"),
        ("fit mine optimizer.lr=interval(0.001,0.1)", "did you mean optimizer.lr=0.001,0.003,0.01,0.03,0.1?"),
        pytest.param(
            "fit mine -m optimizer.lr=interval(0.001,0.1)",
            "add sweep.search=random sweep.trials=20. For a grid, did you mean optimizer.lr=0.001,0.003",
            marks=pytest.mark.addon("jobs"),
        ),
        (
            "fit mine ckpt_path=runs/a/checkpoints/step1",
            "`resume=runs/a/checkpoints/step1 checkpoint.newer=trash` goes",
        ),
        (
            "fit mine ckpt_path=runs/a/checkpoints/step1",
            "`name=OTHER ckpt=runs/a/checkpoints/step1 'load.states=[all]'`",
        ),
        ("fit mine --resume_from_checkpoint runs/a/checkpoints/step1", "There are newer checkpoints: `resume=runs/a/"),
        (
            "fit mine ckpt_path=runs/a/checkpoints/step2",
            "resume=runs/a/checkpoints/step2 continues a run from that checkpoint, ckpt=",
        ),
        ("fit mine callbacks=nope", "there is no callback called 'nope'"),
        (
            "fit mine callbacks=early_stopping callbacks.early_stopping.restore_best_weights=true",
            "the run keeps its last weights, and RUN@best names the best, as in `train validate ckpt=RUN@best`.",
        ),
        # Values
        ("fit mine model.hidden=[64, 64]", "has split 'model.hidden=[64, 64]' at its spaces (command line). Put it in"),
        ("fit mine optimizer.lr=", "optimizer.lr= has no value (command line). Write optimizer.lr=VALUE"),
        ("fit mine ~scheduler scheduler.warmup=2ep", "~scheduler on this command line removes the scheduler"),
        ("fit mine loop.max_duration=10epochz", "Did you mean 'loop.max_duration=10ep'?"),
        ("fit mine optimzer.lr=0.1", "there is no key 'optimzer.lr' (command line). Did you mean 'optimizer.lr=0.1'?"),
        ("new", "train new needs DIR. For example: train new mine"),
    ],
)
def test_a_likely_mistake_is_one_line_with_its_cure(
    made: Path, capsys: pytest.CaptureFixture[str], command: str, cure: str
) -> None:
    for file in ("config.yaml", "checkpoints/step1/config.yaml", "checkpoints/step1/manifest.json"):
        (made / "runs/a" / file).parent.mkdir(parents=True, exist_ok=True)
        (made / "runs/a" / file).touch()
    for file in ("config.yaml", "alone.yaml", "runs/alone.yaml"):
        (made / file).write_text("defaults: [model: mlp]\n")
    (made / "runs/a/checkpoints/step2").mkdir()
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"error: .*\n(  --> .*\n)?(help: .*\n)?", captured.err)
    assert cure in message(captured.err)


@pytest.mark.parametrize(
    ("command", "cures"),
    [
        (
            "fit mine --trainer.accelerator=gpu --trainer.strategy=ddp_find_unused_parameters_true",
            ["'device=cuda'", "`parallel=ddp parallel.find_unused_parameters=true`"],
        ),
        ("fit mine --num_train_epochs 3 --output_dir out", ["'loop.max_duration=3ep'", "'run_dir=out'"]),
        ("fit mine --learning_rate 1e-4 batch=8", ["'optimizer.lr=1e-4'", "'data.batch_size=8'"]),
        ("fit mine optimizer=Adam optimizer.learning_rate=0.001", ["'optimizer=adam'", "'optimizer.lr=0.001'"]),
        (
            "fit mine callbacks=[ModelCheckpoint,EarlyStopping]",
            ["'checkpoint.keep_best.metric=val/loss'", "'callbacks=[early_stopping]'"],
        ),
        (
            "fit mine callbacks=[ema,EarlyStoping,ModelCheckpoint]",
            ["'callbacks=[ema,early_stopping]'", "'checkpoint.keep_best.metric=val/loss'"],
        ),
        ("model=mine optimzer.lr=0.1", ["'train fit'", "'optimizer.lr=0.1'"]),
    ],
)
def test_flags_choices_and_keys_are_reported_together(
    made: Path, capsys: pytest.CaptureFixture[str], command: str, cures: list[str]
) -> None:
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert re.findall(r"help: Did you mean (.*?)\?", error) == cures
    assert f"Found {len(cures)} mistakes." in error


OF_ADDONS = {"export": "formats", "average": "formats", "strip": "formats", "report": "view", "serve": "view"}
OF_ADDONS |= dict.fromkeys(("replay", "diverge", "check", "bisect", "data", "rerun", "pack"), "exact") | {
    "predict": "predict"
}
"""Verb or action -> the add-on that brings it."""


def list_with_marks(words: Iterable[str]) -> list[Any]:
    """Each, skipped if the add-on of a command that is suggested for it was deleted."""
    return [
        pytest.param(
            word,
            marks=[
                pytest.mark.addon(OF_ADDONS[part])
                for part in re.findall(r"[a-z]+", choices._VERBS_ELSEWHERE[word][0])
                if part in OF_ADDONS
            ],
        )
        for word in words
    ]


@pytest.mark.parametrize("word", list_with_marks(choices._VERBS_ELSEWHERE))
def test_the_command_suggested_for_a_verb_of_other_tools_exists(word: str) -> None:
    for command in choices._VERBS_ELSEWHERE[word][0].split("|"):
        program, verb, *action = command.partition(":")[0].split()
        if program != "train":
            continue
        parser = parser_of(verb, listed_verbs()[verb])
        if action[:1] == ["NAME"]:
            assert hasattr(parser.parse_args(action), "overrides")
            continue
        assert action[:1] == [] or action[0] in actions_of(parser) or action[0] in parser._option_string_actions
    assert word not in listed_verbs()


def test_checkpoints_named_by_epochs_are_named_by_steps_here(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (0, 250):
        (made / f"runs/a/checkpoints/step{step}").mkdir(parents=True)
    assert main(["validate", "ckpt=runs/a/checkpoints/epoch*"]) == 3
    meant = "Checkpoints are named by their step: did you mean 'runs/a/checkpoints/step*' (step0, step250)?"
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "meant"), [("best", "such as runs/a@best."), ("runs/a/weights/best.pt", "Did you mean 'runs/a@best'?")]
)
def test_a_checkpoint_by_the_name_that_other_trainers_give_it_is_named_by_its_run(
    made: Path, capsys: pytest.CaptureFixture[str], named: str, meant: str
) -> None:
    (made / "runs/a").mkdir(parents=True)
    (made / "runs/a/config.yaml").touch()
    assert main(["validate", f"ckpt={named}"]) == 3
    assert meant in message(capsys.readouterr().err)


def test_what_is_suggested_can_be_run(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for overrides in (["experiment=mine"], ["model=large", "experiment=mine"], ["data.noise=0", "+experiment=mine"]):
        assert main(["config", *overrides]) == 0
    assert capsys.readouterr().err == ""
