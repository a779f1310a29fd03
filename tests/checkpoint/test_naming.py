"""Names of checkpoints and of folders on their way."""

from __future__ import annotations

import pytest

from trainer_cli.checkpoint.naming import (
    Hidden,
    HiddenName,
    Naming,
    is_plain,
    is_run_id,
    parse_hidden,
    parse_step,
    why_unfit,
    with_ranks,
)


@pytest.mark.parametrize("step", [0, 1, 10, 123456789012])
def test_a_name_says_its_step(step):
    assert parse_step(f"step{step}") == step


@pytest.mark.parametrize(
    "name", ["step", "step01", "step-1", "step1.5", "step1 ", "step1\n", "Step1", "xstep1", "step1x", "step١", ""]
)
def test_what_only_resembles_a_checkpoint_is_none(name):
    assert parse_step(name) is None


@pytest.mark.parametrize("kind", list(Hidden))
@pytest.mark.parametrize(("name", "serial"), [("step5", 0), ("step5.x.y", 3), ("a.b-1.7", 12)])
def test_a_hidden_name_says_whose_it_is(kind, name, serial):
    hidden = HiddenName(kind, name, "run_a-1", 7, serial)
    assert str(hidden).startswith(".")
    assert parse_hidden(str(hidden)) == hidden


@pytest.mark.parametrize(
    "name", [".tmp", ".tmp.step5", ".tmp.step5.run", ".tmp.step5.run.x", "tmp.step5.run.1", ".temp.step5.run.1"]
)
def test_a_hidden_folder_of_somebody_else_is_not_taken_for_ours(name):
    assert parse_hidden(name) is None


@pytest.mark.parametrize("name", ["a", "step5", "rank0.json", "mein Lauf (gut)", "ö", "a=b,c"])
def test_plain_names_are_plain(name):
    assert is_plain(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "/a", "../a", "a\\b", "a\0", "a\n", "\ud800", "a" * 201]
)
def test_names_that_lead_elsewhere_are_not_plain(name):
    assert not is_plain(name)


@pytest.mark.parametrize(("text", "fits"), [("a1-B_2", True), ("", False), ("a.b", False), ("a/b", False)])
def test_a_run_id_has_no_dots_and_no_separators(text, fits):
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
def test_a_pattern_names_the_counts(pattern, suffix, name):
    assert why_unfit(pattern, suffix) is None
    assert Naming(pattern, suffix).name(COUNTS) == name


@pytest.mark.parametrize(
    ("pattern", "suffix", "wrong"),
    [
        ("step{stepp}", None, "there is no {stepp}; there are {step}, {epoch}"),
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
        ("epoch{epoch}", None, "may name two checkpoints alike"),
        ("batch{batch}", None, "may name two checkpoints alike"),
        ("last", None, "may name two checkpoints alike"),
        ("x" * 160 + "{step}", None, "too long"),
    ],
)
def test_a_pattern_that_would_make_trouble_is_refused(pattern, suffix, wrong):
    fault = why_unfit(pattern, suffix)
    assert wrong in (fault or "")


def test_a_run_name_that_a_shell_would_trip_over_is_refused_when_it_is_known():
    with pytest.raises(ValueError, match="cannot be the name"):
        Naming("{run_name}-{step}").name({**COUNTS, "run_name": "a b"})


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, "a-0-0-0"),
        ({"RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "2"}, "a-5-1-2"),
        ({"SLURM_PROCID": "7", "SLURM_LOCALID": "3", "SLURM_NODEID": "1"}, "a-7-3-1"),
        ({"RANK": "x"}, "a-0-0-0"),
    ],
)
def test_a_path_may_name_the_process(environ: dict[str, str], wanted: str) -> None:
    assert with_ranks("a-{rank}-{local_rank}-{node_rank}", environ) == wanted
    assert with_ranks("step{1,2}", environ) == "step{1,2}"
