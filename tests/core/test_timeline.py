"""What is planned beforehand is what a training does that goes step by step, batch by batch, and forgets nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from small_parts import note

from trainer_cli.policy import BestRule, CheckpointKind, Occasion, RetentionRules, Saved, SaveFacts, SaveRules
from trainer_cli.policy.simulation import Simulation, Timeline
from trainer_cli.policy.stopping import Limits, Stop
from trainer_cli.schema.checkpoint_config import Removal
from trainer_cli.steps.intervals import Duration, Interval, StepCounts, count_epoch_steps, find_first_step
from trainer_cli.steps.progress import Progress


def naive(setting: Simulation, step_counts: StepCounts) -> dict[str, Any]:
    """The same by brute force: every batch counted, every step asked, every checkpoint judged each time."""
    saved, last, planned = list(setting.saved), setting.last_saved_step, Timeline()

    def retire(step: int) -> None:
        gone = setting.retention.why_remove(saved)
        planned.removals.extend((name, step, reason) for name, reason in gone.items())  # type: ignore[misc]
        saved[:] = [one for one in saved if one.name not in gone]

    def moment(now: Progress, occasion: Occasion, evaluated: bool) -> None:
        nonlocal last
        if last == now.step:
            return
        decision = setting.save.why_save(SaveFacts(now, occasion, last, loaded=setting.loaded))
        if decision is None:
            if evaluated and setting.save.keep_best is not None:
                planned.may_save.append(now.step)
            return
        name = f"step{now.step}"
        planned.saves.append((name, now.step, decision.kind, decision.reason))  # type: ignore[arg-type]
        saved.append(Saved(name, now.step, decision.kind, finished=occasion is Occasion.final, progress=now))
        last = now.step
        retire(now.step)

    retire(step_counts.start.step)
    moment(step_counts.start, Occasion.pre_train, False)
    for now in steps(step_counts):
        process_s = (now.step - step_counts.start.step) * (step_counts.step_time_s or 0.0)
        stop = setting.limits.why_stop(now, process_s=process_s, stop_request=None)
        done = stop is not None and stop.is_end
        due = any(one.due(now) for one in setting.eval_intervals)
        evaluated = done or (due and (stop is None or stop.is_part))
        if evaluated:
            planned.evaluations.append(now.step)
        part = stop is not None and stop.is_part
        ends = Occasion.final if done else Occasion.part if part else Occasion.stop
        occasion = Occasion.step if stop is None else ends
        moment(now, occasion, evaluated)
        if stop is not None:
            planned.end, planned.stop = now, stop
            break
    planned.kept = setting.retention.why_keep(saved)
    return _plain(planned)


def steps(step_counts: StepCounts) -> Iterator[Progress]:
    """The counts after each step, as the training loop counts them."""
    now = step_counts.start
    assert step_counts.epoch_batches is not None
    assert step_counts.epoch_samples is not None
    assert step_counts.batch_size is not None
    while True:
        last = now
        now = replace(
            now, last_samples=last.samples, last_tokens=last.tokens, last_seconds=last.seconds, last_epoch=last.epoch
        )
        for _ in range(step_counts.grad_accum_steps):
            size = min(step_counts.batch_size, step_counts.epoch_samples - now.epoch_samples)
            now.samples, now.epoch_samples, now.batch = now.samples + size, now.epoch_samples + size, now.batch + 1
            if now.batch == step_counts.epoch_batches:
                now.epoch, now.batch, now.epoch_samples = now.epoch + 1, 0, 0
                break
        now.step += 1
        made = now.step - step_counts.start.step
        now.tokens = step_counts.start.tokens + int(made * (step_counts.step_tokens or 0))
        now.seconds = step_counts.start.seconds + made * (step_counts.step_time_s or 0.0)
        yield now


def _plain(planned: Timeline) -> dict[str, Any]:
    def row(one: Any) -> Any:
        return one if isinstance(one, tuple) else tuple(getattr(one, name) for name in one.__slots__)[:4]

    return {
        "end": planned.end,
        "stop": planned.stop,
        "evaluations": planned.evaluations,
        "saves": [row(one) for one in planned.saves],
        "removals": [row(one) for one in planned.removals],
        "may_save": planned.may_save,
        "kept": planned.kept,
    }


def anything(seed: int) -> tuple[Simulation, StepCounts]:
    """A training with rules of every kind, from its beginning or from the middle of an earlier one."""
    chance = random.Random(seed)
    batch_size, samples = chance.randint(1, 9), chance.randint(9, 60)
    batches = min(-(-samples // batch_size), chance.randint(1, 40))
    accum = chance.randint(1, 4)
    whole = StepCounts(
        grad_accum_steps=accum,
        epoch_batches=batches,
        steps_per_epoch=count_epoch_steps(batches, accum, None),
        batch_size=batch_size,
        epoch_samples=samples,
        step_tokens=chance.choice([1, 37, 512]),
        step_time_s=0.25,
    )

    def cadence(*amounts: str) -> Interval | None:
        amount = chance.choice([*amounts, ""])
        return Interval(Duration.parse(amount), whole.steps_per_epoch) if amount else None

    every = "2st", "5st", "1ep", "0.5ep", "0.37ep", "17sp", "64sp", "700tok", "2s"
    best = BestRule("val/loss", count=2) if chance.random() < 0.3 else None
    fixed = frozenset(chance.sample(range(40), chance.randint(0, 3)))
    save_interval = cadence("7st", "1ep", "1.5ep", "50sp", "3000tok", "5s")
    setting = Simulation(
        limits=Limits(
            Interval(Duration.parse(chance.choice(["30st", "57st", "3ep", "2.6ep", "300sp"])), whole.steps_per_epoch),
            cadence("19st", "1.2ep", "140sp", "6s"),
            max_time_s=chance.choice([None, None, 5.0]),
        ),
        save=SaveRules(
            save_interval=save_interval,
            ephemeral_save_interval=cadence(*every),
            ephemeral_cooldown=chance.choice([None, Duration.parse(3), Duration.parse(6)]),
            fixed_steps=fixed,
            pre_train=chance.choice([None, True, False]),
            save_final=chance.random() < 0.7,
            save_on_stop=chance.random() < 0.7,
            keep_best=best,
        ),
        retention=RetentionRules(
            remove=chance.choice(list(Removal)),
            max_checkpoints=chance.choice([None, 1, 2, 5]),
            keep_every=cadence("10st", "1ep", "90sp"),
            keep_best=best,
            fixed_steps=fixed,
            save_interval=save_interval,
        ),
        eval_intervals=[*filter(None, [cadence(*every), cadence("7st", "40sp")])],
    )
    if chance.random() < 0.5:
        return setting, whole
    start = whole.at(chance.randint(1, 25))
    saved = tuple(
        _earlier(chance, whole, step) for step in sorted(chance.sample(range(start.step), min(4, start.step)))
    )
    saved = (*saved, Saved(f"step{start.step}", start.step, chance.choice(list(CheckpointKind)), progress=start))
    going_on = replace(setting, loaded=True, saved=saved, last_saved_step=start.step)
    return going_on, replace(whole, start=start)


def _earlier(chance: random.Random, step_counts: StepCounts, step: int) -> Saved:
    return Saved(
        f"step{step}",
        step,
        chance.choice(list(CheckpointKind)),
        pinned=chance.random() < 0.2,
        finite=chance.random() < 0.8,
        metrics={"val/loss": chance.random()} if chance.random() < 0.5 else {},
        progress=step_counts.at(step),
    )


@pytest.mark.parametrize("seed", range(250))
def test_the_events_are_those_of_a_training_that_asks_at_every_step(seed: int) -> None:
    setting, step_counts = anything(seed)
    end = setting.limits.why_stop(step_counts.start, process_s=0.0, stop_request=None)
    if end is not None:
        return
    assert _plain(setting.run(step_counts)) == naive(setting, step_counts)


@pytest.mark.parametrize("seed", range(60))
def test_the_counts_of_any_step_are_those_of_counting_up_to_it(seed: int) -> None:
    _, step_counts = anything(seed)
    for now, _ in zip(steps(step_counts), range(100), strict=False):
        assert step_counts.at(now.step) == now


def test_the_most_on_the_disk_is_while_what_is_replaced_is_still_there() -> None:
    setting = Simulation(
        limits=Limits(Interval(Duration.parse(10))),
        save=SaveRules(save_interval=Interval(Duration.parse(2))),
        retention=RetentionRules(max_checkpoints=2),
        saved=(Saved("old", 0, CheckpointKind.regular, pinned=True, progress=Progress()),),
        last_saved_step=0,
    )
    planned = setting.run(StepCounts(), size=lambda step: 100 + step, sizes={"old": 7})
    assert planned.peak is not None
    assert (planned.peak.step, planned.peak.count, planned.peak.size_bytes) == (10, 4, 7 + 106 + 108 + 110)
    assert list(planned.kept) == ["step10", "step8", "old"]


def test_an_end_that_cannot_be_reported_is_not_reported() -> None:
    setting = Simulation(
        limits=Limits(Interval(Duration.parse("1e9tok"))), save=SaveRules(save_interval=Interval(Duration.parse(2)))
    )
    planned = setting.run(StepCounts())
    assert planned.end is None
    assert [one.step for one in planned.saves] == [0]
    planned = setting.run(StepCounts(step_tokens=1e8))
    assert planned.end is not None
    assert [one.step for one in planned.saves] == [0, 2, 4, 6, 8, 10]


def test_a_rule_that_cannot_be_reported_is_left_out_and_the_others_are_not() -> None:
    setting = Simulation(
        limits=Limits(Interval(Duration.parse(10)), max_time_s=1.0),
        save=SaveRules(
            save_interval=Interval(Duration.parse("90s")), ephemeral_save_interval=Interval(Duration.parse(4))
        ),
        eval_intervals=[Interval(Duration.parse("3sp"))],
    )
    planned = setting.run(StepCounts())
    assert [(one.step, one.reason) for one in planned.saves] == [
        (0, "before the first step"), (4, "every 4 steps, ephemeral"), (8, "every 4 steps, ephemeral"),
        (10, "end of training"),
    ]  # fmt: skip
    assert planned.evaluations == [10]


def test_a_run_of_a_million_steps_asks_only_where_something_happens() -> None:
    asked: list[int] = []
    setting = Simulation(
        limits=Limits(Interval(Duration.parse("64000000sp"), 1000)),
        save=SaveRules(
            save_interval=Interval(Duration.parse("1ep"), 1000),
            ephemeral_save_interval=Interval(Duration.parse("19200sp"), 1000),
        ),
        retention=RetentionRules(max_checkpoints=5, keep_every=Interval(Duration.parse("10ep"), 1000)),
        eval_intervals=[Interval(Duration.parse("1ep"), 1000)],
    )
    step_counts = StepCounts(epoch_batches=1000, steps_per_epoch=1000, batch_size=64, epoch_samples=64000)
    planned = setting.run(step_counts, name=lambda at: note(asked, at.step) or f"step{at.step}")
    assert planned.end is not None
    assert planned.end.step == 1_000_000
    assert len(asked) == len(planned.saves) < 5000
    assert (len(planned.evaluations), len(planned.kept)) == (1000, 104)


def test_more_saves_than_are_to_be_foreseen_end_the_foresight() -> None:
    setting, step_counts = anything(3)
    everything = replace(
        setting,
        limits=Limits(Interval(Duration.parse(1000))),
        save=SaveRules(save_interval=Interval(Duration.parse(1))),
        stop_request=None,
    )
    step_counts = replace(step_counts, start=Progress())
    planned = everything.run(step_counts, most_saves=5)
    assert planned.cut
    assert len(planned.saves) == 6
    assert not everything.run(step_counts, most_saves=5000).cut


@pytest.mark.parametrize("holds_from", [0, 1, 2, 3, 8, 1000, 10**15])
def test_the_first_step_is_found(holds_from: int) -> None:
    assert find_first_step(lambda step: step >= holds_from, 0) == holds_from
    assert find_first_step(lambda step: False, 0) is None


def test_a_run_that_had_ended_when_it_was_killed_only_says_so() -> None:
    last = Saved("step4", 4, CheckpointKind.ephemeral, progress=Progress(step=4))
    setting = Simulation(
        limits=Limits(Interval(Duration.parse(10))),
        save=SaveRules(save_interval=Interval(Duration.parse(2))),
        saved=(last,),
        last_saved_step=4,
        loaded=True,
        stop_request=Stop("no better for 3 epochs", finished=True),
    )
    planned = setting.run(StepCounts(start=Progress(step=4)))
    assert planned.end is not None
    assert (planned.end.step, planned.stop, planned.saves) == (4, setting.stop_request, [])
    assert planned.kept == {"step4": "final"}
    assert (planned.completed["step4"].kind, planned.completed["step4"].reason) == (
        CheckpointKind.regular,
        "every 2 steps",
    )
