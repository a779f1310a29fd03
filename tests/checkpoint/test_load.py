"""Loading: verified before anything is touched, bit for bit, and in no more memory than one copy of what is loaded."""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import same
from torch import nn

from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.checkpoint.format import verified_file
from trainer_cli.checkpoint.format.verified_file import VerifiedFile
from trainer_cli.checkpoint.model_state import capture_model, fit_model
from trainer_cli.checkpoint.optimizer_state import capture_optimizer, fit_optimizer
from trainer_cli.core.manifest import DamagedCheckpoint, FileEntry, Manifest, new_digest
from trainer_cli.core.policy import Kind

MB = 2**20


class Model(nn.Module):
    """Tied, scalar, empty, boolean, 16-bit and channels-last values."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)
        self.last.weight = self.first.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Parameter(torch.randn(7).bfloat16())
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("count", torch.tensor(seed))


def optimizer_of(model: nn.Module, *, steps: int = 0) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        made.step()
    return made


def saved(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> SyncCheckpointer:
    checkpointer = SyncCheckpointer()
    state = {"model": capture_model(model)}
    if optimizer is not None:
        state["optimizer"] = capture_optimizer(model, optimizer)
    checkpointer.save(state, path, metadata=CheckpointMetadata(step=1))
    return checkpointer


def load(checkpointer: SyncCheckpointer, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None):
    tree = checkpointer.read(path, None if optimizer is not None else ["model"])
    fittings = [fit_model(model, tree["model"])[0]]
    if optimizer is not None:
        fittings.append(fit_optimizer(model, optimizer, tree["optimizer"]))
    assert [fitting.faults for fitting in fittings] == [[]] * len(fittings)
    for fitting in fittings:
        fitting.load()
    return tree


def flip(path: Path, place: int = -1) -> None:
    content = bytearray((path / "rank0.safetensors").read_bytes())
    content[place] ^= 1
    (path / "rank0.safetensors").write_bytes(content)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(verified_file, "BLOCK_BYTES", 64)


def test_model_and_optimizer_come_back_in_place_bit_for_bit(tmp_path, small_blocks):
    source = Model(1)
    optimizer = optimizer_of(source, steps=2)
    checkpointer = saved(tmp_path / "step1", source, optimizer)
    model = Model(2)
    mine = optimizer_of(model, steps=1)
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    versions = {name: value._version for name, value in model.named_parameters() if value.numel()}
    tree = load(checkpointer, tmp_path / "step1", model, mine)
    assert same(capture_model(model), capture_model(source))
    assert same(capture_optimizer(model, mine), capture_optimizer(source, optimizer))
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == places
    assert all(value._version > versions[name] for name, value in model.named_parameters() if name in versions)
    exp_avg = mine.state[model.conv.weight]["exp_avg"]
    assert exp_avg.stride() == model.conv.weight.stride()
    # No second copy: the optimizer keeps the memory that was read into.
    kept = tree["optimizer"]["state"]["first.weight"]["exp_avg"]
    assert mine.state[model.first.weight]["exp_avg"].data_ptr() == kept.data_ptr()


def test_names_that_are_tied_in_the_checkpoint_alone_are_both_filled(tmp_path):
    checkpointer = saved(tmp_path / "step1", Model(1))
    untied = Model(2)
    untied.last = nn.Linear(6, 5, bias=False)
    load(checkpointer, tmp_path / "step1", untied)
    assert torch.equal(untied.first.weight, Model(1).first.weight)
    assert torch.equal(untied.last.weight, Model(1).first.weight)


@pytest.mark.parametrize("differ", [False, True])
def test_names_that_are_tied_in_the_model_alone_are_compared_by_value(tmp_path, differ):
    source = Model(1)
    source.last = copy.deepcopy(source.first)
    if differ:
        nn.init.zeros_(source.last.weight)
    checkpointer = saved(tmp_path / "step1", source)
    model = Model(2)
    before = copy.deepcopy(capture_model(model))
    fitting, _ = fit_model(model, checkpointer.read(tmp_path / "step1")["model"])
    assert same(capture_model(model), before)
    assert bool(fitting.faults) is differ
    if not differ:
        fitting.load()
        assert torch.equal(model.last.weight, source.first.weight)


def test_a_module_with_its_own_way_of_loading_is_given_values_of_their_own(tmp_path):
    checkpointer = saved(tmp_path / "step1", Model(1))
    model = Model(2)
    present = model.conv.weight.detach().clone()

    def halfway(module, state, prefix, *_):
        state[prefix + "weight"] = (state[prefix + "weight"] + module.weight.detach()) / 2

    model.conv.register_load_state_dict_pre_hook(halfway)
    load(checkpointer, tmp_path / "step1", model)
    assert torch.equal(model.conv.weight, (Model(1).conv.weight + present) / 2)


def test_damage_that_only_the_digest_shows_leaves_everything_untouched(tmp_path, small_blocks):
    checkpointer = saved(tmp_path / "step1", Model(1))
    flip(tmp_path / "step1")
    model = Model(2)
    before = copy.deepcopy(capture_model(model))
    with pytest.raises(DamagedCheckpoint, match="digest differs"):
        checkpointer.load(tmp_path / "step1", {"model": capture_model(model)})
    assert same(capture_model(model), before)


def test_damage_is_reported_as_damage_where_the_state_does_not_fit_either(tmp_path):
    checkpointer = saved(tmp_path / "step1", Model(1))
    flip(tmp_path / "step1")
    with pytest.raises(DamagedCheckpoint, match="digest differs"):
        checkpointer.load(tmp_path / "step1", {"model": {"first.weight": torch.zeros(3)}})


def peak_growth(act) -> int:
    """The bytes by which the process is larger at its largest while something is done."""
    status = Path("/proc/self/status")

    def now(key: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = now("VmRSS")
    act()
    return now("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell")
def test_loading_takes_one_copy_of_what_is_loaded_and_a_constant(memory_path):
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(torch.ones(2 * MB)) for _ in range(6)])

    source = Large()
    checkpointer = saved(memory_path / "step1", source, optimizer_of(source, steps=1))
    del source
    model = Large()
    optimizer = optimizer_of(model)
    weights = 48 * MB
    load(checkpointer, memory_path / "step1", model)
    assert peak_growth(lambda: load(checkpointer, memory_path / "step1", model)) < weights + 28 * MB
    assert peak_growth(lambda: load(checkpointer, memory_path / "step1", model, optimizer)) < 3 * weights + 28 * MB
    assert peak_growth(lambda: checkpointer.verify(memory_path / "step1")) < 28 * MB


class Memory:
    """A folder with one file in memory, which fails from a place on."""

    path = Path("folder")

    def __init__(self, content: bytes, good: int | None = None) -> None:
        self.content, self.good = content, len(content) if good is None else good
        self.size_bytes, self.reading = len(content), 0
        self._lock = threading.Lock()

    @contextmanager
    def open(self, file):
        yield self

    def read_at(self, buffers, offset):
        with self._lock:
            self.reading += 1
        try:
            for buffer in buffers:
                if offset + len(buffer) > self.good:
                    raise OSError(5, f"fails at {offset}")
                buffer[:] = self.content[offset : offset + len(buffer)]
                offset += len(buffer)
        finally:
            with self._lock:
                self.reading -= 1

    def verified(self) -> VerifiedFile:
        digest = new_digest("xxh3_128")
        digest.update(self.content)
        files = {"file": FileEntry(len(self.content), f"xxh3_128:{digest.hexdigest()}")}
        return VerifiedFile(
            self, Manifest(run_id="r", attempt=0, step=1, epoch=0, kind=Kind.permanent, reason="", files=files), "file"
        )


@pytest.fixture(scope="module")
def tiny_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verified_file, "BLOCK_BYTES", 16)
        yield


@pytest.mark.usefixtures("tiny_blocks")
@given(sizes=st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=30), left=st.integers(0, 40))
def test_every_byte_is_digested_in_order_and_gets_to_its_part(sizes, left):
    source = Memory(bytes(index * 7 % 251 for index in range(left + sum(size for size, _ in sizes))))
    parts = [memoryview(bytearray(size)) if kept else size for size, kept in sizes]
    with source.verified() as file:
        file.read(parts)
        assert file.left_bytes == left
    offset = 0
    for part, (size, kept) in zip(parts, sizes, strict=True):
        assert not kept or part == source.content[offset : offset + size]
        offset += size
    assert len(file._spares) <= verified_file._AHEAD + 1


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("good", [0, 15, 16, 100, 399])
def test_the_first_failure_is_raised_and_then_no_thread_reads_any_more(good):
    source = Memory(bytes(400), good)
    with pytest.raises(OSError, match=f"fails at {good // 16 * 16}"), source.verified() as file:
        file.read([400])
    assert source.reading == 0
