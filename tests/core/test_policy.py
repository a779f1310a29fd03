"""When to save, what may go, and why training stops, by tables."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_parts import present

from trainer_cli.callbacks.save_budget import steps_until
from trainer_cli.metric_names import Mode
from trainer_cli.policy.rules import (
    OF_STOPS,
    BestRule,
    CheckpointKind,
    Decision,
    RetentionRules,
    SaveCost,
    Saved,
    SaveFacts,
    SaveRules,
)
from trainer_cli.policy.stopping import Limits, Occasion, Stop
from trainer_cli.schema.checkpoint_config import CheckpointConfig, Removal
from trainer_cli.steps.intervals import Duration, Interval
from trainer_cli.steps.progress import Progress

P, E = CheckpointKind.regular, CheckpointKind.ephemeral
STEP, FINAL, STOP, PRE, LAST = Occasion.step, Occasion.final, Occasion.stop, Occasion.pre_train, Occasion.last_stop


def ask(
    rules: SaveRules, now: Progress, last: int | None, *, moment: Occasion = STEP, loaded: bool = False, **more: Any
) -> Decision | None:
    """The decision of `why_save`, by its facts."""
    return rules.why_save(SaveFacts(now, moment, last, loaded=loaded, **more))


def every(interval: int | str, steps_per_epoch: int | None = None) -> Interval:
    return Interval(Duration.parse(interval), steps_per_epoch)


RULES = SaveRules(
    save_interval=every(100),
    ephemeral_save_interval=every(10),
    ephemeral_cooldown=Duration.parse(15),
    fixed_steps=frozenset({0, 7, 30}),
)


@pytest.mark.parametrize(
    ("step", "last", "moment", "expected"),
    [
        (7, None, STEP, (P, "fixed step 7")),
        (8, None, STEP, None),
        (10, None, STEP, (E, "every 10 steps, ephemeral")),
        (10, 7, STEP, None),  # cooling down
        (22, 7, STEP, None),  # cooled down, but not due
        (20, 5, STEP, (E, "every 10 steps, ephemeral")),  # exactly the cooldown
        (20, 6, STEP, None),  # one step short of it
        (30, 29, STEP, (P, "fixed step 30")),  # the cooldown holds back ephemerals alone
        (100, 99, STEP, (P, "every 100 steps")),
        (100, 100, STEP, None),  # a step already saved is never saved twice
        (103, 90, FINAL, (P, "end of training")),
        (200, 90, FINAL, (P, "every 100 steps")),
        (103, 103, FINAL, None),
        (110, 90, FINAL, (P, "end of training")),  # stronger than the ephemeral that is due too
        (103, 102, STOP, (E, "training was stopped")),
        (200, 102, STOP, (P, "every 100 steps")),
        (30, 29, STOP, (P, "fixed step 30")),
        (103, 103, STOP, None),
        (103, 102, LAST, (P, "end of training")),  # only its evaluation is missing: it stays
        (200, 102, LAST, (P, "every 100 steps")),
        (0, None, PRE, (P, "fixed step 0")),
    ],
)
def test_the_first_rule_that_fits_decides(
    step: int, last: int | None, moment: Occasion, expected: tuple[CheckpointKind, str] | None
) -> None:
    decision = ask(RULES, Progress(step=step), last, moment=moment)
    assert (decision and (decision.kind, decision.reason)) == expected


@pytest.mark.parametrize(
    ("pre_train", "loaded", "saves"),
    [(None, False, True), (None, True, False), (True, True, True), (True, False, True), (False, False, False)],
)
def test_before_the_first_step_null_means_only_when_nothing_was_loaded(
    pre_train: bool | None, loaded: bool, saves: bool
) -> None:
    rules = SaveRules(save_interval=every(100), pre_train=pre_train)
    decision = ask(rules, Progress(step=0), None, moment=PRE, loaded=loaded)
    assert (decision is not None) == saves
    assert decision is None or decision.kind is P


def test_a_fixed_step_0_is_saved_although_nothing_else_is_before_the_first_step() -> None:
    rules = SaveRules(fixed_steps=frozenset({0}), pre_train=False)
    assert present(ask(rules, Progress(step=0), None, moment=PRE)).reason == "fixed step 0"


def test_a_fork_at_an_interval_step_is_not_saved_before_it_trained() -> None:
    rules = SaveRules(save_interval=every(100), pre_train=None)
    assert ask(rules, Progress(step=200), None, moment=PRE, loaded=True) is None


@pytest.mark.parametrize(("moment", "rule"), [(FINAL, "save_final"), (STOP, "save_on_stop")])
def test_final_and_stop_saves_can_be_switched_off(moment: Occasion, rule: str) -> None:
    off: dict[str, Any] = {rule: False}
    rules = SaveRules(**off)
    assert ask(rules, Progress(step=5), None, moment=moment) is None
    assert ask(rules, Progress(step=5), None, moment=STEP) is None


def test_rules_that_are_null_never_save() -> None:
    assert all(ask(SaveRules(), Progress(step=n), None, moment=STEP) is None for n in range(50))
    assert SaveRules().next_step(Progress()) is None


@pytest.mark.parametrize(("now", "expected"), [(0, 7), (7, 10), (10, 20), (29, 30), (30, 40), (95, 100), (100, 110)])
def test_the_next_save_step_is_the_earliest_that_a_rule_names(now: int, expected: int) -> None:
    assert RULES.next_step(Progress(step=now)) == expected


@pytest.mark.parametrize(
    "rules", [RULES, SaveRules(save_interval=every("0.3ep", 7)), SaveRules(fixed_steps=frozenset({3}))]
)
def test_no_step_before_the_next_save_step_saves(rules: SaveRules) -> None:
    for now in range(130):
        following = rules.next_step(Progress(step=now))
        for step in range(now + 1, following if following is not None else 200):
            assert ask(rules, Progress(step=step), None, moment=STEP) is None


def test_intervals_count_in_other_units_too() -> None:
    rules = SaveRules(save_interval=every("100tok"))
    crossed = Progress(step=3, tokens=105, last_tokens=95)
    assert present(ask(rules, crossed, None, moment=STEP)).reason == "every 100 tokens"
    assert ask(rules, Progress(step=4, tokens=115, last_tokens=105), None, moment=STEP) is None
    assert rules.next_step(crossed) == 4


AUTO = SaveRules(save_interval=every(100), budget=0.02)
CHEAP, DEAR = SaveCost(stood_s=1.0, since_s=50.0), SaveCost(stood_s=1.0, since_s=49.0)


@pytest.mark.parametrize(
    ("step", "facts", "expected"),
    [
        (5, {"cost": CHEAP}, (E, "auto, ephemeral: the previous save took 1 s of 50 s")),
        (5, {"cost": DEAR}, None),
        (5, {"cost": None}, (E, "auto, ephemeral")),  # to be measured
        (5, {"cost": CHEAP, "writing": True}, None),  # one at a time
        (5, {"cost": CHEAP, "on_hold": True}, None),
        (100, {"cost": CHEAP}, (P, "every 100 steps")),
        (100, {"cost": DEAR, "writing": True}, (P, "every 100 steps")),  # the budget is of automatic saves alone
    ],
)
def test_an_automatic_save_comes_when_the_one_before_is_written_and_its_cost_fits(
    step: int, facts: dict[str, Any], expected: tuple[CheckpointKind, str] | None
) -> None:
    decision = ask(AUTO, Progress(step=step), 3, **facts)
    assert (decision and (decision.kind, decision.reason)) == expected


def test_an_automatic_save_heeds_the_cooldown_and_needs_a_budget() -> None:
    cooled = replace(AUTO, ephemeral_cooldown=Duration.parse(15))
    assert ask(cooled, Progress(step=17), 3, cost=CHEAP) is None
    assert ask(cooled, Progress(step=18), 3, cost=CHEAP) is not None
    assert ask(SaveRules(), Progress(step=18), 3, cost=CHEAP) is None
    assert AUTO.next_step(Progress(step=5)) == 100


@pytest.mark.parametrize("costs_s", [[0.1] * 50, [3.0, 0.01, 0.5, 0.0, 2.0] * 5], ids=["equal", "varied"])
@pytest.mark.parametrize("budget", [0.02, 0.3, 1.0])
def test_automatic_saves_together_keep_the_budget(costs_s: list[float], budget: float) -> None:
    rules = SaveRules(budget=budget)
    now_s, began_s, stood_s, total_s = 0.0, 0.0, 0.0, 0.0
    for cost_s in costs_s:
        step = 0
        while ask(rules, Progress(step=step), None, cost=SaveCost(stood_s, now_s - began_s)) is None:
            now_s, step = now_s + 0.05, step + 1
        assert total_s <= budget * now_s + 1e-9
        began_s, stood_s, now_s, total_s = now_s, cost_s, now_s + cost_s, total_s + cost_s


@pytest.mark.parametrize(
    ("wait_s", "step_s", "steps"), [(1.0, 0.3, 4), (0.9, 0.3, 3), (0.0, 0.3, 1), (-5.0, 0.3, 1), (5.0, 0.0, 1)]
)
def test_the_next_automatic_save_is_offered_after_as_many_steps_as_the_wait_lasts(
    wait_s: float, step_s: float, steps: int
) -> None:
    assert steps_until(wait_s, step_s) == steps


BEST = SaveRules(ephemeral_save_interval=every(10), keep_best=BestRule("val/loss", Mode.min, 2))


@pytest.mark.parametrize(
    ("metrics", "there", "expected"),
    [
        ({}, (), None),
        ({"val/acc": 1.0}, (), None),
        ({"val/loss": 5.0}, (), "val/loss 5 is among the 2 best"),
        ({"val/loss": 5.0}, ("e1=1",), "val/loss 5 is among the 2 best"),
        ({"val/loss": 5.0}, ("e1=1", "e2=4"), None),
        ({"val/loss": 4.0}, ("e1=1", "e2=4"), "val/loss 4 is among the 2 best"),  # a tie goes to the newer
        ({"val/loss": 3.0}, ("e1=1", "e2=4"), "val/loss 3 is among the 2 best"),
        ({"val/loss": math.nan}, (), None),
        ({"val/loss": -math.inf}, (), None),
        ({"val/loss": 5.0}, ("e1=nan", "e2=1"), "val/loss 5 is among the 2 best"),
        ({"val/loss": 5.0}, ("e1=1~", "e2=1"), "val/loss 5 is among the 2 best"),  # weights with NaN do not count
    ],
)
def test_an_evaluation_that_enters_the_best_saves(
    metrics: dict[str, Any], there: tuple[str, ...], expected: str | None
) -> None:
    decision = ask(BEST, Progress(step=7), None, metrics=metrics, saved=saved(*there))
    assert (decision and decision.reason) == expected
    assert decision is None or decision.kind is E


def test_large_values_are_best_where_the_mode_is_max() -> None:
    rule = BestRule("val/loss", Mode.max, 1)
    there = saved("e1=1", "e2=4", "e3=4")
    assert [one.step for one in rule.ranked(there)] == [3]
    assert rule.why_enter({"val/loss": 3.0}, there) is None
    assert rule.why_enter({"val/loss": 4.0}, there) == "val/loss 4 is the best"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"save_requested": True}, (P, "requested")),
        ({"on_hold": True}, None),
        ({"on_hold": True, "save_requested": True}, (P, "requested")),
        ({}, (E, "every 10 steps, ephemeral")),
    ],
)
def test_a_request_saves_and_a_hold_keeps_ephemeral_intervals_back(
    facts: dict[str, Any], expected: tuple[CheckpointKind, str] | None
) -> None:
    decision = ask(RULES, Progress(step=20), None, **facts)
    assert (decision and (decision.kind, decision.reason)) == expected


def test_a_hold_keeps_no_other_save_back() -> None:
    assert present(ask(RULES, Progress(step=100), None, on_hold=True)).reason == "every 100 steps"
    assert present(ask(RULES, Progress(step=20), None, on_hold=True, moment=STOP)).reason == "training was stopped"


def saved(*texts: str) -> list[Saved]:
    """`p100` regular, `e50` ephemeral, `e50=3` with a loss; marks: `!` pinned, `.` finished, `~` not finite."""
    found = []
    for text in texts:
        kind, step, loss, marks = present(re.fullmatch(r"([pe])(\d+)(?:=([a-z0-9]+?))?([!.~]*)", text)).groups()
        found.append(
            Saved(
                f"step{step}",
                int(step),
                P if kind == "p" else E,
                finished="." in marks,
                pinned="!" in marks,
                finite="~" not in marks,
                metrics={} if loss is None else {"val/loss": float(loss)},
            )
        )
    return found


ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "the newest; at the end of a run the final one": ("e900", {}),
    "pinned by `train ckpt pin`": ("e150!", {}),
    "of `fixed_steps`": ("p150", {"fixed_steps": frozenset({150})}),
    "among the best of `keep_best`, also an ephemeral one": ("e150=1", {"keep_best": BestRule("val/loss")}),
    "ephemeral": ("e150", {}),
    "regular, of `keep_every` or `keep_by_age`": ("p150", {"keep_every": every(150)}),
    "regular, of step 0": ("p0", {}),
    "regular, of the present `save_interval`": ("p200", {}),
    "another regular one": ("p150", {}),
    "with weights that are not finite": ("p200~", {}),
}
"""A checkpoint as each row of the table in docs/checkpoints.md describes it, with a rule that the row names."""


def test_the_table_of_removals_is_the_policy() -> None:
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text(encoding="utf-8")
    header, _, *rows = re.findall(r"^\|.*\|$", page.split("## What is removed")[1].split("\n## ")[0], re.MULTILINE)
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    values = re.findall(r"`(\w+)`", header)
    assert ([row[0] for row in cells], values) == ([*ROWS], [removal.value for removal in Removal])
    for row, *fates in cells:
        text, named = ROWS[row]
        # Beside one that is older, one that is newer, and the newest.
        beside = saved("p50", "p800") if text == "e900" else saved("p50", "p800", "e850")
        (checkpoint,) = saved(text)
        for value, fate in zip(values, fates, strict=True):
            always, _, exception = fate.partition("; ")
            for count, where in ((None, ""), (1, "beyond"), (3, "among")):
                rules = RetentionRules(remove=Removal[value], save_interval=every(100), max_checkpoints=count, **named)
                kept = checkpoint.name in rules.why_keep([checkpoint, *beside])
                expected = exception if where and exception.startswith(where) else always
                assert kept == expected.endswith("kept"), (row, value, count)


FOUR = ("p0", "p100", "p200", "p250", "p300", "e310", "e320")
EPHEMERAL, ALL, NEVER = Removal.ephemeral_only, Removal.all_without_rule, Removal.never


@pytest.mark.parametrize(
    ("there", "rules", "goes"),
    [
        (FOUR, {}, {310}),
        (FOUR, {"remove": NEVER, "max_checkpoints": 1}, set()),
        (FOUR, {"max_checkpoints": 2}, {0, 100, 200, 310}),
        (FOUR, {"max_checkpoints": 9}, {310}),
        (FOUR, {"max_checkpoints": 2, "fixed_steps": frozenset({100})}, {0, 200, 310}),
        (("p100!", "p200", "p300"), {"max_checkpoints": 1}, {200}),
        (("e10!", "e20", "p30"), {}, {20}),
        (("e10", "e20", "p30"), {}, {10, 20}),  # superseded by a save of any kind
        (("p10", "e20"), {}, set()),  # the newest stays, ephemeral or not
        (("e20",), {}, set()),
        ((), {}, set()),
        (FOUR, {"remove": ALL, "save_interval": every(100)}, {250, 310}),
        (FOUR, {"remove": ALL, "save_interval": every(100), "fixed_steps": frozenset({250})}, {310}),
        (FOUR, {"remove": ALL}, {100, 200, 250, 300, 310}),
        (FOUR, {"remove": ALL, "max_checkpoints": 1}, {100, 200, 250, 310}),
        (FOUR, {"remove": ALL, "save_interval": every(100), "max_checkpoints": 2}, {310}),
        (("p150.", "p200", "p330."), {"remove": ALL, "save_interval": every(100)}, {150}),  # the current final
        (("p5", "p6", "p7"), {"remove": ALL, "save_interval": every("30min")}, set()),  # steps cannot tell
        (("p4", "p5", "p7"), {"remove": ALL, "save_interval": every("0.5ep", 10)}, {4}),
        (FOUR, {"max_checkpoints": 1, "keep_every": every(100)}, {0, 250, 310}),
        (FOUR, {"max_checkpoints": 1, "keep_every": every(250)}, {0, 100, 200, 310}),
        (FOUR, {"remove": ALL, "keep_every": every(250)}, {100, 200, 300, 310}),
        (("e100", "p200", "p300"), {"max_checkpoints": 1, "keep_every": every(100)}, {100}),  # for regular ones alone
        (("e1=3", "e2=1", "e3=2", "p9"), {"keep_best": BestRule("val/loss", Mode.min, 2)}, {1}),
        (("e1=1", "e2=1", "p9"), {"keep_best": BestRule("val/loss")}, {1}),  # a tie goes to the newer
        (("e1=nan", "e2=7", "p9"), {"keep_best": BestRule("val/loss", Mode.min, 5)}, {1}),
        (("p1=1", "p2=2", "p3=3"), {"max_checkpoints": 1, "keep_best": BestRule("val/loss")}, {2}),
        (("p1=1", "p2=2", "p3=3"), {"remove": ALL, "keep_best": BestRule("val/loss")}, {2}),
        (("p1=1", "p2=2", "p3=3"), {"remove": NEVER, "keep_best": BestRule("val/loss")}, set()),
        (("p1", "p2", "p3~"), {}, set()),  # weights with NaN stay while they are the newest of all
        (("p1", "p2~", "p3~"), {}, {2}),  # but not longer
        (("p1", "p2~!", "p3~", "p4"), {}, {3}),
        (("p1", "p2~", "p3", "p4"), {"max_checkpoints": 2}, {1, 2}),  # and are not counted
        (("p1", "p2", "p3~"), {"max_checkpoints": 2}, set()),
        (("p1", "e2", "e3~"), {}, set()),  # nor do they stand in for a good one
    ],
)
def test_what_no_rule_keeps_goes(there: tuple[Any, ...], rules: dict[str, Any], goes: set[int]) -> None:
    removed = RetentionRules(**rules).why_remove(saved(*there))
    assert {int(name[4:]) for name in removed} == goes
    assert all(removed.values())


def test_an_interval_in_samples_keeps_by_the_samples_that_a_checkpoint_had() -> None:
    there = [
        replace(
            checkpoint,
            progress=Progress(step=checkpoint.step, samples=8 * checkpoint.step, last_samples=8 * checkpoint.step - 8),
        )
        for checkpoint in saved("p1", "p2", "p3")
    ]
    assert list(RetentionRules(ALL, save_interval=every("16sp")).why_remove(there)) == ["step1"]


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"max_checkpoints": 1, "remove": Removal.all_without_rule}, True),
        ({"max_checkpoints": 1, "remove": Removal.all_without_rule, "save_interval": None}, False),
        ({"max_checkpoints": 1, "remove": Removal.never}, True),
        ({"remove": Removal.all_without_rule}, False),
        ({"max_checkpoints": 1}, False),
    ],
)
def test_a_number_that_does_not_limit_the_regular_ones_is_a_warning(settings: dict[str, Any], warns: bool) -> None:
    assert (CheckpointConfig(**settings).describe_unlimited() is not None) == warns


@pytest.mark.parametrize("remove", list(Removal))
@pytest.mark.parametrize("max_checkpoints", [None, 1, 2])
def test_every_valid_one_is_either_kept_or_removed_and_the_newest_is_kept(
    remove: Removal, max_checkpoints: int | None
) -> None:
    rules = RetentionRules(remove, max_checkpoints, save_interval=every(100))
    there = saved(*FOUR)
    keep, gone = rules.why_keep(there), rules.why_remove(there)
    assert keep.keys() | gone.keys() == {one.name for one in there}
    assert not keep.keys() & gone.keys()
    assert "step320" in keep


def test_retention_is_the_same_when_it_is_asked_again_after_the_removal() -> None:
    for remove in Removal:
        rules = RetentionRules(remove, 2, save_interval=every(100))
        there = saved(*FOUR)
        gone = rules.why_remove(there)
        rest = [one for one in there if one.name not in gone]
        assert rules.why_remove(rest) == {}


@pytest.mark.parametrize("seed", range(300))
def test_what_is_settled_stays_and_decides_nothing_whatever_is_saved_later(seed: int) -> None:
    chance = random.Random(seed)

    def checkpoint(step: int) -> Saved:
        return Saved(
            f"step{step}",
            step,
            chance.choice([CheckpointKind.regular, CheckpointKind.ephemeral]),
            pinned=chance.random() < 0.2,
            finite=chance.random() < 0.5,
            of_stop=chance.random() < 0.3,
            metrics={"val/loss": chance.random()} if chance.random() < 0.5 else {},
            progress=Progress(step=step, seconds=10.0 * step),
        )

    rules = RetentionRules(
        rolls_back=chance.random() < 0.5,
        remove=chance.choice(list(Removal)),
        max_checkpoints=chance.choice([None, 1, 3]),
        keep_every=chance.choice([None, every(5)]),
        keep_by_age=chance.choice([(), ((Duration.parse("40s"), 2),)]),
        keep_best=chance.choice([None, BestRule("val/loss", count=2)]),
        save_interval=chance.choice([None, every(3)]),
    )
    saved = [checkpoint(step) for step in range(8)]
    gone = rules.why_remove(saved)
    settled, rest = rules.split_settled([one for one in saved if one.name not in gone])
    for step in range(8, 16):
        rest = [*rest, checkpoint(step)]
        whole = rules.why_remove([*settled, *rest])
        assert whole == rules.why_remove(rest)
        rest = [one for one in rest if one.name not in whole]


def test_reasons_tell_why() -> None:
    there = saved("p0", "p50!", "p100", "e110", "p150.")
    rules = RetentionRules(max_checkpoints=1, fixed_steps=frozenset({0}))
    assert rules.why_keep(there) == {"step150": "final", "step50": "pinned", "step0": "fixed step"}
    assert rules.why_remove(there) == {
        "step100": "beyond the 1 newest regular",
        "step110": "ephemeral, and step150 is newer",
    }


def test_what_is_kept_is_reported_from_the_newest_and_what_goes_from_the_oldest_on() -> None:
    there, rules = saved("p3", "p1", "p5", "p2", "p4"), RetentionRules(max_checkpoints=2)
    assert list(rules.why_keep(there)) == ["step5", "step4"]
    assert list(rules.why_remove(there)) == ["step1", "step2", "step3"]


@pytest.mark.parametrize("rolls_back", [False, True])
def test_the_checkpoint_to_go_back_to_stays_until_a_rule_saves_again(rolls_back: bool) -> None:
    rules = RetentionRules(rolls_back=rolls_back)
    older, by_rule, damaged = Saved("step2", 2, E), Saved("step3", 3, E), Saved("step4", 4, E, finite=False)
    stops = [Saved(f"step{step}", step, E, of_stop=True) for step in (5, 6)]
    gone = {"step2", "step4", "step5"} | (set() if rolls_back else {"step3"})
    assert rules.why_remove([older, by_rule, damaged, *stops]).keys() == gone
    assert rules.why_remove([by_rule, *stops, Saved("step7", 7, E)]).keys() == {"step3", "step5", "step6"}


@pytest.mark.parametrize("moment", [Occasion.stop, Occasion.part])
def test_a_step_that_a_rule_names_is_not_one_of_a_stop(moment: Occasion) -> None:
    rules = SaveRules(ephemeral_save_interval=every(5))
    reasons = [
        decision and decision.reason
        for step in (5, 6)
        for decision in [ask(rules, Progress(step=step), None, moment=moment)]
    ]
    assert reasons[0] not in OF_STOPS
    assert reasons[1] in OF_STOPS


def test_a_stop_at_the_very_end_saves_even_where_the_end_does_not() -> None:
    rules = SaveRules(save_final=False)
    decision = ask(rules, Progress(step=5), None, moment=LAST)
    assert decision is not None
    assert (decision.kind, decision.reason) == (E, "training was stopped")
    assert ask(SaveRules(save_final=False, save_on_stop=False), Progress(step=5), None, moment=LAST) is None


def aged(step: int, seconds: float | None, kind: CheckpointKind = P, **more: Any) -> Saved:
    progress = None if seconds is None else Progress(step=step, seconds=seconds)
    return Saved(f"step{step}", step, kind, progress=progress, **more)


HOURS = [aged(step, 1200.0 * step) for step in range(1, 10)]
"""Three in each hour but the first, which has two."""


@pytest.mark.parametrize(
    ("saved", "ages", "kept"),
    [
        (HOURS, {}, [9]),
        (HOURS, {"1h": 1}, [9]),
        (HOURS, {"1h": 2}, [9, 8]),  # step 9 begins an hour
        (HOURS, {"1h": 24}, [9, 8, 5, 2]),
        (HOURS, {"2h": 24}, [9, 5]),
        (HOURS, {"1h": 2, "2h": 2}, [9, 8, 5]),
        ([*HOURS, aged(40, 48000.0)], {"1h": 3}, [40, 9, 8]),  # hours without any are not counted
        ([*HOURS, aged(10, 12000.0, E)], {"1h": 24}, [10, 9, 8, 5, 2]),  # an ephemeral one stays as the newest alone
        ([*HOURS, aged(10, 12000.0, finite=False)], {"1h": 2}, [10, 9, 8]),
        ([*HOURS[:8], aged(9, 10800.0, E), aged(10, 12000.0)], {"1h": 24}, [10, 8, 5, 2]),
        ([aged(1, None), *HOURS[2:]], {"1h": 1}, [9, 1]),  # its age is unknown
    ],
    ids=lambda value: None if isinstance(value, list) and isinstance(value[0], Saved) else str(value),
)
def test_the_newest_permanent_of_each_span_of_training_stays(
    saved: list[Saved], ages: dict[str, Any], kept: list[int]
) -> None:
    spans = tuple((Duration.parse(length), count) for length, count in ages.items())
    rules = RetentionRules(max_checkpoints=1, keep_by_age=spans)
    assert list(rules.why_keep(saved)) == [f"step{step}" for step in kept]
    assert set(rules.why_remove(saved)) == {checkpoint.name for checkpoint in saved} - set(rules.why_keep(saved))


def test_thinning_as_checkpoints_come_keeps_what_thinning_at_the_end_does() -> None:
    rules = RetentionRules(max_checkpoints=1, keep_by_age=((Duration.parse("1h"), 3), (Duration.parse("1d"), 2)))
    present: list[Saved] = []
    everything = [aged(step, 700.0 * step) for step in range(1, 300)]
    for checkpoint in everything:
        present.append(checkpoint)
        removable = rules.why_remove(present)
        present = [saved for saved in present if saved.name not in removable]
    assert [saved.name for saved in reversed(present)] == list(rules.why_keep(everything))


# Why training stops, and that a run which is complete is finished.


TEN = Interval(Duration.parse(10))
SEVEN = Interval(Duration.parse(7))
WISH = Stop("signal", finished=False)
DONE = Stop("no better", finished=True, by="early_stopping")


@pytest.mark.parametrize(
    ("limits", "step", "process_s", "stop_request", "reason", "finished"),
    [
        (Limits(TEN), 9, 0.0, None, None, None),
        (Limits(TEN), 10, 0.0, None, "max_duration of 10 steps reached", True),
        (Limits(TEN), 10, 0.0, WISH, "max_duration of 10 steps reached", True),
        (Limits(TEN), 10, 0.0, DONE, "max_duration of 10 steps reached", True),
        (Limits(TEN), 3, 0.0, WISH, "signal", False),
        (Limits(TEN, max_time_s=5), 3, 4.9, None, None, None),
        (Limits(TEN, max_time_s=5), 3, 5.1, None, "max_time of 5s used up", False),
        (Limits(TEN, max_time_s=5), 10, 5.1, WISH, "max_duration of 10 steps reached", True),
    ],
)
def test_the_strongest_reason_ends_the_run(
    limits: Limits, step: int, process_s: float, stop_request: Stop | None, reason: str | None, finished: bool | None
) -> None:
    stop = limits.why_stop(Progress(step=step), process_s=process_s, stop_request=stop_request)
    assert stop == (None if reason is None else Stop(reason, bool(finished)))


@pytest.mark.parametrize("request_of", [None, WISH])
def test_a_hard_stop_ends_a_part_of_the_run(request_of: Stop | None) -> None:
    stop = Limits(TEN, SEVEN, max_time_s=5).why_stop(Progress(step=7), process_s=9, stop_request=request_of)
    assert stop == Stop("hard_stop at 7 steps", finished=True, is_part=True)
    assert not stop.is_end


def test_a_run_that_ends_at_its_hard_stop_is_at_its_end() -> None:
    assert Limits(SEVEN, SEVEN).why_stop(Progress(step=7), process_s=0.0, stop_request=None) == Stop(
        "max_duration of 7 steps reached", finished=True
    )
    assert Limits(TEN, SEVEN).why_stop(Progress(step=7), process_s=0.0, stop_request=DONE) == DONE


@pytest.mark.parametrize(
    ("limits", "following"),
    [
        (Limits(TEN), 10),
        (Limits(TEN, SEVEN), 7),
        (Limits(TEN, max_time_s=5), 4),
        (Limits(Interval(Duration.parse("9tok"))), 4),
        (Limits(Interval(Duration.parse("2ep"), 6)), 12),
        (Limits(TEN, Interval(Duration.parse("9s"))), 4),
    ],
)
def test_an_end_is_looked_for_where_it_may_come(limits: Limits, following: int) -> None:
    assert limits.next_step(Progress(step=3)) == following
