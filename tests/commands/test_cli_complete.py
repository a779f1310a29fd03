"""Completion: what is offered for a half-typed line, and that bash and zsh put it in the right place."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trainer_cli
from trainer_cli.commands.command_line import listed_verbs, main
from trainer_cli.commands.complete import BASH, answer, candidates, split

MODELS = ["cnn", *(["gpt"] if "GPT" in trainer_cli.__all__ else []), "large", "mlp", "small"]
"""One is of an add-on, which may have been deleted."""
BREAKS = " \t\n\"'@><=;|&(:"
"""COMP_WORDBREAKS of an interactive bash."""

PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}


def offered(line: str, cwd: Path) -> list[str]:
    return [one.word for one in candidates(split(line)[0], cwd)]


@pytest.mark.parametrize(
    ("line", "words", "kept"),
    [
        ("", [""], 0),
        ("train", ["train"], 0),
        ("train ", ["train", ""], 0),
        ("train  fit +exp", ["train", "fit", "+exp"], 0),
        ("train fit +experiment=dig", ["train", "fit", "+experiment=dig"], 12),
        ("train fit ckpt=runs/a:b", ["train", "fit", "ckpt=runs/a:b"], 12),
        ("train fit ckpt='a b", ["train", "fit", "ckpt=a b"], 5),
        ("train fit ckpt='a=b", ["train", "fit", "ckpt=a=b"], 5),
        ("train fit ckpt='a/'b", ["train", "fit", "ckpt=a/b"], 7),
        ('train fit "a b" ', ["train", "fit", "a b", ""], 0),
        ("train fit a\\ b", ["train", "fit", "a b"], 0),
        ("train fit '' x", ["train", "fit", "", "x"], 0),
    ],
)
def test_a_line_is_split_into_words_as_a_shell_does(line: str, words: list[str], kept: int) -> None:
    assert split(line, BREAKS) == (words, kept)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train va", ["validate"]),
        ("train --v", ["--version"]),
        ("train help fi", ["fit"]),
        ("train nothing ", []),
        ("train fit +exp", ["+experiment="]),
        ("train fit exp", ["experiment="]),
        ("train fit min", ["mine"]),
        ("train fit mine dig", []),
        ("train fit mine resume=a", ["resume=anew", "resume=auto"]),
        ("train fit -m --jobs 2 mine data.no", ["data.noise="]),
        ("train fit +experiment=mi", ["+experiment=mine"]),
        ("train fit experiment=digits", ["experiment=digits", "experiment=digits_mlp"]),
        ("train fit model=", [f"model={name}" for name in MODELS]),
        ("train fit loop.max_", ["loop.max_duration=", "loop.max_time="]),
        ("train fit checkpoint.remove=e", ["checkpoint.remove=ephemeral_only"]),
        ("train fit device=", ["device=auto", "device=cpu", "device=cuda", "device=mps"]),
        ("train fit deterministic=", ["deterministic=false", "deterministic=true"]),
        ("train fit checkpoint.pre_train_checkpoint=n", ["checkpoint.pre_train_checkpoint=null"]),
        ("train fit optimizer.l", ["optimizer.lr="]),
        ("train fit optimizer=sgd optimizer.mom", ["optimizer.momentum="]),
        ("train fit optimizer.mom", []),
        ("train fit +experiment=mine data.no", ["data.noise="]),
        ("train fit +experiment=mine model.", ["model.arms=", "model.hidden="]),
        ("train fit +experiment=digits data.augment=", ["data.augment=false", "data.augment=true"]),
        ("train fit ~sched", ["~scheduler"]),
        ("train fit resume=n", ["resume=never"]),
        ("train fit ckpt=con", ["ckpt=configs/"]),
        ("train validate ckpt='configs/mod", ["ckpt=configs/model/"]),
        pytest.param(
            "train fit data=text data.path=README", ["data.path=README.md"], marks=pytest.mark.addon("text")
        ),
        ("train fit validate.folder=conf", ["validate.folder=configs/"]),
        ("train fit optimizer.lr=", []),
        ("train fit --config-d", ["--config-dir"]),
        ("train fit --config-dir con", ["configs/"]),
        ("train fit --config-dir=con", ["--config-dir=configs/"]),
        ("train fit -cd con", ["configs/"]),
        ("train fit --config-dir configs +experiment=mi", ["+experiment=mine"]),
        ("train fit --config-name conf", ["config"]),
        ("train fit -m --submit sl", ["slurm"]),
        ("train fit -m --submit con", ["configs/", "constraint="]),
        ("train fit -m --submit=slurm --submit p", ["partition="]),
        ("train list exp", ["experiment"]),
        ("train list experiment ", []),
        ("train check re", ["resume"]),
        ("train check resume +experiment=mi", ["+experiment=mine"]),
        ("train complete z", ["zsh"]),
        ("train new te", ["tests/"]),
        ("train env --j", ["--json"]),
        ("train docs res", ["resume"]),
        ("train report configs te", ["tests/"]),
        ("train report tests --out", ["--output"]),
        ("train ckpt pr", ["prune"]),
        ("train ckpt show --", ["--help", "--json", "--no-replay", "--norms", "--states"]),
    ],
)  # fmt: skip
def test_what_is_offered(made: Path, line: str, expected: list[str]) -> None:
    assert offered(line, made) == expected


def test_every_verb_is_offered_with_what_it_does(made: Path) -> None:
    found = {one.word: one.about for one in candidates(["train", ""], made)}
    assert {verb: found.get(verb) for verb in listed_verbs()} == {
        verb: known.summary for verb, known in listed_verbs().items()
    }


def test_options_are_offered_with_their_description(made: Path) -> None:
    about = {one.word: one.about for one in candidates(["train", "fit", "model="], made)}
    assert about["model=large"] == "Three wide layers."


def test_hidden_flags_are_not_offered(made: Path) -> None:
    assert not {"--answer", "_job", "_probe"} & {
        *offered("train complete --", made),
        *offered("train ", made),
        *offered("train _", made),
    }


def test_broken_yaml_offers_nothing_and_fails_nowhere(made: Path) -> None:
    (made / "configs/model/small.yaml").write_text("a: [")
    assert offered("train fit model=small model.", made) == []
    assert "model=small" in offered("train fit model=", made)


def test_a_folder_of_configs_that_is_not_there_is_passed_over(made: Path) -> None:
    assert offered("train fit --config-dir nowhere +experiment=mi", made) == ["+experiment=mine"]


def test_only_what_follows_the_last_break_is_answered_to_bash(made: Path) -> None:
    assert answer("train fit +experiment=mi", BREAKS, made).partition("\t")[0] == "mine"
    assert answer("train fit +experiment=mi", "", made).partition("\t")[0] == "+experiment=mine"


def test_a_shell_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete"]) == 2
    assert "Write one of: bash, zsh." in capsys.readouterr().err


TRAIN = 'train() {{ if [ "$1" = complete ]; then "{python}" -m trainer_cli "$@"; else echo "got:$*:"; fi; }}'
EVAL = 'eval "$(train complete {shell})"'


def sh(shell: str, script: str, cwd: Path) -> list[str]:
    """What a shell prints that has loaded the completion."""
    begin = f"{TRAIN.format(python=sys.executable)}\n"
    done = subprocess.run(
        [shutil.which(shell) or shell, *(["-f"] if shell == "zsh" else ["--norc"]), "-c", begin + script],
        cwd=cwd, capture_output=True, text=True, timeout=500, env={**os.environ, **PATH},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("line", "words", "expected"),
    [
        ("train va", "train va", ["validate "]),
        ("train fit +experiment=mi", "train fit +experiment = mi", ["mine "]),
        ("train fit model=", "train fit model =", [f"{name} " for name in MODELS]),
        ("train fit loop.max_d", "train fit loop.max_d", ["loop.max_duration="]),
        ("train fit ckpt='con", "train fit ckpt = \"'con\"", ["configs"]),
        ("train fit ckpt=a", "train fit ckpt = a", [r"a\ b/"]),
    ],
)  # fmt: skip
def test_bash_is_given_what_it_is_to_insert(made: Path, line: str, words: str, expected: list[str]) -> None:
    (made / "a b").mkdir()
    script = (
        f"{EVAL.format(shell='bash')}\nCOMP_WORDBREAKS=$' \\t\\n\"\\'@><=;|&(:'\n"
        f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        f'COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}\n'
        "_train_complete train\nprintf '%s|\\n' \"${COMPREPLY[@]}\"\n"
    )
    assert sh("bash", script, made) == [f"{word}|" for word in expected]


def test_bash_completes_what_a_person_types(made: Path) -> None:
    """An interactive bash on a terminal: each line is typed with tabs, and the command prints its arguments."""
    typed = {
        "train fi\t +exp\tmi\t optimizer.l\t0.1": "got:fit +experiment=mine optimizer.lr=0.1:",
        "train val\t ckpt='con\tmo\tsm\t": "got:validate ckpt=configs/model/small.yaml:",
        "train fit loop.max_d\t3ep": "got:fit loop.max_duration=3ep:",
    }
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(made)
        os.environ |= {"PS1": "$ ", "TERM": "dumb", "INPUTRC": "/dev/null", **PATH}
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        begin = f"{TRAIN.format(python=sys.executable)}; {EVAL.format(shell='bash')}; echo rea''dy"
        _output_until(terminal, f"{begin}\n", "ready\r\n")
        for line, expected in typed.items():
            assert expected in _output_until(terminal, f"{line}\n", f"{expected}\r\n")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def _output_until(terminal: int, text: str, expected: str) -> str:
    """Type a text, and return what is printed until `expected` appears."""
    os.write(terminal, text.encode())
    seen, until = "", time.monotonic() + 500
    while expected not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, until - time.monotonic()))
        assert ready, f"{expected!r} is not in {seen!r}"
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen


def test_the_scripts_of_both_shells_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "bash"]) == 0
    assert capsys.readouterr().out == BASH
    assert main(["complete", "zsh"]) == 0
    assert "compdef _train train" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_is_given_whole_words(made: Path) -> None:
    script = (
        "compdef() { :; }\ncompadd() { shift $(($# - 1)); print -l ${(P)1} }\n"
        f"{EVAL.format(shell='zsh')}\nwords=(train fit +experiment=mi); CURRENT=3; PREFIX=+experiment=mi\n_train\n"
    )
    assert sh("zsh", script, made) == ["+experiment=mine"]
