"""Names of checkpoints and folders, globs of names, and which name is nearest to a misspelt one."""

from __future__ import annotations

import pytest
import torch

from trainer_cli import WarmupCosine
from trainer_cli.catalog.path_variables import fill_in, variables_in
from trainer_cli.errors import UserError
from trainer_cli.layout.naming import Naming, class_name, is_plain, is_run_id, numbers_within, parse_step, step_within
from trainer_cli.patterns import did_you_mean, expand_braces, find_nearest, matches
from trainer_cli.storage.hidden_names import Hidden, HiddenName


@pytest.mark.parametrize("step", [0, 1, 10, 123456789012])
def test_a_name_says_its_step(step: int) -> None:
    assert parse_step(f"step{step}") == step


@pytest.mark.parametrize(
    "name", ["step", "step01", "step-1", "step1.5", "step1 ", "step1\n", "Step1", "xstep1", "step1x", "step١", ""]
)
def test_what_only_resembles_a_checkpoint_is_none(name: str) -> None:
    assert parse_step(name) is None


@pytest.mark.parametrize("kind", list(Hidden))
@pytest.mark.parametrize(("name", "serial"), [("step5", 0), ("step5.x.y", 3), ("a.b-1.7", 12)])
def test_a_hidden_name_says_whose_it_is(kind: Hidden, name: str, serial: int) -> None:
    hidden = HiddenName(kind, name, "run_a-1", 7, serial)
    assert str(hidden).startswith(".")
    assert HiddenName.parse(str(hidden)) == hidden


@pytest.mark.parametrize(
    "name", [".tmp", ".tmp.step5", ".tmp.step5.run", ".tmp.step5.run.x", "tmp.step5.run.1", ".temp.step5.run.1"]
)
def test_a_hidden_folder_of_somebody_else_is_not_taken_for_ours(name: str) -> None:
    assert HiddenName.parse(name) is None


@pytest.mark.parametrize("name", ["a", "step5", "rank0.json", "mein Lauf (gut)", "ö", "a=b,c"])
def test_plain_names_are_plain(name: str) -> None:
    assert is_plain(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "/a", "../a", "a\\b", "a\0", "a\n", "\ud800", "a" * 201]
)
def test_names_that_lead_elsewhere_are_not_plain(name: str) -> None:
    assert not is_plain(name)


@pytest.mark.parametrize(("text", "fits"), [("a1-B_2", True), ("", False), ("a.b", False), ("a/b", False)])
def test_a_run_id_has_no_dots_and_no_separators(text: str, fits: bool) -> None:
    assert is_run_id(text) == fits


COUNTS = {
    "step": 12, "epoch": 3, "batch": 4, "samples": 384, "tokens": 9000, "run_name": "digits", "world_size": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "suffix", "name"),
    [
        ("step{step}", None, "step12"),
        ("step{step:06}", None, "step000012"),
        ("ep{epoch}-ba{batch}", "best", "ep3-ba4-best"),
        ("{run_name}_{samples}sp_{tokens}tok_w{world_size}.x", None, "digits_384sp_9000tok_w2.x"),
    ],
)
def test_a_pattern_names_the_counts(pattern: str, suffix: str | None, name: str) -> None:
    assert Naming(pattern, suffix).why_unfit() is None
    assert Naming(pattern, suffix).name(COUNTS) == name


@pytest.mark.parametrize(
    ("pattern", "suffix", "wrong"),
    [
        ("step{stepp}", None, "there is no {stepp}; there are {step}, {epoch}"),
        ("step{step}-{val/loss:.2f}", None, "there is no {val/loss}"),
        ("step{step}-{val_loss:.2f}", None, "Metrics are not part of a name: `train ckpt ls` lists them"),
        ("step{}", None, "checkpoint.name"),
        ("step{step", None, "checkpoint.name"),
        ("step{step.real}", None, "there is no {step.real}"),
        ("step{step:x", None, "checkpoint.name"),
        ("step{step:q}", None, "checkpoint.name"),
        ("step={step}", None, "letters, digits"),
        ("a/{step}", None, "letters, digits"),
        ("a b{step}", None, "letters, digits"),
        (".step{step}", None, "letters, digits"),
        ("step{step}*", None, "letters, digits"),
        ("step{step}", "a,b", "letters, digits"),
        ("epoch{epoch}", None, "may give two checkpoints the same name"),
        ("batch{batch}", None, "may give two checkpoints the same name"),
        ("last", None, "may give two checkpoints the same name"),
        ("x" * 160 + "{step}", None, "too long"),
    ],
)
def test_a_pattern_that_would_make_trouble_is_refused(pattern: str, suffix: str | None, wrong: str) -> None:
    fault = Naming(pattern, suffix).why_unfit()
    assert wrong in (fault or "")


@pytest.mark.parametrize(
    ("pattern", "wrong"),
    [
        # legal for every number
        ("step{step:,}", "'step1,023' cannot be the name"),
        ("-{step}", "'-0' cannot be the name"),
        ("+{step}", "cannot be the name"),
        ("{step:>6}", "cannot be the name"),
        ("{step:%}", "cannot be the name"),
        ("{step:c}", "cannot be the name"),
        ("{step:s}", "Unknown format code"),
        ("{step:.3}", "Precision not allowed"),
        # different for every step
        ("s{step:.0e}x", "step 10 (s1e+01x) before step 9"),
        ("{step:.0f}-{epoch:.0e}", None),
        ("{samples:.0e}-{epoch:.0e}", "before step"),
        ("{step!s:.9}", "sorts step 1,000,000,000 (100000000) before"),
        # in the order of their steps
        ("{step:x}", "sorts step 16 (10) before step 15 (f)"),
        ("{step:_}", "sorts step 1,023 (1_023) before"),
        ("{step:g}", "sorts step 1,000,000 (1e+06) before"),
        ("{step:e}", "sorts step 10"),
        ("ba{batch}-ep{epoch}", "sorts step 7 (ba0-ep1) before step 6"),
        ("{batch}-{step}", "sorts step 7"),
        # fine
        ("{step:b}", None),
        ("{step:o}", None),
        ("{step:09}", None),
        ("{step!r}", None),
        ("{step:.1f}", None),
        ("{epoch:03}{step:06}", None),
        ("{run_name}-{world_size}-{samples}", None),
        ("step{samples}", None),
        ("ep{epoch}-ba{batch}-end.v2", None),
    ],
)
def test_a_pattern_is_tried_over_the_steps_that_a_run_may_have(pattern: str, wrong: str | None) -> None:
    fault = Naming(pattern).why_unfit()
    assert fault is None if wrong is None else wrong in (fault or "")


@pytest.mark.parametrize(("run_name", "fits"), [("my run", False), ("a/b", False), ("a,b", False), ("mine.2", True)])
def test_a_pattern_is_tried_with_the_name_of_the_run(run_name: str, fits: bool) -> None:
    assert (Naming("{run_name}-{step}").why_unfit(run_name) is None) is fits


def test_a_run_name_that_a_shell_would_trip_over_is_refused_when_it_is_known() -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        Naming("{run_name}-{step}").name({**COUNTS, "run_name": "a b"})


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step10", 10),
        ("step0010", 10),
        ("step-10-ema", 10),
        ("digits_step_7.x", 7),
        ("substep7", None),
        ("ep3-ba7", None),
        ("last", None),
        ("step" + "1" * 19, None),
    ],
)
def test_the_step_is_found_in_a_name_of_another_pattern(name: str, step: int | None) -> None:
    assert step_within(name) == step


def test_numbers_in_names_count_by_value() -> None:
    assert sorted(["ep10-ba2", "ep9-ba30", "ep010-ba1"], key=numbers_within) == ["ep9-ba30", "ep010-ba1", "ep10-ba2"]


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({}, "n0/l0/r0"),
        ({"RANK": "12", "LOCAL_RANK": "4", "GROUP_RANK": "1", "SLURM_NODEID": "9"}, "n1/l4/r12"),
        ({"RANK": "3", "SLURM_NODEID": "2", "GROUP_RANK": ""}, "n2/l0/r3"),
        ({"SLURM_PROCID": "7", "SLURM_LOCALID": "3", "SLURM_NODEID": "1"}, "n1/l3/r7"),
    ],
)
def test_ranks_in_a_path_are_those_of_the_process(environment: dict[str, str], path: str) -> None:
    assert fill_in("n{node_rank}/l{local_rank}/r{rank}", environment) == path
    assert fill_in("step{1,2}/{other}", environment) == "step{1,2}/{other}"
    assert fill_in("{step:06d}-{epoch}-{other}", environment, {"step": 7, "epoch": 2}) == "000007-2-{other}"
    assert variables_in("a{1,2}/{x}/{step:06d}/{y,z}{}") == ["x", "step"]


def test_a_rank_that_is_no_number_is_named() -> None:
    with pytest.raises(UserError, match=r"RANK is '\.\./x', which is not a number \(\{rank\} in a/\{rank\}\)"):
        fill_in("a/{rank}", {"RANK": "../x"})
    assert fill_in("a", {"RANK": "x"}) == "a"
    with pytest.raises(UserError, match=r"\{rank:q\}: .*format code 'q'"):
        fill_in("a/{rank:q}", {})


class Mine:
    """A class of a test."""


def test_a_public_class_is_recorded_under_its_public_name() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    schedule = WarmupCosine(torch.optim.SGD([parameter]), 4, warmup=1)
    assert class_name(schedule) == "trainer_cli.WarmupCosine"
    assert class_name(Mine()) == f"{Mine.__module__}.Mine"
    assert class_name(parameter) == "torch.nn.parameter.Parameter"


# Globs with alternatives, and which name is nearest to a misspelt one.


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("step*", ["step*"]),
        ("step{1,2}", ["step1", "step2"]),
        ("{a,b}/{c,d}", ["a/c", "a/d", "b/c", "b/d"]),
        ("{a,b{c,d}}", ["a", "bc", "a", "bd"]),
        ("{single}", ["{single}"]),
        ("open{a,b", ["open{a,b"]),
    ],
)
def test_a_pattern_stands_for_its_alternatives(pattern: str, expected: list[str]) -> None:
    assert list(expand_braces(pattern)) == expected


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("blocks.0.norm_1.weight", "*{norm,bias}*", True),
        ("blocks.0.mlp.out.bias", "*{norm,bias}*", True),
        ("blocks.0.mlp.out.weight", "*{norm,bias}*", False),
        ("Norm.weight", "*norm*", False),
    ],
)
def test_a_name_matches_one_of_them(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected


@pytest.mark.parametrize(
    ("word", "choices", "expected"),
    [
        ("adamv", ["adamw", "sgd"], "adamw"),
        ("experimant", ["experiment", "name"], "experiment"),
        ("LR", ["lr", "eps"], "lr"),
        ("max-duration", ["max_duration"], "max_duration"),
        ("zebra", ["adamw", "sgd"], None),
        ("x", [], None),
    ],
)
def test_the_nearest_name_is_the_one_a_person_meant(word: str, choices: list[str], expected: str | None) -> None:
    assert find_nearest(word, choices) == expected


def test_without_a_near_name_nothing_is_suggested() -> None:
    assert did_you_mean("zebra", ["sgd"]) == ""
    assert did_you_mean("sdg", ["sgd"]) == " Did you mean 'sgd'?"


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("loop.max_steps", "loop.max_duration"),
        ("loop.max_epochs", "loop.max_duration"),
        ("loop.accumulate_grad_batches", "loop.grad_accum_steps"),
        ("checkpoint.save_total_limit", "checkpoint.max_checkpoints"),
        ("precision.max_grad_norm", "precision.clip_norm"),
        ("optimizer.learning_rate", "optimizer.lr"),
    ],
)
def test_what_other_trainers_call_it_is_known(word: str, ours: str) -> None:
    section = word.partition(".")[0]
    choices = [
        f"{section}.{name}"
        for name in ("max_time", "max_duration", "grad_accum_steps", "max_checkpoints", "clip_norm", "lr", "eval_steps")
    ]
    assert find_nearest(word, choices) == ours
    assert find_nearest(word, ["elsewhere.entirely"]) is None
