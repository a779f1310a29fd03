"""What stdout and stderr cannot show is replaced, and a terminal that was closed takes what is written."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from printed import Terminal

from trainer_cli.commands.command_line import listed_verbs, main
from trainer_cli.commands.streams import prepare_streams

PARTS = """
import torch
from torch import nn


class Data:
    def __init__(self):
        self.train = [(torch.ones(2), torch.ones(1))] * 8
        self.val = self.train[:2]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, batch):
        loss = (self.layer(batch[0]) - batch[1]).pow(2).mean()
        return {"loss": loss, "Größe": loss}
"""
EXPERIMENT = """# @package _global_
model: {_target_: umlauts.Net}
data: {_target_: umlauts.Data, batch_size: 4}
optimizer: {lr: 0.01}
loop: {max_duration: 2ep, log_interval: 1}
"""
NAME = "name='größe'"
RUN = "runs/größe"
VERBS = {
    "fit": ["fit", "+experiment=mine", NAME],
    "validate": ["validate", f"ckpt={RUN}@latest"],
    "top": ["top", "--once"],
    "tail": ["tail", RUN],
    "ckpt ls": ["ckpt", "ls", RUN],
    "ckpt show": ["ckpt", "show", f"{RUN}@latest"],
    "report": ["report", RUN],
    "list": ["list", "experiment"],
    "config": ["config", "+experiment=mine", NAME],
    "plan": ["plan", "+experiment=mine", NAME],
    "a mistake": ["config", "+experiment='größer'"],
    "an unknown key": ["config", "größe=1"],
}
_FAIL = {"a mistake", "an unknown key"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project whose names are beyond ASCII, with a run."""
    root = tmp_path_factory.mktemp("umlauts")
    (root / "configs/experiment").mkdir(parents=True)
    (root / "umlauts.py").write_text(PARTS, "utf-8")
    (root / "configs/experiment/mine.yaml").write_text(EXPERIMENT, "utf-8")
    before = Path.cwd()
    os.chdir(root)
    assert main(["fit", "+experiment=mine", NAME, "loop.max_duration=1ep"]) == 0
    yield root
    os.chdir(before)


@pytest.mark.parametrize(("verb", "encoding"), [*((verb, "ascii") for verb in VERBS), ("list", "latin-1")])
def test_a_stream_that_cannot_show_a_letter_ends_no_verb(
    verb: str, encoding: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding, errors="backslashreplace"))
    code = main(VERBS[verb])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    text = (out.getvalue() + err.getvalue()).decode(encoding)
    assert code == (2 if verb in _FAIL else 0), text
    assert "UnicodeEncodeError" not in text
    assert "Traceback" not in text


LOADING = {
    "env": ["env"],
    "plan": VERBS["plan"],
    "plan of a finished run": [*VERBS["plan"], "loop.max_duration=1ep"],
    "fit of a finished run": [*VERBS["fit"], "loop.max_duration=1ep"],
    "validate": VERBS["validate"],
    "replay": ["replay", RUN, "1"],
    "plan of a sweep": [*VERBS["plan"], "-m", "seed=1,2"],
    "predict with a mistake": ["predict", "ckpt=runs/other@best"],
}


@pytest.mark.parametrize("case", [case for case in LOADING if LOADING[case][0] in listed_verbs()])
def test_a_verb_that_loads_torch_says_so_until_its_first_line(
    case: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    main(LOADING[case])
    looking = r"(looking for a checkpoint …\x1b\[K\r)?"
    evaluating = r"(evaluating 1 of 1: \S+\x1b\[K\r)?"
    jobs = r"((checking|planning) job \d of 2 …\x1b\[K\r)*"
    statuses = rf"(loading torch|checking the jobs) …\x1b\[K\r{jobs}{looking}{evaluating}\x1b\[K"
    first_line = re.compile(rf"{statuses} *(\x1b\[1;38;5;196merror:|\x1b\[[12]m|[^\s\x1b])")
    assert first_line.match(terminal.getvalue())


def test_a_report_is_replaced_by_the_next(project: Path) -> None:
    assert [main(["report", RUN, "-o", "again.html"]) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("encoding", "errors", "afterwards"),
    [
        ("ascii", "strict", "replace"),
        ("ascii", "surrogateescape", "replace"),
        ("utf-8", "surrogateescape", "surrogateescape"),
        ("utf-8", "strict", "replace"),
        ("ascii", "backslashreplace", "backslashreplace"),
    ],
)
def test_a_stream_keeps_a_way_of_its_own_that_never_fails(
    encoding: str, errors: str, afterwards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding, errors))
    prepare_streams()
    assert sys.stdout.errors == afterwards


def test_what_is_written_to_a_closed_terminal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, screen = os.openpty()
    stream = os.fdopen(screen, "w", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stream)
    prepare_streams()
    terminal = sys.stdout
    print("shown", flush=True)
    assert os.read(keyboard, 100) == b"shown\r\n"
    os.close(keyboard)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(screen, b"closed")
    print("discarded", flush=True)
    assert terminal is not stream
    assert not terminal.isatty()
    terminal.close()
    stream.close()


@pytest.mark.parametrize("unbuffered", [False, True], ids=["buffered", "PYTHONUNBUFFERED=1"])
@pytest.mark.parametrize("verb", ["fit", "list"])
@pytest.mark.parametrize("output", ["a pipe without a reader", "a file on a full disk"])
def test_only_a_training_ends_well_when_its_output_cannot_be_written(
    output: str, verb: str, unbuffered: bool, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = []
    for name in ("stdout", "stderr"):
        if "disk" in output and verb == "list" and name == "stderr":
            break  # Another verb prints the error there.
        writer = _pipe_without_reader() if "pipe" in output else os.open("/dev/full", os.O_WRONLY)
        raw = open(writer, "wb", buffering=0 if unbuffered else -1)  # noqa: SIM115
        streams.append(io.TextIOWrapper(raw, "utf-8", write_through=unbuffered))
        monkeypatch.setattr(sys, name, streams[-1])
    folder = f"runs/{output.replace(' ', '-')}-{unbuffered}"
    ended = main([*VERBS[verb], f"run_dir={folder}", "loop.max_duration=2"] if verb == "fit" else VERBS[verb])
    assert ended == (0 if verb == "fit" else 1)
    if verb == "fit":
        assert Path(folder, "report.html").is_file()
        assert "could not be written" not in Path(folder, "train.log").read_text("utf-8")
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.close()


def _pipe_without_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("unbuffered", [False, True], ids=["as Python makes it", "PYTHONUNBUFFERED=1"])
def test_a_line_on_a_terminal_is_shown_at_once(unbuffered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, screen = os.openpty()
    raw = open(screen, "wb", buffering=0 if unbuffered else -1)  # noqa: SIM115
    stream = io.TextIOWrapper(raw, "utf-8", line_buffering=not unbuffered, write_through=unbuffered)
    monkeypatch.setattr(sys, "stderr", stream)
    prepare_streams()
    os.set_blocking(keyboard, False)
    print("shown", file=sys.stderr)
    assert os.read(keyboard, 100) == b"shown\r\n"
    sys.stderr.close()
    stream.close()
