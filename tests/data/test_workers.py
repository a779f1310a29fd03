"""Workers: deaf to signals that are for the parent, and never left behind."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from trainer_cli.data.foreign import ForeignLoader
from trainer_cli.data.loader import Loader


class Numbers:
    """Plain samples; from `slow_from` on, each takes a minute."""

    deterministic = True

    def __init__(self, length: int = 64, slow_from: int | None = None) -> None:
        self.length = length
        self.slow_from = slow_from

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if self.slow_from is not None and index >= self.slow_from:
            time.sleep(60)
        return index


def made(**settings: object) -> Loader:
    return Loader(Numbers(**settings), 4, shuffle=False, seed=0, num_workers=2)  # type: ignore[arg-type]


def children() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_meant_for_the_parent_do_not_stop_workers(number: signal.Signals) -> None:
    iterator = made(length=400).iterate(0)
    next(iterator)
    workers = children()
    assert len(workers) == 2
    for pid in workers * 3:
        os.kill(pid, number)
    assert len(list(iterator)) == 99
    assert children() == []


@pytest.mark.parametrize("persistent", [False, True])
def test_the_workers_of_a_users_own_loader_are_as_deaf_and_end_as_surely(persistent: bool) -> None:
    own = torch.utils.data.DataLoader(Numbers(40), 4, num_workers=2, persistent_workers=persistent)
    iterator = ForeignLoader(own, seed=0).iterate(0)
    next(iterator)
    workers = children()
    for pid in workers:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
    assert len(list(iterator)) == 9
    assert bool(children()) is persistent
    del own, iterator
    gc.collect()
    assert children() == []


def test_an_epoch_ends_its_workers() -> None:
    assert len(list(made().iterate(0))) == 16
    assert children() == []


def test_closing_early_ends_the_workers() -> None:
    iterator = made().iterate(0)
    next(iterator)
    assert len(children()) == 2
    start = time.monotonic()
    iterator.close()
    assert time.monotonic() - start < 5
    assert children() == []


def test_dropping_the_iterator_ends_the_workers() -> None:
    iterator = made().iterate(0)
    next(iterator)
    del iterator
    gc.collect()
    assert children() == []


def test_closing_before_the_first_batch_starts_no_worker() -> None:
    iterator = made().iterate(0)
    assert children() == []
    iterator.close()


def test_closing_does_not_wait_for_a_worker_that_is_stuck() -> None:
    iterator = made(slow_from=4).iterate(0)
    next(iterator)
    start = time.monotonic()
    iterator.close()
    assert time.monotonic() - start < 10
    assert children() == []


def test_an_error_ends_the_workers_even_while_its_traceback_is_held() -> None:
    loader = Loader(Numbers(), 4, shuffle=False, seed=0, num_workers=2, collate_fn=refuse_late)
    with pytest.raises(ValueError, match="too large") as caught:
        list(loader.iterate(0))
    assert children() == []
    del caught


def refuse_late(samples: list[int]) -> torch.Tensor:
    if samples[0] >= 8:
        raise ValueError("too large")
    return torch.tensor(samples)


def test_two_iterators_at_once_do_not_end_each_others_workers() -> None:
    training = made(length=100).iterate(0)
    first = next(training)
    assert len(list(made().iterate(0))) == 16
    rest = list(training)
    assert torch.cat([first, *rest]).tolist() == list(range(100))


SCRIPT = """
    import os, signal, sys, time
    from trainer_cli.data.loader import Loader

    class Numbers:
        deterministic = True
        def __len__(self): return 4000
        def __getitem__(self, index):
            time.sleep({pause} if index >= 8 else 0.0)
            return index

    loader = Loader(Numbers(), 4, shuffle=False, seed=0, num_workers=2)
    iterator = loader.iterate(0)
"""


def start(body: str, *, pause: float = 0.0) -> "subprocess.Popen[str]":
    script = textwrap.dedent(SCRIPT.format(pause=pause)) + textwrap.dedent(body)
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z")


@pytest.mark.parametrize("pause", [0.0, 60.0])
def test_workers_are_gone_seconds_after_their_parent_was_killed(pause: float) -> None:
    body = """
    import multiprocessing
    next(iterator)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    time.sleep(60)
    """
    with start(body, pause=pause) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 5
        while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(alive(pid) for pid in workers)


@pytest.mark.parametrize("pause", [0.0, 60.0])
def test_a_program_ends_although_it_never_closed_its_iterator(pause: float) -> None:
    begun = time.monotonic()
    with start("next(iterator)\nprint('done')\n", pause=pause) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "done\n", "")
    assert time.monotonic() - begun < 40


def test_signals_to_the_whole_group_from_the_very_start_lose_no_batch() -> None:
    body = """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: None)
    print("ready", flush=True)
    total = 0
    for epoch in range(3):
        for batch in loader.iterate(epoch):
            total += len(batch)
    print(total, flush=True)
    """
    with start(body) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while process.poll() is None:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.killpg(process.pid, number)
            time.sleep(0.002)
        out, err = process.communicate(timeout=60)
    # The interpreter's own last moments have no handlers; what counts is that every batch came.
    assert out == "12000\n", err
