"""Every mistake gives one message: the whole of what stands on stderr, for each of them."""

# ruff: noqa: E501
from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from printed import message as printed_message

import trainer_cli
from trainer_cli.commands.main import main
from trainer_cli.config import search_path

PACKAGE = "# @package _global_\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@dataclass(frozen=True)
class Case:
    """Arguments (of `config`, where they name no verb), files of `./configs`, and the message."""

    name: str
    arguments: list[str]
    message: str
    files: dict[str, str | bytes] = field(default_factory=dict)


CASES = [
    # Keys, groups and options
    Case(
        "keys that other trainers have at the top",
        ["lr=0.1", "max_epochs=5", "batch_size=3", "trainer.devices=1", "lr_scheduler=cosine", "save_top_k=2"],
        "6 mistakes:\n"
        "  - there is no key 'lr' (command line). Did you mean 'optimizer.lr'?\n"
        "  - there is no key 'max_epochs' (command line). Did you mean 'loop.max_duration'? Epochs are written as 5ep.\n"
        "  - there is no key 'batch_size' (command line). Did you mean 'data.batch_size'?\n"
        "  - there is no key 'trainer' (command line). Did you mean 'loop'?\n"
        "  - there is no key 'lr_scheduler' (command line). Did you mean 'scheduler'?\n"
        "  - there is no key 'save_top_k' (command line). Did you mean 'checkpoint.max_checkpoints'?",
    ),
    Case(
        "a list of optimizers in a file",
        ["experiment=x"],
        "optimizer is a list, but it must be a mapping of keys to values (configs/experiment/x.yaml:2). "
        "For several write a mapping of names: optimizer: {first: {_target_: …}}.",
        {"experiment/x.yaml": f"{PACKAGE}optimizer:\n  - {{_target_: torch.optim.Adam}}\n"},
    ),
    Case(
        "a list of optimizers on the command line",
        ["optimizer=[{_target_: torch.optim.Adam}]"],
        "optimizer is a list, but it must be a mapping of keys to values (command line). "
        "For several write a mapping of names: 'optimizer={first: {_target_: …}}'.",
    ),
    Case(
        "unknown key",
        ["loop.max_step=3"],
        "there is no key 'loop.max_step' (command line). Did you mean 'loop.max_duration'?",
    ),
    Case(
        "unknown key under +",
        ["+loop.max_step=3"],
        "there is no key 'loop.max_step' (command line). Did you mean 'loop.max_duration'?",
    ),
    Case(
        "unknown key under ++",
        ["++loop.max_step=3"],
        "there is no key 'loop.max_step' (command line). Did you mean 'loop.max_duration'?",
    ),
    Case(
        "unknown key under ~",
        ["~loop.max_step"],
        "there is no key 'loop.max_step' (command line). Did you mean 'loop.max_duration'?",
    ),
    Case(
        "unknown top-level key",
        ["sed=3"],
        "there is no key 'sed' (command line). Did you mean 'seed'?",
    ),
    Case(
        "misspelt experiment",
        ["+experimant=x"],
        "there is no key 'experimant' (command line). Did you mean 'experiment'?",
    ),
    Case(
        "unknown experiment",
        ["experiment=digit"],
        "there is no experiment called 'digit' (command line). There are: char_gpt, digits, digits_mlp, text. Did you mean 'digits'?",
    ),
    Case(
        "no experiment",
        ["experiment=null"],
        "experiment=null chooses no experiment (command line). Leave it out, or choose one: char_gpt, digits, digits_mlp, text.",
    ),
    Case(
        "an empty list of experiments",
        ["+experiment=[]"],
        "experiment=[] chooses no experiment (command line). Leave it out, or choose one: char_gpt, digits, digits_mlp, text.",
    ),
    Case(
        "experiment in a folder that is not read",
        ["experiment=mine"],
        "conf/experiment/mine.yaml is not read (command line). Rename conf to configs, or add -cd conf.",
        {"../conf/experiment/mine.yaml": PACKAGE},
    ),
    Case(
        "option as a file",
        ["model=configs/model/cnn.yaml"],
        "there is no model called 'configs/model/cnn.yaml' (command line). There are: cnn, gpt, mlp. Did you mean 'cnn'?",
    ),
    Case(
        "++ on a group",
        ["++model=cnn"],
        "++model=cnn: model is a group, whose option is chosen (command line). Write 'model=cnn', or '+model=cnn' where none is chosen yet.",
    ),
    Case(
        "key of an option that is not chosen",
        ["callbacks.ema.decay=0.5"],
        "there is no key 'callbacks.ema.decay' (command line). Choose it first, as in callbacks=[default,ema].",
    ),
    Case(
        "key of another option",
        ["model.cnn.channels=5"],
        "there is no key 'model.cnn.channels' (command line). Choose it first, as in model=cnn.",
    ),
    Case(
        "glob in a key",
        ["+param_groups.'*bias'.lr=0.1"],
        "cannot read the override \"+param_groups.'*bias'.lr=0.1\" (command line). A name with * stands in braces: '+param_groups={*bias:{lr:0.1}}'.",
    ),
    Case(
        "removing another value than is there",
        ["~optimizer.lr=0.5"],
        "optimizer.lr is 0.001, and not 0.5, so it is not removed (command line). Write ~optimizer.lr.",
    ),
    Case(
        "comma for a point on the command line",
        ["optimizer.lr=0,01"],
        "'optimizer.lr=0,01' gives several values, but one run takes one (command line). For a number write 'optimizer.lr=0.01', for a list write 'optimizer.lr=[0,01]', for a text 'optimizer.lr=\"0,01\"', or -m to run each (train fit -m).",
    ),
    Case(
        "fraction for a count",
        ["seed=1e3"],
        "seed is 1000.0, but it must be a whole number (command line). Write 1000.",
    ),
    Case(
        "name of a folder above",
        ["name=.."],
        "name is '..', but it names what is below runs/ (command line). Write NAME or GROUP/NAME.",
    ),
    Case(
        "home in a file",
        ["experiment=x"],
        "run_dir is '~/x', and no shell is here to read ~ (configs/experiment/x.yaml:2). Write the whole path, or ${oc.env:HOME}.",
        {"experiment/x.yaml": PACKAGE + "run_dir: ~/x\n"},
    ),
    Case(
        "run directory elsewhere",
        ["run_dir=s3://a/b"],
        "run_dir is 's3://a/b', but it must be a local folder (command line).",
    ),
    Case(
        "home for checkpoints, in a file",
        ["experiment=x"],
        "checkpoint.folder is '~/x', and no shell is here to read ~ (configs/experiment/x.yaml:3). Write the whole path, or ${oc.env:HOME}.",
        {"experiment/x.yaml": PACKAGE + "checkpoint:\n  folder: ~/x\n"},
    ),
    Case(
        "home for results, in quotes",
        ["validate.folder='~'"],
        "validate.folder is '~', and no shell is here to read ~ (command line). Write the whole path, or ${oc.env:HOME}.",
    ),
    Case(
        "results elsewhere",
        ["validate.folder=s3://a/b"],
        "validate.folder is 's3://a/b', but it must be a local folder (command line).",
    ),
    Case(
        "section that only a wildcard could end",
        ["resume_allow=[model.]"],
        "resume_allow names 'model.', and there is no such key (command line). Did you mean 'model'?",
    ),
    Case(
        "group whose choice is left open",
        ["-cn", "mine", "seed=1"],
        "model must be chosen (configs/mine.yaml:3). Add model=NAME to the command line: cnn, gpt, mlp.",
        {"mine.yaml": "defaults:\n  - train_schema\n  - model: ???\n  - data: digits\n"},
    ),
    Case(
        "default for defaults",
        ["experiment=x"],
        "there is no key 'default' (configs/experiment/x.yaml:2). Did you mean 'defaults'?",
        {"experiment/x.yaml": PACKAGE + "default:\n  - override /model: cnn\n"},
    ),
    Case(
        "override for a package that nothing chooses",
        ["experiment=x"],
        "nothing chooses a callbacks for foo (configs/experiment/x.yaml:3). Write '- override /callbacks: ema'.",
        {"experiment/x.yaml": PACKAGE + "defaults:\n  - override /callbacks@foo: ema\n"},
    ),
    Case(
        "target without underscores",
        ["plan", "experiment=x"],
        "MLP takes no argument 'target' (model.target, configs/experiment/x.yaml:3). Did you mean '_target_'?",
        {"experiment/x.yaml": PACKAGE + "model:\n  target: torch.nn.Linear\n"},
    ),
    Case(
        "misspelt module of torch",
        ["optimizer._target_=torch.optm.AdamW"],
        "_target_ torch.optm.AdamW: package torch has no 'optm' (optimizer._target_, command line). Did you mean 'optim'?",
    ),
    Case(
        "unknown option",
        ["model=cmn"],
        "there is no model called 'cmn' (command line). There are: cnn, gpt, mlp. Did you mean 'cnn'?",
    ),
    Case(
        "unknown group with a package",
        ["modle@x=cnn"],
        "there is no group 'modle' (command line). There are: experiment, callbacks, checkpoint, data, debug, loggers, loop, model, optimizer, parallel, precision, scheduler, sparsity. Did you mean 'model'?",
    ),
    Case(
        "group that is no folder",
        ["+mine/group=x"],
        "there is no group 'mine/group' (command line). There are: experiment, callbacks, checkpoint, data, debug, loggers, loop, model, optimizer, parallel, precision, scheduler, sparsity.",
    ),
    Case(
        "key of an open section",
        ["optimizer.lrr=1"],
        "there is no key 'optimizer.lrr' (command line). Did you mean 'optimizer.lr'? To add it, write '+optimizer.lrr=1'.",
    ),
    Case(
        "key below null",
        ["scheduler.warmup=3"],
        "scheduler.warmup=3: scheduler is null (command line). Choose one first, as in scheduler=NAME.",
    ),
    Case(
        "key below a value",
        ["optimizer.lr.x=3"],
        "optimizer.lr.x=3: optimizer.lr is not a mapping (command line). Write optimizer.lr=VALUE.",
    ),
    Case(
        "+ on a key that is there",
        ["+seed=3"],
        "seed exists already (command line). Leave out the '+'.",
    ),
    Case(
        "+ on a group that is there",
        ["+model=mlp"],
        "+model=mlp: model is chosen already (command line). Leave out the '+'.",
    ),
    Case(
        "removing what is not there",
        ["~model.depth"],
        "there is no 'model.depth' to remove (command line). Did you mean 'model.dropout'?",
    ),
    Case(
        "section set to null",
        ["loop=null"],
        "loop is a section, and never null (command line).",
    ),
    Case(
        "component set to null",
        ["fit", "model=null"],
        "model is null, but nothing runs without (command line). Choose one with model=NAME; `train list model` shows them.",
    ),
    Case(
        "null as a key within braces",
        ["+model.inner={a: {null: 2}}"],
        "model.inner.a has the key null, but keys are texts (command line).",
    ),
    Case(
        "mapping for an experiment",
        ["experiment={seed: 3}"],
        "experiment is a group, and takes the name of an option (command line). Choose one of: char_gpt, digits, digits_mlp, text.",
    ),
    Case(
        "hydra's own key",
        ["hydra.run.dir=x"],
        "hydra.run.dir=x has no effect (command line). Hydra only composes the config here.",
    ),
    # What is no override
    Case(
        "no =",
        ["digit"],
        "'digit' stands where key=value belongs (command line). Did you mean 'experiment=digits'?",
    ),
    Case(
        "nothing before =",
        ["=3"],
        "'=3' is no override (command line). Write key=value, group=option, +key=value for a new key, key+=value to add to a list, or ~key to remove.",
    ),
    Case(
        "spaces and brackets",
        ["name=a b(c"],
        "cannot read the override 'name=a b(c' (command line). A text with spaces, letters beyond a-z or any of , = [ ] { } ( ) # & needs two pairs of quotes: 'name=\"a b(c\"'.",
    ),
    Case(
        "letters beyond ASCII",
        ["name=é"],
        "cannot read the override 'name=é' (command line). A text with spaces, letters beyond a-z or any of , = [ ] { } ( ) # & needs two pairs of quotes: 'name=\"é\"'.",
    ),
    Case(
        "several values",
        ["optimizer.lr=1,2"],
        "'optimizer.lr=1,2' gives several values, but one run takes one (command line). For a list write 'optimizer.lr=[1,2]', for a text 'optimizer.lr=\"1,2\"', or -m to run each (train fit -m).",
    ),
    Case(
        "odd key",
        ["a b=3"],
        "cannot read the override 'a b=3' (command line). 'a b' is no key: keys are words joined by dots.",
    ),
    Case(
        "one item of a list",
        ["model.hidden[0]=3"],
        "cannot read the override 'model.hidden[0]=3' (command line). A single item cannot be set: write the whole list, model.hidden=[...], or add to its end, model.hidden+=ITEM.",
    ),
    Case(
        "one item of a list by a dot",
        ["model.hidden.0=3"],
        "model.hidden.0=3: model.hidden is a list, whose items are not set singly (command line). Write the whole list, model.hidden=[...], or add to its end, model.hidden+=ITEM.",
    ),
    # Adding to a list
    Case(
        "append to a number",
        ["seed+=3"],
        "seed+=3: seed is 0, and no list (command line). Write seed=3.",
    ),
    Case(
        "append to an unknown key",
        ["model.hiden+=3"],
        "there is no key 'model.hiden' (command line). Did you mean 'model.hidden'? To make the list, write '+model.hiden=[3]'.",
    ),
    Case(
        "append to a key that no section has",
        ["loop.max_tim+=3"],
        "there is no key 'loop.max_tim' (command line). Did you mean 'loop.max_time'?",
    ),
    Case(
        "append to a group",
        ["model+=cnn"],
        "model+=cnn: model is a group, and no list (command line). Choose one with model=NAME.",
    ),
    Case(
        "append below null",
        ["scheduler.milestones+=3"],
        "scheduler.milestones+=3: scheduler is null (command line).",
    ),
    Case(
        "append of a wrong type",
        ["checkpoint.fixed_steps+=soon"],
        "checkpoint.fixed_steps.0 is 'soon', but it must be a whole number (command line).",
    ),
    Case(
        "append with + before",
        ["+load.states+=model"],
        "cannot read the override '+load.states+=model' (command line). To add to the end of a list, write 'load.states+=model'.",
    ),
    Case(
        "append of several values",
        ["checkpoint.fixed_steps+=1,2"],
        "'checkpoint.fixed_steps+=1,2' gives several values, but one run takes one (command line). For a list write 'checkpoint.fixed_steps+=[1,2]', for a text 'checkpoint.fixed_steps+=\"1,2\"', or -m to run each (train fit -m).",
    ),
    Case(
        "sizes of batches",
        ["data.batch_size=0", "+data.val_batch_size=1.5"],
        "2 mistakes:\n"
        "  - data.batch_size is 0, but it must be a whole number of at least 1 (command line).\n"
        "  - data.val_batch_size is 1.5, but it must be a whole number of at least 1 (command line).",
    ),
    Case(
        "path of a key with slashes",
        ["optimizer/lr=3"],
        "there is no group 'optimizer/lr' (command line). Parts of a key are joined by dots: 'optimizer.lr=3'.",
    ),
    Case(
        "round brackets for a list",
        ["checkpoint.fixed_steps=(1,2)"],
        "cannot read the override 'checkpoint.fixed_steps=(1,2)' (command line). For a list write 'checkpoint.fixed_steps=[1,2]'.",
    ),
    Case(
        "bracket not closed on the command line",
        ["checkpoint.fixed_steps=[1,2"],
        "cannot read the override 'checkpoint.fixed_steps=[1,2' (command line). A bracket is not closed, or one too many is: 'checkpoint.fixed_steps=[1,2]', or as a text 'checkpoint.fixed_steps=\"[1,2\"'.",
    ),
    Case(
        "home directory that no shell has put in",
        ["run_dir=~/x"],
        "cannot read the override 'run_dir=~/x' (command line). Write the whole path, such as run_dir=$HOME/x.",
    ),
    Case(
        "item of a list of another type",
        ["plan", "model.hidden=[64,x]", "optimizer.betas=[0.9]"],
        "2 mistakes:\n"
        "  - model.hidden.1 is 'x', but it must be a whole number (command line).\n"
        "  - optimizer.betas has 1 value, but it must have 2 (command line).",
    ),
    Case(
        "item of a list in a file",
        ["plan", "experiment=x"],
        "model.hidden.1 is 2.5, but it must be a whole number (configs/experiment/x.yaml:5).",
        {"experiment/x.yaml": f"{PACKAGE}model:\n  hidden:\n    - 64\n    - 2.5\n"},
    ),
    Case(
        "leave for keys that are not there",
        ["resume_allow=[optimzer.lr,loop.evl_*,seed,model.width,'*.lr']"],
        "2 mistakes:\n"
        "  - resume_allow names 'optimzer.lr', and there is no such key (command line). Did you mean 'optimizer'?\n"
        "  - resume_allow names 'loop.evl_*', and there is no such key (command line). Did you mean 'loop.eval_steps'?",
    ),
    Case(
        "misspelt key in an interpolation",
        ["checkpoint.save_interval='${loop.maxduration}'"],
        "checkpoint.save_interval: ${loop.maxduration} names a key that is not there: loop.maxduration (command line). Did you mean 'loop.max_duration'?",
    ),
    Case(
        "no model in a file",
        ["fit", "experiment=x"],
        "model is null, but nothing runs without (configs/experiment/x.yaml:2). Choose one with model=NAME; `train list model` shows them.",
        {"experiment/x.yaml": f"{PACKAGE}model: null\n"},
    ),
    Case(
        "no model in a defaults list",
        ["fit", "experiment=x"],
        "model is null, but nothing runs without (configs/experiment/x.yaml:3). Choose one with model=NAME; `train list model` shows them.",
        {"experiment/x.yaml": f"{PACKAGE}defaults:\n  - override /model: null\n"},
    ),
    Case(
        "difference from what is neither run nor checkpoint",
        ["--diff", "."],
        ". is neither a run directory nor a checkpoint (--diff). Name a run directory, which holds a config.yaml, a checkpoint in one, or RUN@latest.",
    ),
    Case(
        "component whose target is misspelt",
        ["model=mine"],
        "model has no _target_ (model.target, configs/model/mine.yaml:1). Write '_target_' for 'target'.",
        {"model/mine.yaml": "target: torch.nn.Linear\nin_features: 3\n"},
    ),
    Case(
        "group's file that names its group",
        ["model=mine"],
        "model has no _target_ (model.model, configs/model/mine.yaml:1). Leave out 'model:' and indent the rest less: a group's file is merged into model already.",
        {"model/mine.yaml": "model:\n  _target_: torch.nn.Linear\n"},
    ),
    Case(
        "callback that does not say what it is",
        ["+callbacks.mine.every=3"],
        "callbacks.mine has no _target_ (callbacks.mine.every, command line). Choose one with callbacks=NAME, or say what to make: _target_: package.module.Class.",
    ),
    Case(
        "file that ends in yml",
        ["experiment=x"],
        "configs/experiment/x.yml is not read (command line). Rename it to x.yaml.",
        {"experiment/x.yml": PACKAGE, "experiment/y.yaml": PACKAGE},
    ),
    Case(
        "path of an experiment's file",
        ["experiment=configs/experiment/digits"],
        "there is no experiment called 'configs/experiment/digits' (command line). There are: char_gpt, digits, digits_mlp, text. Did you mean 'digits'?",
    ),
    Case(
        "byte-order mark in the middle",
        ["experiment=x"],
        "character U+FEFF has no place in YAML (configs/experiment/x.yaml:3). Remove it.",
        {"experiment/x.yaml": f"{PACKAGE}seed: 1\n\ufeff"},
    ),
    Case(
        "colon without a space",
        ["experiment=x"],
        "the file is a single value, but it must be a mapping of keys to values (configs/experiment/x.yaml:2). A key is followed by a colon and a space.",
        {"experiment/x.yaml": f"{PACKAGE}model:mlp\n"},
    ),
    Case(
        "comma for a point",
        ["experiment=x"],
        "optimizer.lr: 0,001 is read by YAML as a text, not as a number (configs/experiment/x.yaml:3). Write 0.001, or '0,001' in quotes.",
        {"experiment/x.yaml": f"{PACKAGE}optimizer:\n  lr: 0,001\n"},
    ),
    Case(
        "what other trainers call it",
        ["device=gpu", "precision.dtype=float16", "precision=bf16-mixed"],
        "3 mistakes:\n"
        "  - there is no precision called 'bf16-mixed' (command line). There are: bf16, fp16, fp32. Did you mean 'bf16'?\n"
        "  - device is 'gpu', but it must be one of auto, cpu, cuda, mps (command line). Did you mean 'cuda'?\n"
        "  - precision.dtype is 'float16', but it must be one of fp32, bf16, fp16 (command line). Did you mean 'fp16'?",
    ),
    Case(
        "warm-up in percent",
        ["plan", "scheduler=warmup_cosine", "scheduler.warmup=5%"],
        "scheduler.warmup is '5%', but it must be a whole number (command line). Or a duration, such as 500st or 1ep.",
    ),
    Case(
        "Hydra's own values in an interpolation",
        ["run_dir='runs/${hydra:job.num}'"],
        "run_dir: runs/${hydra:job.num} asks for Hydra's own settings, and there are none (command line). Hydra only composes the config here.",
    ),
    Case(
        "Hydra's own groups on the command line",
        ["hydra/launcher=submitit"],
        "hydra/launcher=submitit has no effect (command line). Hydra only composes the config here.",
    ),
    Case(
        "range that is not closed",
        ["fit", "-m", "seed=range(3"],
        "cannot read the override 'seed=range(3' (command line). A bracket is not closed, or one too many is: 'seed=range(3)', or as a text 'seed=\"range(3\"'.",
    ),
    Case(
        "interpolation of another type",
        ["name=x", "seed='${name}'"],
        "seed: ${name} comes to 'x', but it must be a whole number (command line).",
    ),
    Case(
        "empty name",
        ["name="],
        "name is empty (command line). Write name=NAME, or leave it out.",
    ),
    Case(
        "empty run directory, which would be the current one",
        ["run_dir="],
        "run_dir is empty (command line). Write run_dir=NAME, or leave it out.",
    ),
    Case(
        "empty folder of checkpoints",
        ["checkpoint.folder="],
        "checkpoint.folder is empty (command line). Write null for `checkpoints/` in the run directory.",
    ),
    Case(
        "blank folder of results",
        ["validate.folder=' '"],
        "validate.folder is empty (command line). Write null for `validation/` in the run directory.",
    ),
    Case(
        "override before a choice",
        ["experiment=x"],
        "an override of model stands before 'optimizer@foo' (configs/experiment/x.yaml:3). Move overrides to the end of the list.",
        {"experiment/x.yaml": PACKAGE + "defaults:\n  - override /model: mlp\n  - /optimizer@foo: sgd\n"},
    ),
    Case(
        "override of what the primary config does not choose",
        ["experiment=x"],
        "nothing chooses a model that could be overridden (configs/experiment/x.yaml:3). Write '- /model: mlp' without override, or choose one in config.yaml.",
        {
            "config.yaml": "seed: 1\n",
            "experiment/x.yaml": PACKAGE + "defaults:\n  - override /model: mlp\n",
        },
    ),
    Case(
        "Hydra's own settings in a file",
        ["experiment=x"],
        "hydra.sweeper has no effect (configs/experiment/x.yaml:3). Hydra only composes the config here.",
        {"experiment/x.yaml": PACKAGE + "hydra:\n  sweeper:\n    params:\n      seed: 1,2\n"},
    ),
    Case(
        "Hydra's own groups in a defaults list",
        [],
        "hydra/launcher has no effect (configs/config.yaml:3). Hydra only composes the config here.",
        {"config.yaml": "defaults:\n  - train_schema\n  - override hydra/launcher: submitit_slurm\n"},
    ),
    Case(
        "search path that is not there",
        [],
        "hydra.searchpath names elsewhere/configs, which is no folder (configs/config.yaml:5). A path counts from the current folder; pkg://NAME is an installed package.",
        {"config.yaml": "defaults:\n  - train_schema\nhydra:\n  searchpath:\n    - elsewhere/configs\n"},
    ),
    Case(
        "search path that is no list",
        [],
        "hydra.searchpath must be a list (configs/config.yaml:4). Write hydra.searchpath: [FOLDER].",
        {"config.yaml": "defaults:\n  - train_schema\nhydra:\n  searchpath: elsewhere\n"},
    ),
    Case(
        "argument that a component from a group's file lacks",
        ["plan", "model=bare"],
        "Linear: missing required arguments: 'in_features', 'out_features' (model._target_, configs/model/bare.yaml:2).",
        {"model/bare.yaml": "# A layer.\n_target_: torch.nn.Linear\n"},
    ),
    Case(
        "fit without an optimizer",
        ["fit", "optimizer=null"],
        "optimizer is null, but nothing trains without (command line). Choose one with optimizer=NAME; `train list optimizer` shows them.",
    ),
    # Types and ranges
    Case(
        "whole number",
        ["seed=abc"],
        "seed is 'abc', but it must be a whole number (command line).",
    ),
    Case(
        "fraction for a whole number",
        ["seed=1.5"],
        "seed is 1.5, but it must be a whole number (command line).",
    ),
    Case(
        "true for a whole number",
        ["seed=true"],
        "seed is true, but it must be a whole number (command line).",
    ),
    Case(
        "text in quotes for a number",
        ["seed='3'"],
        "seed is '3', but it must be a whole number (command line).",
    ),
    Case(
        "null for a whole number",
        ["seed=null"],
        "seed is null, but it must be a whole number (command line).",
    ),
    Case(
        "too large a number",
        ["seed=99999999999999999999999"],
        "seed is 99999999999999999999999, but it must fit into 64 bits (command line).",
    ),
    Case(
        "true or false",
        ["deterministic=no"],
        "deterministic is 'no', but it must be true or false (command line). Write false.",
    ),
    Case(
        "1 for true",
        ["deterministic=1"],
        "deterministic is 1, but it must be true or false (command line). Write true.",
    ),
    Case(
        "choice",
        ["device=cudaa"],
        "device is 'cudaa', but it must be one of auto, cpu, cuda, mps (command line). Did you mean 'cuda'?",
    ),
    Case(
        "number for a text",
        ["name=1.5"],
        "name is 1.5, but it must be a text or null (command line). Write name='\"1.5\"' if a text is meant.",
    ),
    Case(
        "fraction for a text, as it was written",
        ["name=1.50e1"],
        "name is 15.0, but it must be a text or null (command line). Write name='\"1.50e1\"' if a text is meant.",
    ),
    Case(
        "fraction for a text in a file",
        ["experiment=x"],
        "name is 1.5, but it must be a text or null (configs/experiment/x.yaml:2). Put it in quotes if a text is meant.",
        {"experiment/x.yaml": PACKAGE + "name: 1.5\n"},
    ),
    Case(
        "None for null",
        [
            "name=None",
            "checkpoint.folder=None",
            "validate.folder=None",
            "checkpoint.keep_best.metric=None",
            "data.worker_timeout=None",
            "checkpoint.max_checkpoints=None",
            "loop.hard_stop=None",
            "callbacks.x=None",
            "+model.sizes={a:None}",
            "resume_allow+=None",
        ],
        "10 mistakes:\n"
        "  - name: None is a text here, and not null (command line). Write null, or '\"None\"' for the text.\n"
        "  - checkpoint.folder: None is a text here, and not null (command line). Write null, or '\"None\"' for the text.\n"
        "  - validate.folder: None is a text here, and not null (command line). Write null, or '\"None\"' for the text.\n"
        "  - checkpoint.keep_best.metric: None is a text here, and not null (command line). Write null, or '\"None\"' for the text.\n"
        "  - data.worker_timeout: None is a text here, and not null (command line). Write null, or '\"None\"' for the text.\n"
        "  - checkpoint.max_checkpoints: None is a text here, and not null (command line). Write null, or '\"None\"' for the text.\n"
        "  - loop.hard_stop: None is a text here, and not null (command line). Write null, or '\"None\"' for the text.\n"
        "  - callbacks.x: None is a text here, and not null (command line). Write null, or '\"None\"' for the text.\n"
        "  - model.sizes.a: None is a text here, and not null (command line). Write null, or '\"None\"' for the text.\n"
        "  - resume_allow: None is a text here, and not null (command line). Write null, or '\"None\"' for the text.",
    ),
    Case(
        "None for null in ckpt",
        ["ckpt=None"],
        "ckpt: None is a text here, and not null (command line). Write ckpt=null.",
    ),
    Case(
        "None for no option",
        ["scheduler=None"],
        "there is no scheduler called 'None' (command line). For none write scheduler=null.",
    ),
    Case(
        "None for no experiment",
        ["experiment=None"],
        "there is no experiment called 'None' (command line). Leave it out.",
    ),
    Case(
        "None for null in a file",
        ["experiment=x"],
        "4 mistakes:\n"
        "  - name: None is read by YAML as a text, not as null (configs/experiment/x.yaml:2). Write null, or 'None' in quotes.\n"
        "  - model.hidden: None is read by YAML as a text, not as null (configs/experiment/x.yaml:4). Write null, or 'None' in quotes.\n"
        "  - optimizer.betas.1: None is read by YAML as a text, not as null (configs/experiment/x.yaml:6). Write null, or 'None' in quotes.\n"
        "  - loop.hard_stop: None is read by YAML as a text, not as null (configs/experiment/x.yaml:8). Write null, or 'None' in quotes.",
        {
            "experiment/x.yaml": PACKAGE
            + "name: None\nmodel:\n  hidden: None\noptimizer:\n  betas: [0.9, None]\nloop:\n  hard_stop: None\n"
        },
    ),
    Case(
        "None for no option in a defaults list",
        ["experiment=x"],
        "defaults.0.override /scheduler: None is read by YAML as a text, not as null (configs/experiment/x.yaml:3). Write null, or 'None' in quotes.",
        {"experiment/x.yaml": PACKAGE + "defaults:\n  - override /scheduler: None\n"},
    ),
    Case(
        "experiment of a primary config, and another",
        ["-cn", "mine", "experiment=digits"],
        "experiment is chosen already (configs/mine.yaml:5). Remove the line, and choose it on the command line alone.",
        {
            "mine.yaml": "defaults:\n  - train_schema\n  - model: mlp\n  - data: digits\n  - experiment: x\n",
            "experiment/x.yaml": PACKAGE + "seed: 1\n",
        },
    ),
    Case(
        "date for a text, read as a number",
        ["name=2024_06_01"],
        "name: 2024_06_01 is read as the number 20240601 (command line). Write name=20240601, or name='\"2024_06_01\"' for the text.",
    ),
    Case(
        "date below a section, read as a number",
        ["checkpoint.suffix=2024_06_01"],
        "checkpoint.suffix: 2024_06_01 is read as the number 20240601 (command line). Write checkpoint.suffix=20240601, or checkpoint.suffix='\"2024_06_01\"' for the text.",
    ),
    Case(
        "texts of a list, read as numbers",
        ["resume_allow=[seed,1_0]"],
        "resume_allow.1: 1_0 is read as the number 10 (command line). Write 10, or '\"1_0\"' for the text.",
    ),
    Case(
        "a text read as a number, put at the end of a list",
        ["resume_allow+=1_0"],
        "resume_allow.0: 1_0 is read as the number 10 (command line). Write 10, or '\"1_0\"' for the text.",
    ),
    Case(
        "texts of a file, read as numbers",
        ["experiment=x"],
        "4 mistakes:\n"
        "  - name: 0x1F is read by YAML as the number 31 (configs/experiment/x.yaml:2). Write 31, or '0x1F' in quotes.\n"
        "  - resume_allow.1: +5 is read by YAML as the number 5 (configs/experiment/x.yaml:6). Write 5, or '+5' in quotes.\n"
        "  - checkpoint.name: 2024_06_01 is read by YAML as the number 20240601 (configs/experiment/x.yaml:4). Write 20240601, or '2024_06_01' in quotes.\n"
        "  - checkpoint.suffix: 0b11 is read by YAML as the number 3 (configs/experiment/x.yaml:5). Write 3, or '0b11' in quotes.",
        {
            "experiment/x.yaml": PACKAGE
            + "name: 0x1F\ncheckpoint:\n  name: 2024_06_01\n  suffix: 0b11\nresume_allow: [seed, +5]\n"
        },
    ),
    Case(
        "one for a list",
        ["trust=mine"],
        "trust is 'mine', but it must be a list of texts (command line). Write [mine].",
    ),
    Case(
        "null in a list",
        ["trust=[null]"],
        "trust.0 is null, but it must be a text (command line).",
    ),
    Case(
        "truth in a list of numbers",
        ["checkpoint.fixed_steps=[true]"],
        "checkpoint.fixed_steps.0 is true, but it must be a whole number (command line).",
    ),
    Case(
        "duration",
        ["loop.max_duration=3days"],
        "loop.max_duration: '3days' is not a duration; expected a number of steps, or a string such as 500st, 3ep, 0.25ep, 1e9tok, 2048sp, 90s, 30min, 1h30m (command line).",
    ),
    Case(
        "time without a unit",
        ["loop.max_time=3600"],
        "loop.max_time is 3600, but it is counted in seconds (command line). Write loop.max_time=3600s.",
    ),
    Case(
        "null duration",
        ["loop.max_duration=null"],
        "loop.max_duration is null, but it must be a duration (command line).",
    ),
    Case(
        "out of range",
        ["loop.grad_accum_steps=0"],
        "loop.grad_accum_steps is 0, but it must be a finite number of at least 1 (command line).",
    ),
    Case(
        "negative",
        ["seed=-1"],
        "seed is -1, but it must be a finite number of at least 0 (command line).",
    ),
    Case(
        "NaN in a section",
        ["precision.clip_norm=nan"],
        "precision.clip_norm is nan, but it must be finite (command line).",
    ),
    Case(
        "infinity in a component",
        ["optimizer.lr=inf"],
        "optimizer.lr is inf, but it must be finite (command line).",
    ),
    Case(
        "infinity deep in a component",
        ["+model.extra=[1,{a: -inf}]"],
        "model.extra.1.a is -inf, but it must be finite (command line).",
    ),
    Case(
        "misspelt setting of a parameter group",
        ["plan", "+param_groups={*bias:{lrr:0}}"],
        "AdamW takes no argument 'lrr' (param_groups.*bias.lrr, command line). Did you mean 'lr'?",
    ),
    Case(
        "setting of a parameter group of a wrong type",
        ["plan", "+param_groups={*bias:{lr:high}}"],
        "param_groups.*bias.lr is 'high', but it must be a number (command line).",
    ),
    Case(
        "NaN in param_groups",
        ["param_groups={bias: {lr: nan}}"],
        "param_groups.bias.lr is nan, but it must be finite (command line).",
    ),
    Case(
        "octal in a component",
        ["+model.depth=014"],
        "model.depth: 014 is a text here, and no number (command line). Write 14, or '\"014\"' for the text.",
    ),
    Case(
        "no in a component",
        ["+model.bias=no"],
        "model.bias: no is a text here, and not false (command line). Write false, or '\"no\"' for the text.",
    ),
    Case(
        "key that is no text",
        ["+model.map={true: 1}"],
        "model.map has the key true, but keys are texts (command line). Say it in a YAML file: 'true'.",
    ),
    Case(
        "both clippings",
        ["precision.clip_norm=1", "precision.clip_value=1"],
        "precision.clip_norm and precision.clip_value are both set (command line). Set one of them to null.",
    ),
    Case(
        "mixed precision of shards without shards",
        ["parallel=ddp", "precision=bf16", "parallel.mixed_precision=true"],
        "parallel.mixed_precision is of fsdp, and parallel.strategy is ddp (command line). "
        "Set parallel.strategy=fsdp, or parallel.mixed_precision=false; precision=bf16 works with both.",
    ),
    Case(
        "ephemeral slower than permanent",
        ["checkpoint.save_interval=5", "checkpoint.ephemeral_save_interval=10"],
        "checkpoint.ephemeral_save_interval (10 steps) must be shorter than checkpoint.save_interval (5 steps) (command line). Make it shorter, or set checkpoint.save_interval=null.",
    ),
    Case(
        "missing value",
        ["fit", "experiment=char_gpt"],
        "data.path must be given ({shipped}/data/characters.yaml:4). Add data.path=VALUE to the command line.",
    ),
    # Interpolations
    Case(
        "unknown interpolation",
        ["run_dir='${nope}'"],
        "run_dir: ${nope} names a key that is not there: nope (command line).",
    ),
    Case(
        "variable that is not set",
        ['name="${oc.env:NOPE_1}"'],
        "name: the environment variable NOPE_1 is not set (command line). Set it, or write ${oc.env:NOPE_1,DEFAULT}.",
    ),
    Case(
        "circle of two",
        ["name='${run_dir}'"],
        "name: ${run_dir} leads back to itself (command line). Write the value in one of the keys.",
    ),
    Case(
        "interpolation without an end",
        ["run_dir='${name'"],
        "run_dir: '${name' is no interpolation: no viable alternative at input '${name' (command line). Write ${key}.",
    ),
    Case(
        "unknown resolver",
        ["name='${now_:x}'"],
        "name: ${now_:x} asks for 'now_', which is no resolver (command line). Known: ${key}, ${oc.env:NAME,DEFAULT}, ${now:%Y-%m-%d}. Define your own as 'def now_(…)' in configs/resolvers.py.",
    ),
    Case(
        "circle in a file",
        ["experiment=x"],
        "loop.hard_stop: ${loop.max_time} leads back to itself (configs/experiment/x.yaml:3). Write the value in one of the keys.",
        {
            "experiment/x.yaml": "# @package _global_\nloop:\n  hard_stop: ${loop.max_time}\n  max_time: ${loop.hard_stop}\n"
        },
    ),
    Case(
        "interpolation in a component",
        ["experiment=x"],
        "model.hidden: ${data.nope} names a key that is not there: data.nope (configs/experiment/x.yaml:3).",
        {"experiment/x.yaml": "# @package _global_\nmodel:\n  hidden: ${data.nope}\n"},
    ),
    # What YAML reads otherwise, or not at all
    Case(
        "sexagesimal",
        ["experiment=x"],
        "loop.max_time: 12:30:45 is read by YAML as the number 45045 (configs/experiment/x.yaml:3). Write 12h30m45s, or put it in quotes.",
        {"experiment/x.yaml": "# @package _global_\nloop:\n  max_time: 12:30:45\n"},
    ),
    Case(
        "sexagesimal of two",
        ["experiment=x"],
        "loop.max_time: 12:30 is read by YAML as the number 750 (configs/experiment/x.yaml:3). Write 12h30m or 12m30s, or put it in quotes.",
        {"experiment/x.yaml": "# @package _global_\nloop:\n  max_time: 12:30\n"},
    ),
    Case(
        "octal",
        ["experiment=x"],
        "seed: 014 is read by YAML as the number 12 (octal) (configs/experiment/x.yaml:2). Write 14, or '014' in quotes.",
        {"experiment/x.yaml": "# @package _global_\nseed: 014\n"},
    ),
    Case(
        "octal of the new kind",
        ["experiment=x"],
        "seed: 0o14 is read by YAML as a text, not as a number (configs/experiment/x.yaml:2). Write 12, or '0o14' in quotes.",
        {"experiment/x.yaml": "# @package _global_\nseed: 0o14\n"},
    ),
    Case(
        "leading zero",
        ["experiment=x"],
        "model.hidden.0: 08 is read by YAML as a text, not as a number (configs/experiment/x.yaml:3). Write 8, or '08' in quotes.",
        {"experiment/x.yaml": "# @package _global_\nmodel:\n  hidden: [08]\n"},
    ),
    Case(
        "thousands",
        ["experiment=x"],
        "loop.eval_steps: 1,000 is read by YAML as a text, not as a number (configs/experiment/x.yaml:3). Write 1000, or '1,000' in quotes.",
        {"experiment/x.yaml": "# @package _global_\nloop:\n  eval_steps: 1,000\n"},
    ),
    Case(
        "sign before a dot",
        ["experiment=x"],
        "optimizer.lr: +.5 is read by YAML as a text, not as a number (configs/experiment/x.yaml:3). Write 0.5, or '+.5' in quotes.",
        {"experiment/x.yaml": "# @package _global_\noptimizer:\n  lr: +.5\n"},
    ),
    Case(
        "inf as a text",
        ["experiment=x"],
        "optimizer.lr: inf is read by YAML as a text, not as a number (configs/experiment/x.yaml:3). A number must be finite; if a text is meant, write 'inf' in quotes.",
        {"experiment/x.yaml": "# @package _global_\noptimizer:\n  lr: inf\n"},
    ),
    Case(
        "infinity",
        ["experiment=x"],
        "optimizer.lr is inf, but it must be finite (configs/experiment/x.yaml:3).",
        {"experiment/x.yaml": "# @package _global_\noptimizer:\n  lr: .inf\n"},
    ),
    Case(
        "overflow",
        ["experiment=x"],
        "optimizer.lr is inf, but it must be finite (configs/experiment/x.yaml:3).",
        {"experiment/x.yaml": "# @package _global_\noptimizer:\n  lr: 1e400\n"},
    ),
    Case(
        "no",
        ["experiment=x"],
        "loop.eval_at_start: no is read by YAML as false (configs/experiment/x.yaml:3). Write false, or 'no' in quotes.",
        {"experiment/x.yaml": "# @package _global_\nloop:\n  eval_at_start: no\n"},
    ),
    Case(
        "On",
        ["experiment=x"],
        "model.bias: On is read by YAML as true (configs/experiment/x.yaml:3). Write true, or 'On' in quotes.",
        {"experiment/x.yaml": "# @package _global_\nmodel:\n  bias: On\n"},
    ),
    Case(
        "no as a key",
        ["experiment=x"],
        "model: the key no is read by YAML as false (configs/experiment/x.yaml:3). Put it in quotes: 'no'.",
        {"experiment/x.yaml": "# @package _global_\nmodel:\n  no: 1\n"},
    ),
    Case(
        "number as a key",
        ["experiment=x"],
        "model: the key 1.5 is read by YAML as the number 1.5 (configs/experiment/x.yaml:3). Put it in quotes: '1.5'.",
        {"experiment/x.yaml": "# @package _global_\nmodel:\n  1.5: 1\n"},
    ),
    Case(
        "null as a key",
        ["experiment=x"],
        "model: the key ~ is read by YAML as null (configs/experiment/x.yaml:3). Put it in quotes: '~'.",
        {"experiment/x.yaml": "# @package _global_\nmodel:\n  ~: 1\n"},
    ),
    Case(
        "list as a key",
        ["experiment=x"],
        "model: a key must be a single text (configs/experiment/x.yaml:3).",
        {"experiment/x.yaml": "# @package _global_\nmodel:\n  ? [a, b]\n  : 1\n"},
    ),
    Case(
        "key twice",
        ["experiment=x"],
        "seed: the key stands twice, first in line 2 (configs/experiment/x.yaml:4). Remove one of them.",
        {"experiment/x.yaml": "# @package _global_\nseed: 1\nname: x\nseed: 2\n"},
    ),
    Case(
        "key twice in a group's file",
        ["loop=twice"],
        "max_duration: the key stands twice, first in line 1 (configs/loop/twice.yaml:2). Remove one of them.",
        {"loop/twice.yaml": "max_duration: 3\nmax_duration: 4\n"},
    ),
    Case(
        "tab",
        ["experiment=x"],
        "this is not valid YAML: found character '\\t' that cannot start any token (configs/experiment/x.yaml:3). Use spaces, not tabs.",
        {"experiment/x.yaml": "# @package _global_\nloop:\n\teval_steps: 3\n"},
    ),
    Case(
        "byte-order mark",
        ["experiment=x"],
        "the file begins with a byte-order mark (configs/experiment/x.yaml:1). Save it as UTF-8 without one: what stands on the first line would be overlooked.",
        {"experiment/x.yaml": "﻿# @package _global_\nseed: 1\n"},
    ),
    Case(
        "Latin-1",
        ["experiment=x"],
        "byte 0xe9 is not UTF-8 (configs/experiment/x.yaml:2). Save the file as UTF-8.",
        {"experiment/x.yaml": b"# @package _global_\nname: \xe9\n"},
    ),
    Case(
        "UTF-16",
        ["experiment=x"],
        "configs/experiment/x.yaml is UTF-16. Save it as UTF-8.",
        {
            "experiment/x.yaml": b"\xff\xfe#\x00 \x00@\x00p\x00a\x00c\x00k\x00a\x00g\x00e\x00 \x00_\x00g\x00l\x00o\x00b\x00a\x00l\x00_\x00\n\x00n\x00a\x00m\x00e\x00:\x00 \x00x\x00\n\x00"
        },
    ),
    Case(
        "control character",
        ["experiment=x"],
        "character U+0007 has no place in YAML (configs/experiment/x.yaml:2). Remove it.",
        {"experiment/x.yaml": "# @package _global_\nname: a\u0007b\n"},
    ),
    Case(
        "colon in a text",
        ["experiment=x"],
        "this is not valid YAML: mapping values are not allowed here (configs/experiment/x.yaml:2). A key is followed by a colon and a space, a text with ': ' in it needs quotes, and keys stand in one column.",
        {"experiment/x.yaml": "# @package _global_\nname: a: b\n"},
    ),
    Case(
        "no space after the colon",
        ["experiment=x"],
        "this is not valid YAML: mapping values are not allowed here (configs/experiment/x.yaml:4). A key is followed by a colon and a space, a text with ': ' in it needs quotes, and keys stand in one column.",
        {"experiment/x.yaml": "# @package _global_\nloop:\n  eval_steps:3\n  hard_stop: 5\n"},
    ),
    Case(
        "wrong indent",
        ["experiment=x"],
        "this is not valid YAML: mapping values are not allowed here (configs/experiment/x.yaml:4). A key is followed by a colon and a space, a text with ': ' in it needs quotes, and keys stand in one column.",
        {"experiment/x.yaml": "# @package _global_\nloop:\n  eval_steps: 3\n   hard_stop: 5\n"},
    ),
    Case(
        "bracket not closed",
        ["experiment=x"],
        "this is not valid YAML: expected ',' or ']', but got '<stream end>' (configs/experiment/x.yaml:3). A quote or bracket is not closed.",
        {"experiment/x.yaml": "# @package _global_\ntrust: [a, b\n"},
    ),
    Case(
        "quote not closed",
        ["experiment=x"],
        "this is not valid YAML: found unexpected end of stream (configs/experiment/x.yaml:3). A quote or bracket is not closed.",
        {"experiment/x.yaml": "# @package _global_\nname: 'x\n"},
    ),
    Case(
        "@ before a text",
        ["experiment=x"],
        "this is not valid YAML: found character '@' that cannot start any token (configs/experiment/x.yaml:2). Put a text that begins with this character in quotes.",
        {"experiment/x.yaml": "# @package _global_\nname: @home\n"},
    ),
    Case(
        "unknown tag",
        ["experiment=x"],
        "name: the tag !ruby is not known in a config (configs/experiment/x.yaml:2). Remove it; a text that begins with ! needs quotes.",
        {"experiment/x.yaml": "# @package _global_\nname: !ruby x\n"},
    ),
    Case(
        "code in a tag",
        ["experiment=x"],
        "name: the tag !!python/object/apply:os.system is not known in a config (configs/experiment/x.yaml:2). Remove it; a text that begins with ! needs quotes.",
        {"experiment/x.yaml": "# @package _global_\nname: !!python/object/apply:os.system [ls]\n"},
    ),
    Case(
        "alias without anchor",
        ["experiment=x"],
        "this is not valid YAML: found undefined alias 'best' (configs/experiment/x.yaml:2). An alias (*name) needs its anchor (&name) above it; a text with * needs quotes.",
        {"experiment/x.yaml": "# @package _global_\nckpt: *best\n"},
    ),
    Case(
        "anchor in itself",
        ["experiment=x"],
        "model.inner: an anchor's value contains itself (configs/experiment/x.yaml:2).",
        {"experiment/x.yaml": "# @package _global_\nmodel: &m\n  inner: *m\n"},
    ),
    Case(
        "aliases that multiply",
        ["experiment=x"],
        "e: this stands for more than 100,000 values (configs/experiment/x.yaml:6). Do aliases multiply?",
        {"experiment/x.yaml": PACKAGE + BOMB},
    ),
    Case(
        "deep nesting",
        ["experiment=x"],
        "nested more than 40 deep (configs/experiment/x.yaml:2).",
        {"experiment/x.yaml": PACKAGE + "model: " + "[" * 100 + "]" * 100},
    ),
    Case(
        "huge file",
        ["experiment=x"],
        "configs/experiment/x.yaml is longer than 1 MiB, and no config is. Is it a data file?",
        {"experiment/x.yaml": PACKAGE + "# " + "x" * (1 << 20)},
    ),
    Case(
        "two documents",
        ["experiment=x"],
        "this is not valid YAML: expected a single document in the stream, but found another document (configs/experiment/x.yaml:3). A file holds one config: remove the line '---'.",
        {"experiment/x.yaml": "# @package _global_\nseed: 1\n---\nseed: 2\n"},
    ),
    Case(
        "list at the top",
        ["experiment=x"],
        "the file is a list, but it must be a mapping of keys to values (configs/experiment/x.yaml:1).",
        {"experiment/x.yaml": "- a\n"},
    ),
    Case(
        "text at the top",
        ["model=x"],
        "the file is a single value, but it must be a mapping of keys to values (configs/model/x.yaml:1).",
        {"model/x.yaml": "hello\n"},
    ),
    Case(
        "empty experiment",
        ["experiment=x"],
        "the file is empty (configs/experiment/x.yaml). Write something, be it a comment, or remove it.",
        {"experiment/x.yaml": ""},
    ),
    Case(
        "empty component",
        ["fit", "model=x"],
        "model is empty, but nothing runs without (command line). Choose one with model=NAME; `train list model` shows them.",
        {"model/x.yaml": "# later\n"},
    ),
    Case(
        "empty primary config",
        [],
        "the file is empty (configs/config.yaml). Write something, be it a comment, or remove it.",
        {"config.yaml": "\n"},
    ),
    Case(
        "missing value in braces",
        ["experiment=x"],
        "this is not valid YAML: expected the node content, but found '?' (configs/experiment/x.yaml:2). Inside { } and [ ], put ??? in quotes.",
        {"experiment/x.yaml": "# @package _global_\nmodel: {hidden: ???}\n"},
    ),
    # Files against the schema
    Case(
        "unknown key in a file",
        ["experiment=x"],
        "there is no key 'loop.max_durations' (configs/experiment/x.yaml:3). Did you mean 'loop.max_duration'?",
        {"experiment/x.yaml": "# @package _global_\nloop:\n  max_durations: 3\n"},
    ),
    Case(
        "section that is a value",
        ["experiment=x"],
        "loop is 3, but it must be a section: a mapping of keys to values, never null (configs/experiment/x.yaml:2). Set its keys, such as loop.max_duration.",
        {"experiment/x.yaml": "# @package _global_\nloop: 3\n"},
    ),
    Case(
        "section that is null",
        ["experiment=x"],
        "loop is null, but it must be a section: a mapping of keys to values, never null (configs/experiment/x.yaml:2). Set its keys, such as loop.max_duration.",
        {"experiment/x.yaml": "# @package _global_\nloop:\n"},
    ),
    Case(
        "section that is a switch",
        ["compile=true"],
        "compile is true, but it must be a section: a mapping of keys to values, never null (command line). Write compile.enabled=true.",
    ),
    Case(
        "component that is a value",
        ["experiment=x"],
        "model is 'mlp', but it must be a node with `_target_`, or null (configs/experiment/x.yaml:2). Choose one with model=NAME, in a file by '- override /model: NAME' in its defaults list.",
        {"experiment/x.yaml": "# @package _global_\nmodel: mlp\n"},
    ),
    Case(
        "component that is a list",
        ["experiment=x"],
        "model is a list, but it must be a mapping of keys to values (configs/experiment/x.yaml:2).",
        {"experiment/x.yaml": "# @package _global_\nmodel: [mlp]\n"},
    ),
    Case(
        "callback that is a value",
        ["experiment=x"],
        "callbacks.ema is true, but it must be a node with `_target_`, or null (configs/experiment/x.yaml:3).",
        {"experiment/x.yaml": "# @package _global_\ncallbacks:\n  ema: true\n"},
    ),
    Case(
        "group of parameters that is a value",
        ["experiment=x"],
        "param_groups.bias is 0.1, but it must be a mapping of settings (configs/experiment/x.yaml:3).",
        {"experiment/x.yaml": "# @package _global_\nparam_groups:\n  bias: 0.1\n"},
    ),
    Case(
        "scheduler that is a mapping of values",
        ["experiment=x"],
        "scheduler.first is 3, but it must be a node with `_target_`, or null (configs/experiment/x.yaml:3).",
        {"experiment/x.yaml": "# @package _global_\nscheduler:\n  first: 3\n"},
    ),
    Case(
        "ckpt that is a number",
        ["experiment=x"],
        "ckpt is 3, but it must be a path, a glob or a list of them (configs/experiment/x.yaml:2).",
        {"experiment/x.yaml": "# @package _global_\nckpt: 3\n"},
    ),
    # Defaults lists
    Case(
        "no package",
        ["experiment=x"],
        "the file does not say '# @package _global_' (configs/experiment/x.yaml:1). Make that its first line: without it all goes to 'experiment', and nothing reads that.",
        {"experiment/x.yaml": "seed: 1\n"},
    ),
    Case(
        "package on the second line",
        ["experiment=x"],
        "'# @package' counts only at the top of a file (configs/experiment/x.yaml:2). Make it the first line of the file.",
        {"experiment/x.yaml": "# About it.\n# @package _global_\nseed: 1\n"},
    ),
    Case(
        "package misspelt",
        ["experiment=x"],
        "'# @pakage _global_' does not say a package (configs/experiment/x.yaml:1). Write '# @package _global_' and nothing else on this line.",
        {"experiment/x.yaml": "# @pakage _global_\nseed: 1\n"},
    ),
    Case(
        "option that is not there in a file",
        ["experiment=x"],
        "there is no model called 'cmn' (configs/experiment/x.yaml:3). There are: cnn, gpt, mlp. Did you mean 'cnn'?",
        {"experiment/x.yaml": "# @package _global_\ndefaults:\n  - override /model: cmn\n"},
    ),
    Case(
        "group that is not there in a file",
        ["experiment=x"],
        "there is no group 'modle' (configs/experiment/x.yaml:3). There are: callbacks, checkpoint, data, debug, experiment, loggers, loop, model, optimizer, parallel, precision, scheduler, sparsity. Did you mean '- override /model: cnn'?",
        {"experiment/x.yaml": "# @package _global_\ndefaults:\n  - override /modle: cnn\n"},
    ),
    Case(
        "override forgotten",
        ["experiment=x"],
        "model is chosen already, in {shipped}/config.yaml (configs/experiment/x.yaml:3). Write '- override /model: cnn'.",
        {"experiment/x.yaml": "# @package _global_\ndefaults:\n  - /model: cnn\n"},
    ),
    Case(
        "slash forgotten",
        ["experiment=x"],
        "model is looked for below experiment/ (configs/experiment/x.yaml:3). Write '- override /model: cnn'.",
        {"experiment/x.yaml": "# @package _global_\ndefaults:\n  - override model: cnn\n"},
    ),
    Case(
        "file that is not there",
        ["experiment=x"],
        "there is no experiment called 'base' (configs/experiment/x.yaml:3). There are: char_gpt, digits, digits_mlp, text, x.",
        {"experiment/x.yaml": "# @package _global_\ndefaults:\n  - base\n"},
    ),
    Case(
        "defaults that are a mapping",
        ["experiment=x"],
        "'defaults' must be a list (configs/experiment/x.yaml:3). An entry is '- group: option', '- override /group: option', '- file' or '- _self_'.",
        {"experiment/x.yaml": "# @package _global_\ndefaults:\n  model: cnn\n"},
    ),
    Case(
        "entry that is no choice",
        ["experiment=x"],
        "this entry of the defaults list is no choice (configs/experiment/x.yaml:3). An entry is '- group: option', '- override /group: option', '- file' or '- _self_'.",
        {"experiment/x.yaml": "# @package _global_\ndefaults:\n  - 3\n"},
    ),
    Case(
        "option that is a number",
        ["experiment=x"],
        "the option of /model must be a name, a list of names, or null (configs/experiment/x.yaml:3).",
        {"experiment/x.yaml": "# @package _global_\ndefaults:\n  - override /model: 3\n"},
    ),
    Case(
        "_self_ twice",
        ["experiment=x"],
        "_self_ stands twice, first in line 3 (configs/experiment/x.yaml:5). Remove one of them.",
        {"experiment/x.yaml": "# @package _global_\ndefaults:\n  - _self_\n  - override /model: cnn\n  - _self_\n"},
    ),
    Case(
        "file that lists itself",
        ["experiment=x"],
        "a defaults list leads back to its own file (configs/experiment/x.yaml:3). Remove the line.",
        {"experiment/x.yaml": "# @package _global_\ndefaults:\n  - x\n"},
    ),
    Case(
        "schema misspelt",
        [],
        "the defaults list names train_shema.yaml, which is not there (configs/config.yaml:2). Did you mean 'train_schema'?",
        {"config.yaml": "defaults:\n  - train_shema\n  - model: mlp\n"},
    ),
    Case(
        "unknown primary config",
        ["--config-name", "confg"],
        "there is no confg.yaml in {shipped} (--config-name). Did you mean 'config'?",
    ),
    Case(
        "no folder of configs",
        ["--config-dir", "nowhere"],
        "nowhere is not a folder (--config-dir).",
    ),
    Case(
        "folder without configs",
        ["--config-dir", "empty"],
        "empty holds no configs: no .yaml in it or below it (--config-dir).",
        {"../empty/notes.txt": "nothing here"},
    ),
    # Several at once
    Case(
        "mistakes of all stages",
        ["loop.max_step=3", "name=a b", "name=x(", "model=cmn", "seed=x", "loop.eval_steps=0"],
        "5 mistakes:\n"
        "  - cannot read the override 'name=x(' (command line). A text with spaces, letters beyond a-z or any of , = [ ] { } ( ) # & needs two pairs of quotes: 'name=\"x(\"'.\n"
        "  - there is no key 'loop.max_step' (command line). Did you mean 'loop.max_duration'?\n"
        "  - there is no model called 'cmn' (command line). There are: cnn, gpt, mlp. Did you mean 'cnn'?\n"
        "  - seed is 'x', but it must be a whole number (command line).\n"
        "  - loop.eval_steps is 0, but it must be a finite number of at least 1 (command line).",
    ),
    Case(
        "mistakes of one section",
        ["loop.max_duration=soon", "loop.eval_steps=0", "loop.grad_accum_steps=0", "seed=-1"],
        "4 mistakes:\n"
        "  - seed is -1, but it must be a finite number of at least 0 (command line).\n"
        "  - loop.max_duration: 'soon' is not a duration; expected a number of steps, or a string such as 500st, 3ep, 0.25ep, 1e9tok, 2048sp, 90s, 30min, 1h30m (command line).\n"
        "  - loop.grad_accum_steps is 0, but it must be a finite number of at least 1 (command line).\n"
        "  - loop.eval_steps is 0, but it must be a finite number of at least 1 (command line).",
    ),
    Case(
        "mistakes of a file and the command line",
        ["experiment=x", "loop.max_step=3", "optimizer.lr=nan"],
        "5 mistakes:\n"
        "  - there is no key 'loop.max_step' (command line). Did you mean 'loop.max_duration'?\n"
        "  - loop.max_time: 12:30:45 is read by YAML as the number 45045 (configs/experiment/x.yaml:3). Write 12h30m45s, or put it in quotes.\n"
        "  - loop.eval_at_start: no is read by YAML as false (configs/experiment/x.yaml:4). Write false, or 'no' in quotes.\n"
        "  - seed is 'x', but it must be a whole number (configs/experiment/x.yaml:5).\n"
        "  - optimizer.lr is nan, but it must be finite (command line).",
        {"experiment/x.yaml": "# @package _global_\nloop:\n  max_time: 12:30:45\n  eval_at_start: no\nseed: x\n"},
    ),
    Case(
        "an unknown experiment and what it would have had",
        ["experiment=digit", "model.channels=[1]", "seed=x"],
        "2 mistakes:\n"
        "  - there is no experiment called 'digit' (command line). There are: char_gpt, digits, digits_mlp, text. Did you mean 'digits'?\n"
        "  - seed is 'x', but it must be a whole number (command line).",
    ),
]


def message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that is wrong prints, paths of this checkout left out."""
    assert main(arguments if arguments[:1] in (["fit"], ["plan"]) else ["config", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    shipped = search_path.shipped_configs(Path(trainer_cli.__file__).parent)
    return printed_message(printed.err.replace(str(shipped), "{shipped}"))


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAIN_FULL_ERROR", raising=False)


def write(files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        file = Path("configs", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_is_reported_with_what_where_and_cure(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    write(case.files)
    assert message(case.arguments, capsys) == case.message


def test_no_two_cases_are_the_same() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60


def test_fit_reports_mistakes_before_torch_is_imported(tmp_path: Path) -> None:
    write({"experiment/odd.yaml": f"{PACKAGE}loop:\n  max_time: 12:30:45\n", "experiment/bad.yaml": "a: ["})
    commands = [
        ["loop.max_step=3"], ["experiment=odd"], ["experiment=bad"], ["experiment=nope"], ["optimizer.lr=nan"],
        ["run_dir='${nope}'"], ["model=null"], ["seed+=3"], ["loop.eval_steps=0"], ["experiment=char_gpt"],
    ]  # fmt: skip
    code = (
        "import sys\nfrom trainer_cli.commands.main import main\n"
        f"assert [main(['fit', *one]) for one in {commands!r}] == [2] * {len(commands)}\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["fit", "plan"])
def test_all_mistakes_in_arguments_are_reported_together_before_anything_is_written(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "+model.hiden=3", "optimizer.lr=fast"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    message = printed_message(error)
    assert "MLP takes no argument 'hiden' (model.hiden, command line). Did you mean 'hidden'?" in message
    assert "optimizer.lr is 'fast', but it must be a number (command line)" in message
    assert not (tmp_path / "runs").exists()


def test_arguments_left_of_a_component_that_was_given_another_target_name_the_way_to_replace_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fit", "model._target_=torch.nn.Flatten"]) == 2
    said = printed_message(capsys.readouterr().err)
    assert "Flatten takes no argument 'hidden' (model.hidden, " in said
    assert said.count("To replace the whole model, write model=null 'model={_target_: torch.nn.Flatten}'.") == 4
    assert main(["fit", "model._target_=torch.nn.Flatten", "+model.hiden=3"]) == 2
    assert "Flatten takes no argument 'hiden' (model.hiden, command line). It takes: start_dim, end_dim." in (
        printed_message(capsys.readouterr().err)
    )
