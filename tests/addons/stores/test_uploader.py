"""The thread that sends checkpoints to a store: whatever fails, nothing waits for it without end."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from trainer_cli.addons.stores.uploader import Uploader

WAIT_S = 600.0


@pytest.mark.parametrize(
    "failure", [OSError("no answer"), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()], ids=repr
)
def test_a_send_that_fails_in_any_way_is_reported_and_sent_again(
    failure: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[str] = []
    failures = [failure]

    def send(name: str) -> None:
        if failures:
            raise failures.pop()
        sent.append(name)

    uploader = Uploader(send, lambda name: f"s3://bucket/{name}")
    uploader.add("step1")
    assert uploader.wait(WAIT_S) == ["step1"]
    assert f"s3://bucket/step1 is not in the store yet: {failure or type(failure).__name__}" in caplog.text
    uploader.add("step2")
    assert uploader.wait(WAIT_S) == []
    assert sent == ["step1", "step2"]


def test_without_a_thread_a_checkpoint_waits_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sent: list[str] = []
    uploader = Uploader(sent.append, str)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(threading.Thread, "start", refuse)
        uploader.add("step1")
        uploader.retry()
        assert uploader.wait(WAIT_S) == ["step1"]
    assert "are sent to the store later: can't start new thread" in caplog.text
    uploader.add("step2")
    assert uploader.wait(WAIT_S) == []
    assert sent == ["step1", "step2"]
