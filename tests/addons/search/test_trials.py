"""Which trial goes on: by a table, and as slow references decide it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.addons.search.search import Search
from trainer_cli.addons.search.trials import Trials
from trainer_cli.files import read_rows

RUNGS = ["0.1dur", "0.3dur"]


def rows_of(*losses: Mapping[str, float | None]) -> Iterator[Mapping[str, Any]]:
    """Trials that were begun in the order of the first rung, and have reached the rungs with these losses."""
    for key in losses[0]:
        yield {"event": "begin", "trial": key, "values": {"lr": key}}
    for rung, of_rung in enumerate(losses):
        for key, loss in of_rung.items():
            if rung:
                yield {"event": "go on", "trial": key, "rung": rung, "why": ""}
            yield {"event": "measure", "trial": key, "rung": rung, "loss": loss}


Rules = tuple[str, int, list[str]]
ASHA: Rules = ("asha", 3, RUNGS)
MEDIAN: Rules = ("median", 3, RUNGS)
THREE: Mapping[str, float | None] = {"a": 3, "b": 1, "c": 2}
NINE: Mapping[str, float | None] = dict(zip("abcdefghi", (9, 8, 7, 6, 5, 4, 3, 2, 1), strict=True))
CASES: dict[str, tuple[Rules, list[Mapping[str, float | None]], bool, str | None]] = {
    "too few for asha": (ASHA, [{"a": 3, "b": 1}], False, None),
    "of too few the best, once no other is left": (ASHA, [{"a": 3, "b": 1}], True, "b to 1"),
    "a third": (ASHA, [THREE], False, "b to 1"),
    "of equal ones the earlier": (ASHA, [{"a": 1, "b": 1, "c": 1}], False, "a to 1"),
    "who has gone on is counted": (ASHA, [THREE, {"b": 1}], False, None),
    "the highest rung first": (ASHA, [NINE, {"h": 2, "i": 1, "g": 3}], False, "i to 2"),
    "the next best of the lower rung": (ASHA, [NINE, {"i": 1}], False, "h to 1"),
    "the only one of a rung, once no other is left": (ASHA, [THREE, {"b": 1}], True, "b to 2"),
    "nothing after the end": (ASHA, [THREE, {"b": 1}, {"b": 1}], True, None),
    "never without a finite loss": (ASHA, [{"a": None, "b": None, "c": None}], True, None),
    "which counts at its rung": (ASHA, [{"a": None, "b": None, "c": 5}], False, "c to 1"),
    "another part for another eta": (("asha", 2, RUNGS), [{"a": 3, "b": 1}], False, "b to 1"),
    "three without a median": (MEDIAN, [THREE, {"b": 1, "c": 2}, {"b": 1, "c": 2}], False, "a to 1"),
    "the better half": (MEDIAN, [NINE, dict.fromkeys("fghi", 1), dict.fromkeys("fghi", 1)], False, "e to 1"),
    "not the worse one": (MEDIAN, [NINE, dict.fromkeys("efghi", 1), dict.fromkeys("efghi", 1)], True, None),
    "no rung without pruning": (("none", 3, RUNGS), [THREE], True, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_who_goes_on(case: str) -> None:
    settings, losses, is_idle, expected = CASES[case]
    row = Trials(*settings, rows_of(*losses)).choose(is_idle=is_idle)
    assert (None if row is None else f"{row['trial']} to {row['rung']}") == expected
    assert row is None or (row["event"] == "go on" and row["why"])


def test_reasons_say_how_many_go_on_at_which_rung() -> None:
    trials = Trials(*ASHA, rows_of(NINE, {"i": 1}))
    assert (trials.choose() or {})["why"] == "the best 3 of 9 go on at 0.1dur"
    assert trials.why_paused("a") == "the best 3 of 9 go on at 0.1dur, not this one"
    assert trials.why_paused("i") == "none of 1 goes on at 0.3dur yet"
    row = Trials(*ASHA, rows_of({"a": 3, "b": 1})).choose(is_idle=True)
    assert (row or {})["why"] == "the best of 2 goes on at 0.1dur: no other was left"
    gone_on = Trials(*ASHA, rows_of({"a": 3, "b": 1}, {"b": 2}))
    assert gone_on.why_paused("a") == "the best of 2 goes on at 0.1dur, not this one"


def test_trials_are_given_to_a_draw_with_what_was_measured() -> None:
    rows = [*rows_of({"a": 3, "b": 1}, {"b": 2}, {"b": 4}), {"event": "begin", "trial": "c", "values": {"lr": "c"}}]
    trials = Trials(*ASHA, rows)
    assert [tuple(each) for each in trials.list_trials()] == [
        ({"lr": "a"}, [3], False), ({"lr": "b"}, [1, 2, 4], True), ({"lr": "c"}, [], False)
    ]  # fmt: skip
    assert trials.list_unfinished() == ["c"]


def curve(trial: int, rung: int, seed: int) -> float:
    """The loss of a trial at a rung, whose order at the end differs somewhat from that at the beginning."""
    chance = random.Random(f"{seed} {trial}")
    quality, noise = chance.random(), [chance.random() for _ in range(3)]
    return quality + (0.3, 0.1, 0.0)[rung] * noise[rung]


def simulate(settings: Rules, count: int, seed: int) -> list[tuple[int, int]]:
    """Each part of a trial that is trained, in order, on one device: trial and rung."""
    trials, begun = Trials(*settings), 0
    trained: list[tuple[int, int]] = []
    while True:
        row = trials.choose()
        if row is None and begun < count:
            row = {"event": "begin", "trial": str(begun), "values": {}}
            begun += 1
        if row is None:
            row = trials.choose(is_idle=True)
        if row is None:
            return trained
        trials.apply(row)
        key, rung = row["trial"], row.get("rung", 0)
        trained.append((int(key), rung))
        trials.apply({"event": "measure", "trial": key, "rung": rung, "loss": curve(int(key), rung, seed)})


def refer(part: Callable[[int], int], count: int, seed: int, *, finishes: bool) -> list[tuple[int, int]]:
    """The same, by the definition of ASHA: before each training all rungs are ranked anew, from the trained parts."""
    trained: list[tuple[int, int]] = []

    def promotable() -> tuple[int, int] | None:
        for rung in (1, 0):
            at = [trial for trial, reached in trained if reached == rung]
            best = sorted(at, key=lambda trial: curve(trial, rung, seed))[: part(len(at))]
            above = [trial for trial, reached in trained if reached == rung + 1]
            if left := [trial for trial in best if trial not in above]:
                return left[0], rung + 1
        return None

    for new in (*range(count), None):
        while (following := promotable()) is not None:
            trained.append(following)
        if new is not None:
            trained.append((new, 0))
    while finishes and not any(rung == 2 for _, rung in trained):
        highest = max(rung for _, rung in trained)
        at = [trial for trial, rung in trained if rung == highest]
        trained.append((min(at, key=lambda trial: curve(trial, highest, seed)), highest + 1))
    return trained


@pytest.mark.parametrize("count", [1, 2, 5, 9, 40])
def test_a_search_is_that_of_the_slow_reference(count: int) -> None:
    for seed in range(20):
        for eta in (2, 3, 4):
            settings = ("asha", eta, RUNGS)
            assert simulate(settings, count, seed) == refer(lambda at, by=eta: at // by, count, seed, finishes=True)  # type: ignore[misc]
        assert simulate(MEDIAN, count, seed) == refer(lambda at: max((at + 1) // 2, 3), count, seed, finishes=False)


def test_asha_finds_a_good_trial_for_a_share_of_the_steps() -> None:
    shares, places = [], []
    for seed in range(50):
        trained = simulate(ASHA, 27, seed)
        shares.append(sum((0.1, 0.2, 0.7)[rung] for _, rung in trained) / 27)
        best = min(curve(trial, 2, seed) for trial, rung in trained if rung == 2)
        places.append(sum(curve(trial, 2, seed) < best for trial in range(27)))
    assert sum(shares) / 50 < 0.35
    assert sum(places) / 50 < 2


def test_rows_that_are_read_again_at_any_moment_lead_to_the_same_row() -> None:
    rows: list[Mapping[str, Any]] = []
    trials = Trials(*ASHA)
    for number in range(9):
        rows.append({"event": "begin", "trial": str(number), "values": {}})
        rows.append({"event": "measure", "trial": str(number), "rung": 0, "loss": curve(number, 0, 7)})
    for row in rows:
        trials.apply(row)
    while (chosen := trials.choose()) is not None:
        assert Trials(*ASHA, rows).choose() == chosen
        rows += [chosen, {"event": "measure", "trial": chosen["trial"], "rung": chosen["rung"], "loss": 1.0}]
        for each in rows[-2:]:
            trials.apply(each)


def test_a_trial_that_was_killed_is_chosen_again_once_before_any_other(tmp_path: Path) -> None:
    rules = {"sweep.prune": "asha", "sweep.eta": 2, "sweep.rungs": ["2st"]}
    search = Search(tmp_path / "search.jsonl", rules, lambda trials: ("abc"[len(trials)], {}), lambda *_: True)
    assert search.choose() == ("a", "2st")
    search.leave("a", is_killed=True)
    assert search.choose() == ("a", "2st")
    search.leave("a", is_killed=True)
    assert search.choose() == ("b", "2st")
    # One that has failed by itself would fail again.
    search.leave("b")
    assert search.choose() == ("c", "2st")


@pytest.mark.parametrize("prune", ["asha", "median"])
def test_whatever_fails_a_trial_goes_on_once_at_each_rung_and_the_next_command_begins_with_what_failed(
    prune: str, tmp_path: Path
) -> None:
    rules = {"sweep.prune": prune, "sweep.eta": 2, "sweep.rungs": ["2st", "4st"]}
    keys = "abcdef"
    for seed in range(50):
        file, chance = tmp_path / f"{seed}.jsonl", random.Random(seed)
        failed: set[str] = set()
        for command in range(4):
            search = Search(
                file, rules, lambda trials: (keys[len(trials)], {}) if len(trials) < 6 else None, lambda *_: True
            )
            again, failed = failed, set()
            while (chosen := search.choose()) is not None:
                key = chosen[0]
                assert not again or key in again, "before any other"
                again.discard(key)
                # The last command has no failure.
                if command < 3 and chance.random() < 0.3:
                    search.leave(key)
                    failed.add(key)
                else:
                    search.measure(key, "loss", chance.choice([0.1, 0.2, 0.3, None]), 1)
        assert search.is_complete
        for key in keys:
            gone_on = [row["rung"] for row in read_rows(file)[1:] if row["trial"] == key and row["event"] == "go on"]
            assert gone_on == [*range(1, len(gone_on) + 1)]
            assert len(gone_on) <= 2
