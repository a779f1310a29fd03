"""What becomes of a run is told: by a command, by a URL, in the log; and it never harms the run."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from command import hold, make_project, names, records, running, train, weights
from tiny import Line, loader, trainer

from trainer_cli.addons.watch.memory_report import note_tensors
from trainer_cli.addons.watch.notify import Notifier, open_urls
from trainer_cli.addons.watch.watch import Watch, name_missing
from trainer_cli.errors import UserError, forget_secrets, replace_in_messages
from trainer_cli.runs import RunDir
from trainer_cli.schema.sections import NotifyConfig, TrainConfig
from trainer_cli.trainer.hooks import Callback

pytestmark = pytest.mark.slow

TELL = ('notify.command="cat >> told; echo >> told; echo $TRAIN_FACTS >> facts"',)
"""Appends each message to the file `told`, and its facts to `facts`, in the project."""
PARTS = '''
import os

import torch

from mine.parts import Line, Points, pass_by
from trainer_cli import Callback


class Data:
    """Points of which one is far off the line, which a spike of the loss shows once an epoch."""

    def __init__(self, size=160):
        self.train, self.val = Off(size, "train"), Points(20, "val")


class Off(Points):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y * 1e4 if index % 320 == 5 else y


class Blocks(Points):
    """Hangs on one rank alone."""

    def __getitem__(self, index):
        if os.environ.get("RANK", "0") == "1" and index == 77:
            pass_by("train")
        return torch.rand(2), torch.zeros(())


class OnRank:
    def __init__(self):
        self.train, self.val = Blocks(160, "train"), None


class KillOnce(Callback):
    """Kills the process after a step, the first time."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.progress.step == self.step and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)


class Huge(Line):
    def forward(self, batch):
        if self.training and torch.is_grad_enabled():
            torch.empty(1 << 50, dtype=torch.uint8)
        return super().forward(batch)
'''
FAKE = '''
"""Stands in for Apprise: what is sent to json://HOST:PORT/ is posted there."""

import json
from urllib.request import urlopen


class Apprise:
    def add(self, urls):
        self.urls = urls.split()
        return all(url.startswith("json://") for url in self.urls)

    def notify(self, body, title):
        for url in self.urls:
            urlopen(url.replace("json", "http", 1), json.dumps({"message": body}).encode()).close()
        return True
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path, **{"mine/more.py": PARTS})


def _told(folder: Path) -> list[str]:
    return [line for line in (folder / "told").read_text().splitlines() if line]


def test_the_end_and_a_new_best_are_told(project: Path) -> None:
    events = "notify.events=[end,failure,killed,stall,best]"
    assert train("fit", "mine", "name=a", *TELL, events, cwd=project).code == 0
    best, end = _told(project)
    assert best.startswith("runs/a has a new best at step 16: val/loss ")
    assert end == "runs/a finished at step 40: max_duration of 40 steps reached"
    facts = [json.loads(line) for line in (project / "facts").read_text().splitlines()]
    assert [(fact["event"], fact["run"], fact["step"]) for fact in facts] == [
        ("best", "runs/a", 16),
        ("end", "runs/a", 40),
    ]
    # A finished run that is started again has nothing to tell.
    assert train("fit", "mine", "name=a", *TELL, events, cwd=project).code == 0
    assert len(_told(project)) == 2


def test_a_failure_is_told_with_the_command_that_resumes_and_without_secrets(project: Path) -> None:
    done = train("fit", "mine", "name=a", *TELL, "model.width=${oc.env:WIDTH}", cwd=project, WIDTH="-sesame")
    assert done.code == 2
    # Before anything was written: there is no run to resume, and its command begins one.
    assert _told(project)[0].startswith("runs/a failed at step 0: ")
    assert "sesame" not in (project / "told").read_text() + (project / "facts").read_text()
    (project / "told").unlink()
    huge = ("model._target_=mine.more.Huge", "name=b", *TELL)
    assert train("fit", "mine", *huge, cwd=project).code == 1
    first, resume = _told(project)
    assert first.startswith("runs/b failed at step 0: RuntimeError: ")
    assert resume == "to resume it: train fit resume=runs/b"


def test_a_command_that_fails_is_a_warning_and_the_run_ends_as_without(project: Path) -> None:
    done = train("fit", "mine", "name=a", "notify.command=no-such-program", cwd=project)
    assert done.code == 0
    assert done.err.count("a message of notify was not sent") == 1


def test_a_killed_run_under_restarts_is_told_and_ends_bit_for_bit_as_without_the_kill(project: Path) -> None:
    """With a spike that is left out in each epoch, before and after the kill, at an interval of logs of four."""
    spiked = (
        "data._target_=mine.more.Data", "callbacks=loss_spike", "callbacks.loss_spike.action=skip",
        "callbacks.loss_spike.window=12", "callbacks.loss_spike.deviations=50",
    )  # fmt: skip
    straight = train("fit", "mine", "name=straight", *spiked, cwd=project)
    assert straight.code == 0
    assert straight.err.count("loss spike at step") == 2
    assert "`train data runs/straight " in straight.err
    kill = ("restarts.max=2", "restarts.backoff=null", "+callbacks.kill={_target_: mine.more.KillOnce, step: 30}")
    done = train("fit", "mine", "name=killed", *spiked, *kill, *TELL, cwd=project)
    assert done.code == 0, done.err
    killed, end = _told(project)
    assert killed.startswith("runs/killed killed after its record of step 28, and resumed at step 16")
    assert end.startswith("runs/killed finished at step 40")
    folders = [project / "runs" / name for name in ("straight", "killed")]
    assert len({weights(folder / "checkpoints/step40") for folder in folders}) == 1
    assert records(folders[0] / "metrics.jsonl") == records(folders[1] / "metrics.jsonl")


def test_two_ranks_that_go_back_and_are_killed_end_as_without_the_kill(project: Path) -> None:
    """The spike is in a batch of one rank; the batches of a step are accumulated, and saved every eight steps."""
    two = (
        "parallel=ddp", "parallel.processes_per_node=2", "device=cpu", "data._target_=mine.more.Data",
        "+data.size=1280", "loop.grad_accum_steps=2", "checkpoint.save_interval=8", "callbacks=loss_spike",
        "callbacks.loss_spike.action=roll_back", "callbacks.loss_spike.window=12", "callbacks.loss_spike.deviations=50",
    )  # fmt: skip
    straight = train("fit", "mine", "name=straight", *two, cwd=project)
    assert straight.code == 0, straight.err
    assert straight.err.count("loss spike at step") == straight.err.count("went back from step") > 0
    kill = ("restarts.max=3", "restarts.backoff=null", "+callbacks.kill={_target_: mine.more.KillOnce, step: 30}")
    killed = train("fit", "mine", "name=killed", *two, *kill, cwd=project)
    assert killed.code == 0, killed.err
    folders = [project / "runs" / name for name in ("straight", "killed")]
    assert len({weights(folder / "checkpoints/step40") for folder in folders}) == 1
    assert records(folders[0] / "metrics.jsonl") == records(folders[1] / "metrics.jsonl")


def test_a_spike_that_stops_names_the_commands_and_another_action_goes_on(project: Path) -> None:
    spiked = ("data._target_=mine.more.Data", "callbacks=loss_spike", "callbacks.loss_spike.window=12")
    done = train("fit", "mine", "name=a", *spiked, "callbacks.loss_spike.deviations=50", cwd=project)
    assert done.code == 1
    assert "error: loss spike at step" in done.err
    assert "`train data runs/a " in done.err
    assert "Traceback" not in done.err
    changed = ("callbacks.loss_spike.action=skip", "resume_allow=[callbacks]", "callbacks.loss_spike.deviations=50")
    assert train("fit", "mine", "name=a", *spiked, *changed, cwd=project).code == 0
    assert names(project / "runs/a/checkpoints")[-1] == "step40"


def test_the_stacks_of_a_step_that_does_not_end_are_in_the_log_and_the_run_goes_on(project: Path) -> None:
    held = hold(project, "train")
    with running("fit", "mine", "name=a", *TELL, "notify.stall=1s", cwd=project) as run:
        run.wait_for((project / "told").exists, "told of the stall")
        held.unlink()
        assert run.end().code == 0
    log = (project / "runs/a/train.log").read_text()
    assert "no progress for 1 s while training after step 6" in log
    assert "parts.py" in log.partition("(most recent call first)")[2]
    stall, end = _told(project)
    assert "mine/parts.py:" in stall
    assert " in pass_by" in stall
    assert "rank" not in stall
    facts, *_ = map(json.loads, (project / "facts").read_text().splitlines())
    assert {*facts} == {"event", "run", "message", "step"}
    assert end.startswith("runs/a finished")


def test_the_rank_that_the_others_wait_for_is_named(project: Path) -> None:
    held = hold(project, "train")
    two = ("parallel=ddp", "parallel.processes_per_node=2", "data._target_=mine.more.OnRank", "loop.eval_interval=null")
    with running("fit", "mine", "name=a", *TELL, "notify.stall=3s", *two, "device=cpu", cwd=project) as run:
        run.wait_for((project / "told").exists, "told of the stall")
        held.unlink()
        assert run.end().code == 0
    stall, *_ = _told(project)
    assert "rank 1 is at " in stall
    assert "mine/parts.py:" in stall
    assert stall.endswith("; 1 wait for other ranks")
    assert "most recent call first" in (project / "runs/a/train.log").read_text()
    assert "pass_by" in (project / "runs/a/train.rank1.log").read_text()


def test_an_evaluation_that_makes_progress_is_no_stall(tmp_path: Path) -> None:
    """An evaluation of many batches, each shorter than the limit, takes longer than it as a whole."""
    batches: list[int] = []

    class Slow(Callback):
        def on_validate_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            batches.append(batch_idx)
            threading.Event().wait(0.3)

    config = TrainConfig(run_dir=str(tmp_path), notify=NotifyConfig(stall="2s"))
    made = trainer(
        Line, callbacks={"slow": Slow(), "watch": Watch(config, RunDir(tmp_path))},
        settings={"max_duration": 2, "eval_interval": 2},
    )  # fmt: skip
    made.fit(loader(8), loader(40, shuffle=False))
    assert len(batches) == 10
    assert not (tmp_path / "train.log").exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "stalls"]


def test_a_stall_is_told_though_its_stacks_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "train.log").mkdir()
    told = threading.Event()

    class Waiting(Callback):
        def on_train_step_start(self, *args: Any) -> None:
            if made.progress.step == 1:
                assert told.wait(500)

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "no progress for 0.2 s" in record.getMessage():
                told.set()

    listener = Listener()
    logging.getLogger("trainer_cli").addHandler(listener)
    config = TrainConfig(run_dir=str(tmp_path), notify=NotifyConfig(stall="0.2s"))
    made = trainer(Line, callbacks={"waiting": Waiting(), "watch": Watch(config, RunDir(tmp_path))})
    try:
        made.fit(loader(8))
    finally:
        logging.getLogger("trainer_cli").removeHandler(listener)
    assert (told.is_set(), made.progress.step) == (True, 6)


@pytest.mark.parametrize(
    ("waits", "text"),
    [
        ([False], "at f0"),
        ([True], "at f0"),
        ([None], "its stack could not be written"),
        ([True, False, True], "rank 1 is at f1; 2 wait for other ranks"),
        ([True, None], "rank 1 does not answer; 1 wait for other ranks"),
        ([True, True], "; 2 wait for other ranks"),
    ],
)
def test_those_for_whom_others_wait_are_named(waits: list[bool | None], text: str) -> None:
    reports = [None if each is None else {"waits": each, "where": f"f{rank}"} for rank, each in enumerate(waits)]
    assert name_missing(reports) == text


def test_a_lack_of_memory_names_the_largest_tensors(project: Path) -> None:
    done = train("fit", "mine", "model._target_=mine.more.Huge", "model.width=262144", "name=a", cwd=project)
    assert done.code == 1
    assert "can't allocate memory" in done.err
    assert "the largest of " in done.err
    assert "2.0 MiB  parameter hidden.weight (262144, 2) torch.float32 cpu" in done.err
    assert "0.0 MiB" not in done.err
    rows = (project / "runs/a/out_of_memory.rank0.txt").read_text().splitlines()
    sizes = [float(row.split()[0].replace(",", "")) for row in rows]
    assert sizes == sorted(sizes, reverse=True)


def test_on_cuda_the_allocator_is_dumped_and_all_kinds_of_tensors_have_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the device: torch's own function is called with the path."""
    made = trainer(Line, optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.01))
    made.fit(loader(8))
    made.model(next(iter(loader(8).iterate(0))))["loss"].backward()
    monkeypatch.setattr(made, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    note_tensors(error, made, tmp_path)
    assert (tmp_path / "out_of_memory.rank0.pickle").read_text() == "snapshot"
    assert "memory_viz" in error.__notes__[0]
    # Other tests may have left large tensors.
    assert all(float(size) >= 1 for size in re.findall(r"([\d.]+) MiB  ", error.__notes__[0]))
    rows = (tmp_path / "out_of_memory.rank0.txt").read_text()
    for name in ("parameter linear.weight", "gradient of linear.weight", "exp_avg of linear.weight in the optimizer"):
        assert f"  {name} (1, 2) torch.float32 cpu" in rows
    other = RuntimeError("shapes do not match")
    note_tensors(other, made, tmp_path)
    assert not hasattr(other, "__notes__")


class _Received(BaseHTTPRequestHandler):
    bodies: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def _notifier(folder: Path, **settings: Any) -> Notifier:
    return Notifier(TrainConfig(run_dir=str(folder), notify=NotifyConfig(**settings)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["fake", "real"])
def test_a_url_is_told_by_apprise(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "real":
        pytest.importorskip("apprise", reason="apprise is not installed: pip install 'trainer-cli[notify]'")
    else:
        (tmp_path / "apprise.py").write_text(FAKE)
        monkeypatch.syspath_prepend(str(tmp_path))
    with HTTPServer(("127.0.0.1", 0), _Received) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        notifier = _notifier(tmp_path, url=f"json://127.0.0.1:{server.server_port}/")
        replace_in_messages("opensesame", "${oc.env:WORD}")
        notifier.tell("end", "finished with opensesame")
        notifier.wait()
        forget_secrets()
        server.shutdown()
    assert [body["message"] for body in _Received.bodies] == [f"{tmp_path} finished with ${{oc.env:WORD}}"]
    _Received.bodies.clear()
    with pytest.raises(UserError, match="does not know a URL of this kind"):
        open_urls("nonsense")
    # Not by monkeypatch, which would put it back.
    sys.modules.pop("apprise", None)


def test_a_url_without_apprise_is_refused_before_step_1(project: Path) -> None:
    if (project / "apprise.py").exists():
        pytest.skip("apprise is there")
    done = train("fit", "mine", "name=a", "notify.url=json://localhost/", cwd=project)
    assert done.code == 2
    assert done.err.count("this needs the package apprise, which is not installed") == 1
    assert 'pip install "trainer-cli[notify]"' in done.err
    assert not (project / "runs/a").exists()


def test_a_program_that_hangs_keeps_nobody_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr("trainer_cli.addons.watch.notify._LIMIT_S", 1.5)
    notifier = _notifier(tmp_path, command=f"echo $$ > {tmp_path}/pid; exec sleep 600")
    with caplog.at_level(logging.WARNING, "trainer_cli"):
        notifier.tell("end", "finished")
        notifier.wait()
    assert "timed out after" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_events_that_are_not_asked_for_are_not_told(tmp_path: Path) -> None:
    notifier = _notifier(tmp_path, command=f"touch {tmp_path}/told", events=["failure"])
    notifier.tell("end", "finished")
    notifier.wait()
    assert not (tmp_path / "told").exists()
