"""Names of checkpoints and of folders on their way."""

from __future__ import annotations

import pytest

from trainer_cli.checkpoint.naming import (
    Hidden,
    HiddenName,
    checkpoint_name,
    is_plain,
    is_run_id,
    parse_hidden,
    parse_step,
)


@pytest.mark.parametrize("step", [0, 1, 10, 123456789012])
def test_a_name_says_its_step(step):
    assert parse_step(checkpoint_name(step)) == step


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
