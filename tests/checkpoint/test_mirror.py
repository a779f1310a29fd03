"""The thread that sends checkpoints to a second place: whatever fails, nothing is lost, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from test_storage import put

from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.checkpoint.storage.mirror import Mirror
from trainer_cli.errors import StoreAwayError, as_clause

WAIT_S = 600.0
AWAY = StoreAwayError("no answer", where="s3://bucket")


class Place:
    """A folder and a mirror of it; `strike` is called before each sending."""

    def __init__(self, folder: Path) -> None:
        self.source = LocalStorage(folder)
        self.mirror = Mirror(self.source, self.send, lambda name: f"s3://bucket/{name}")
        self.strike: Callable[[], object] = lambda: None
        self.sent: list[str] = []
        self.tried = 0

    def send(self, name: str) -> None:
        self.tried += 1
        self.strike()
        self.sent.append(name)

    def fail(self, *failures: BaseException) -> None:
        """Raise these before the next sendings."""
        remaining = list(failures)

        def raise_next() -> None:
            if remaining:
                raise remaining.pop(0)

        self.strike = raise_next


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize(
    "failure",
    [OSError("no answer"), AWAY, SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()],
    ids=repr,
)
def test_a_sending_that_fails_in_any_way_is_reported_once_and_repeated(
    failure: BaseException, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.fail(failure, failure)
    for step in (1, 2):
        put(place.source, f"step{step}")
    place.mirror.add("step1")
    assert place.mirror.drain(WAIT_S)
    assert place.mirror.waiting() == ["step1"]
    assert place.mirror.finish(WAIT_S) == ["step1"]
    assert caplog.text.count(f"s3://bucket/step1 is not in the store yet: {as_clause(failure)}") == 1
    place.mirror.add("step2")
    assert place.mirror.finish(WAIT_S) == []
    assert place.sent == ["step1", "step2"]


def test_without_a_thread_a_checkpoint_is_sent_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    put(place.source, "step1")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        place.mirror.add("step1")
        assert place.sent == ["step1"]
        assert place.mirror.finish(WAIT_S) == []


def test_while_a_store_is_away_only_the_oldest_is_tried_and_what_waits_may_be_removed(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.fail(AWAY, AWAY, AWAY)
    for step in (1, 2, 3):
        put(place.source, f"step{step}")
        place.mirror.add(f"step{step}", hold=True)
        place.mirror.drain(WAIT_S)
        assert place.tried == step
        names = [f"step{number}" for number in range(1, step + 1)]
        assert place.mirror.waiting() == names
        assert not any(map(place.mirror.holds, names))
    assert place.source.remove("step2")
    with caplog.at_level(logging.INFO):
        assert place.mirror.finish(WAIT_S) == []
    assert place.sent == ["step1", "step3"]
    assert "step2 was removed before it was sent" in caplog.text


def test_one_that_fails_in_another_way_does_not_delay_the_others(place: Place) -> None:
    place.fail(OSError("refused"))
    for step in (1, 2):
        put(place.source, f"step{step}")
    place.strike, strike = lambda: None, place.strike
    go = threading.Event()
    place.strike = lambda: (go.wait(WAIT_S), strike())
    for step in (1, 2):
        place.mirror.add(f"step{step}")
    go.set()
    place.mirror.drain(WAIT_S)
    assert (place.sent, place.mirror.waiting()) == (["step2"], ["step1"])
    assert place.mirror.finish(WAIT_S) == []


def test_one_that_is_held_and_not_begun_gives_way_to_the_next(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    go, begun = threading.Event(), threading.Event()
    place.strike = lambda: (begun.set(), go.wait(WAIT_S))
    for step in (0, 1, 2, 3):
        put(place.source, f"step{step}")
    place.mirror.add("step1", hold=True)
    assert begun.wait(WAIT_S)
    place.mirror.add("step0")
    place.mirror.add("step2", hold=True)
    assert [place.mirror.holds(f"step{step}") for step in range(4)] == [False, True, True, False]
    place.mirror.add("step3", hold=True)
    assert [place.mirror.holds(f"step{step}") for step in range(4)] == [False, True, False, True]
    assert "step2 is not copied: step3 is due before an earlier copy has ended" in caplog.text
    go.set()
    assert place.mirror.finish(WAIT_S) == []
    assert place.sent == ["step1", "step0", "step3"]
    assert not any(map(place.mirror.holds, place.sent))


def test_one_that_is_added_while_it_is_sent_is_sent_again(place: Place) -> None:
    put(place.source, "step1")
    added = iter(["step1"])
    place.strike = lambda: [place.mirror.add(name) for name in added]
    place.mirror.add("step1")
    assert place.mirror.finish(WAIT_S) == []
    assert place.sent == ["step1", "step1"]
