"""Tell a command and URLs what happens to a run, each message in a thread with a time limit."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import threading
from pathlib import Path
from typing import Any

from trainer_cli.errors import UserError, without_secrets
from trainer_cli.loggers import import_extra
from trainer_cli.runs import RunDir
from trainer_cli.schema import TrainConfig
from trainer_cli.steps import RunStatus

log = logging.getLogger(__name__)

_LIMIT_S = 10.0
"""Time that a command has, and that the end of a fit waits for what is being sent."""


def notify_at_end(config: TrainConfig, error: BaseException | None, *, has_begun: bool) -> None:
    """Tell how a fit has ended, also before its first step, unless the run was finished before; with `restarts`, the
    last attempt."""
    if error is None and not has_begun:
        return
    run = RunDir(config.run_dir)
    summary, event = run.read_summary() if has_begun else {}, "end"
    # A process that was killed leaves `running`.
    status = summary.get("status", RunStatus.failed).replace(RunStatus.running, RunStatus.killed)
    reason = summary.get("reason") if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
    text = f"{status} at step {summary.get('step', 0)}: {reason}"
    if error is not None or status in (RunStatus.failed, RunStatus.killed):
        # The parser of overrides reads a second `=`, as in the runs of a sweep, only in quotes.
        path = f'"{run.path}"' if "=" in str(run.path) else run.path
        event, text = "failure", f"{text}\nto resume it: train fit {shlex.quote(f'resume={path}')}"
    notifier = Notifier(config)
    # Not the whole summary: a variable of the environment has a limit.
    notifier.tell(event, text, **{key: summary.get(key) for key in ("status", "step", "last_metrics", "best_metrics")})
    notifier.wait()


class Notifier:
    """Tells of the events that the config of a run names. A failure to do so is a warning."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._run = config.notify, Path(config.run_dir)
        self._threads: list[threading.Thread] = []

    def tell(self, event: str, message: str, **facts: Any) -> None:
        """Begin to send a message, from any thread. Values from the environment are left out of all that is sent."""
        if event in self._config.events:
            facts |= {"event": event, "run": str(self._run), "message": f"{self._run} {message}"}
            content = without_secrets(json.dumps(facts, default=str))
            # A daemon: a program that hangs must not keep this process from ending.
            self._threads.append(threading.Thread(target=self._send, args=(content,), name="notify", daemon=True))
            self._threads[-1].start()

    def wait(self) -> None:
        """Wait for the last message, a limited time."""
        for thread in self._threads[-1:]:
            thread.join(_LIMIT_S)

    def _send(self, content: str) -> None:
        """Send in a thread."""
        message, command, urls = json.loads(content)["message"], self._config.command, self._config.url
        try:
            if command is not None:
                subprocess.run(
                    command,
                    shell=True,
                    input=f"{message}\n".encode(),
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "TRAIN_FACTS": content},
                    timeout=_LIMIT_S - 1,
                    check=True,
                    # The Ctrl-C of a terminal is for the training.
                    start_new_session=True,
                )
            if urls is not None and not open_urls(urls).notify(body=message, title="train"):
                raise OSError("notify.url did not accept it")
        # Nothing that a library or a program does may reach the training.
        except Exception as error:
            # What ended the fit is printed anyway.
            level = logging.DEBUG if getattr(error, "what", str(error)) in message else logging.WARNING
            log.log(level, "a message of notify was not sent: %s", error)


def open_urls(urls: str) -> Any:
    """The object of Apprise that sends to URLs.

    Raises:
        UserError: Apprise is not installed, or does not know such a URL, which may hold a password and is not shown.
    """
    client = import_extra("apprise", "notify").Apprise()
    if not client.add(urls):
        cure = "https://appriseit.com/services lists them; a webhook is json://HOST/PATH, or jsons:// for https."
        raise UserError("Apprise does not know a URL of this kind", where="notify.url", cure=cure)
    return client
