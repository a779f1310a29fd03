"""Loading: verified before anything is touched, bit for bit, and in no more memory than one copy of what is new."""

from __future__ import annotations

import copy
import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest
import torch
from hypothesis import given, strategies as st
from states import same, small_state
from torch import nn

from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.manifest import DamagedCheckpoint, FileEntry, Manifest, new_digest
from trainer_cli.policy.rules import CheckpointKind
from trainer_cli.state.model_state import capture_model, fit_model
from trainer_cli.state.optimizer_state import capture_optimizer, fit_optimizer
from trainer_cli.tensor_files import verified_file
from trainer_cli.tensor_files.live_tensors import LiveTensors
from trainer_cli.tensor_files.verified_file import VerifiedFile

MB = 2**20


class Model(nn.Module):
    """Tied, scalar, empty, boolean, 16-bit and channels-last values."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)
        self.last.weight = self.first.weight
        self.conv = nn.Conv2d(3, 4, 3)
        cast("Any", self.conv).to(memory_format=torch.channels_last)
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


def load(
    checkpointer: SyncCheckpointer, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
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
def checkpointer() -> SyncCheckpointer:
    return SyncCheckpointer()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_file, "BLOCK_BYTES", 64)


def test_model_and_optimizer_come_back_in_place_bit_for_bit(tmp_path: Path, small_blocks: None) -> None:
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


def test_names_that_are_tied_in_the_checkpoint_alone_are_both_filled(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path / "step1", Model(1))
    untied = Model(2)
    untied.last = nn.Linear(6, 5, bias=False)
    load(checkpointer, tmp_path / "step1", untied)
    assert torch.equal(untied.first.weight, Model(1).first.weight)
    assert torch.equal(untied.last.weight, Model(1).first.weight)


@pytest.mark.parametrize("differ", [False, True])
def test_names_that_are_tied_in_the_model_alone_are_compared_by_value(tmp_path: Path, differ: bool) -> None:
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


def test_a_module_with_its_own_way_of_loading_is_given_values_of_their_own(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path / "step1", Model(1))
    model = Model(2)
    present = model.conv.weight.detach().clone()

    def halfway(module: nn.Conv2d, state: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
        state[prefix + "weight"] = (state[prefix + "weight"] + module.weight.detach()) / 2

    cast("Any", model.conv).register_load_state_dict_pre_hook(halfway)
    load(checkpointer, tmp_path / "step1", model)
    assert torch.equal(model.conv.weight, (Model(1).conv.weight + present) / 2)


def test_damage_that_only_the_digest_shows_leaves_everything_untouched(tmp_path: Path, small_blocks: None) -> None:
    checkpointer = saved(tmp_path / "step1", Model(1))
    flip(tmp_path / "step1")
    model = Model(2)
    before = copy.deepcopy(capture_model(model))
    with pytest.raises(DamagedCheckpoint, match="digest differs"):
        checkpointer.load(tmp_path / "step1", {"model": capture_model(model)})
    assert same(capture_model(model), before)


def test_a_file_that_changes_after_it_was_verified_is_no_damage_of_which_nothing_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = SyncCheckpointer()
    checkpointer.save({"model": {"weight": torch.ones(9000)}}, tmp_path / "step1")
    read = LiveTensors.read

    def change_file_and_read(live: LiveTensors) -> None:
        flip(tmp_path / "step1")
        read(live)

    monkeypatch.setattr(LiveTensors, "read", change_file_and_read)
    with pytest.raises(CheckpointError, match="could not be read again") as raised:
        checkpointer.load(tmp_path / "step1", {"model": {"weight": torch.zeros(9000)}})
    # A resume takes an older checkpoint only of a damaged one.
    assert not isinstance(raised.value, DamagedCheckpoint)
    assert "partly overwritten" in str(raised.value.cure)


def _overlapping() -> dict[str, torch.Tensor]:
    memory = torch.zeros(81, 50)
    return {"a": memory[:80], "b": memory[79:].reshape(-1)[:6]}


@pytest.mark.parametrize(
    ("make", "in_place"),
    [
        pytest.param(lambda: {"a": torch.zeros(80, 50), "b": torch.zeros(6)}, {"a", "b"}, id="plain"),
        pytest.param(lambda: {"a": nn.Parameter(torch.zeros(80, 50)), "b": torch.zeros(6)}, {"a", "b"}, id="parameter"),
        pytest.param(lambda: {"a": torch.zeros(50, 80).T, "b": torch.zeros(6)}, set(), id="most bytes not contiguous"),
        pytest.param(lambda: {"a": torch.zeros(80, 50), "b": torch.zeros(12)[::2]}, {"a"}, id="strided"),
        pytest.param(lambda: {"a": torch.zeros(80, 50), "missing": torch.zeros(6)}, {"a"}, id="missing"),
        pytest.param(lambda: {"a": torch.zeros(80, 50), "b": None}, {"a"}, id="new value"),
        pytest.param(lambda: {"b": torch.zeros(6)}, set(), id="few of the bytes"),
        pytest.param(_overlapping, set(), id="shared memory"),
        pytest.param(lambda: {"a": torch.zeros(80, 50), "1": torch.zeros(2)}, {"a"}, id="key of another type"),
        pytest.param(lambda: {"a": torch.zeros(80, 50), "list": {"0": torch.zeros(2)}}, {"a"}, id="item of a list"),
        pytest.param(
            lambda: {"a": torch.zeros(80, 50), "mask": torch.zeros(3, dtype=torch.bool)}, {"a"}, id="booleans"
        ),
        pytest.param(lambda: {"a": torch.zeros(80, 50), "tied": torch.zeros(2)}, {"a"}, id="tied in the checkpoint"),
        pytest.param(lambda: {"a": torch.zeros(80, 50), "view": torch.zeros(2)}, {"a"}, id="view in the checkpoint"),
    ],
)
def test_reading_into_live_tensors_gives_what_copying_gives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpointer: SyncCheckpointer,
    make: Callable[..., Any],
    in_place: set[str],
) -> None:
    base, tied = torch.rand(4), torch.rand(2)
    state = {
        "a": torch.rand(80, 50), "b": torch.rand(6), 1: torch.rand(2), "list": [torch.rand(2)], "tied": tied,
        "twin": tied, "base": base, "view": base[1:3], "mask": torch.tensor([True, False, True]),
    }  # fmt: skip
    checkpointer.save({"state": state}, tmp_path / "step1")
    live, copied = make(), make()
    versions = {name: value._version for name, value in live.items() if isinstance(value, torch.Tensor)}
    selected: list[str] = []
    select = LiveTensors.select

    def record(self: LiveTensors, layout: Any, file_bytes: int) -> dict[str, torch.Tensor]:
        selected.extend(found := select(self, layout, file_bytes))
        return found

    monkeypatch.setattr(LiveTensors, "select", record)
    loaded = checkpointer.load(tmp_path / "step1", {"state": live})
    assert set(selected) == {f"state/{name}" for name in in_place}
    monkeypatch.setattr(LiveTensors, "select", lambda *_: {})
    assert checkpointer.load(tmp_path / "step1", {"state": copied}).missing == loaded.missing
    assert same(live, copied)
    # Autograd must notice that a tensor changed which it has kept for the backward pass.
    assert all(live[name]._version > versions[name] for name in in_place)


def test_damage_is_reported_as_damage_where_the_state_does_not_fit_either(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path / "step1", Model(1))
    flip(tmp_path / "step1")
    with pytest.raises(DamagedCheckpoint, match="digest differs"):
        checkpointer.load(tmp_path / "step1", {"model": {"first.weight": torch.zeros(3)}})


def peak_growth(act: Callable[[], object]) -> int:
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
def test_loading_takes_one_copy_of_what_is_loaded_and_a_constant(memory_path: Path) -> None:
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
    live = {"model": capture_model(model), "optimizer": capture_optimizer(model, optimizer)}
    assert peak_growth(lambda: checkpointer.load(memory_path / "step1", live)) < 28 * MB
    assert peak_growth(lambda: checkpointer.verify(memory_path / "step1")) < 28 * MB


class Memory:
    """A folder with one file in memory, which fails from a place on."""

    path, is_shared = Path("folder"), True

    def __init__(self, content: bytes, good: int | None = None) -> None:
        self.content, self.good = content, len(content) if good is None else good
        self.size_bytes, self.reading = len(content), 0
        self._lock = threading.Lock()

    @contextmanager
    def open(self, file: str) -> Iterator[Memory]:
        yield self

    def on_verified(self, file: str, entry: FileEntry) -> None:
        pass

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> None:
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
            self,
            Manifest(run_id="r", attempt=0, step=1, epoch=0, kind=CheckpointKind.regular, reason="", files=files),
            "file",
        )


@pytest.fixture(scope="module")
def tiny_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verified_file, "BLOCK_BYTES", 16)
        yield


@pytest.mark.usefixtures("tiny_blocks")
@given(sizes=st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=30), left=st.integers(0, 40))
def test_every_byte_is_digested_in_order_and_gets_to_its_part(sizes: list[tuple[int, bool]], left: int) -> None:
    source = Memory(bytes(index * 7 % 251 for index in range(left + sum(size for size, _ in sizes))))
    parts = [memoryview(bytearray(size)) if kept else size for size, kept in sizes]
    with source.verified() as file:
        file.read(parts)
        assert file.left_bytes == left
    offset = 0
    for part, (size, kept) in zip(parts, sizes, strict=True):
        assert not kept or bytes(cast("memoryview", part)) == source.content[offset : offset + size]
        offset += size
    assert len(file._spares) <= verified_file._AHEAD + 1


@pytest.mark.parametrize("size_bytes", [99, 101])
def test_a_file_of_another_size_is_refused_before_it_is_read(size_bytes: int) -> None:
    source = Memory(bytes(100))
    file = source.verified()
    source.size_bytes = size_bytes
    with pytest.raises(DamagedCheckpoint, match=f"it has {size_bytes} bytes instead of 100"), file:
        pytest.fail("it can be read")


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("good", [0, 15, 16, 100, 399])
def test_the_first_failure_is_raised_and_then_no_thread_reads_any_more(good: int) -> None:
    source = Memory(bytes(400), good)
    with pytest.raises(OSError, match=f"fails at {good // 16 * 16}"), source.verified() as file:
        file.read([400])
    assert source.reading == 0


@pytest.mark.parametrize("name", [".hidden", "a\nb"])
def test_names_that_cannot_be_are_reported_so(checkpointer: SyncCheckpointer, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be the name"):
        checkpointer.load(tmp_path / name)


@pytest.mark.parametrize("act", ["load", "manifest", "verify"])
def test_no_checkpoint_is_reported_with_its_path(checkpointer: SyncCheckpointer, tmp_path: Path, act: str) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "step9", tmp_path / "no" / "where", tmp_path / "file"):
        if path.is_file():
            # What a file holds, an add-on looks up.
            pytest.importorskip("trainer_cli.addons.formats")
        with pytest.raises(CheckpointError, match=f"there is no checkpoint .{path}") as raised:
            getattr(checkpointer, act)(path)
        assert isinstance(raised.value, FileNotFoundError)
        assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, str(path))


def test_loading_into_a_state_fills_the_named_keys_alone_and_in_place(
    checkpointer: SyncCheckpointer, tmp_path: Path
) -> None:
    saved: dict[str, Any] = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": {"x": torch.ones(2), "y": 1},
        "c": torch.tensor(3),
        "d": 4,
    }
    saved["empty"] = torch.empty(0, 3)
    checkpointer.save(saved, tmp_path / "step1")
    big = torch.zeros(3, 4)
    target: dict[str, Any] = {
        "a": big.T[1:3, :],
        "b": {"x": torch.zeros(2), "z": 0},
        "c": torch.tensor(0),
        "e": torch.zeros(0),
    }
    target["empty"] = torch.empty(0, 3)
    held = {"a": target["a"], "x": target["b"]["x"], "c": target["c"]}
    loaded = checkpointer.load(tmp_path / "step1", target)
    assert torch.equal(held["a"], saved["a"])
    assert torch.equal(big.T[1:3, :], saved["a"])
    assert big[:, [0, 3]].sum() == 0
    assert torch.equal(held["x"], torch.ones(2))
    assert held["c"] == 3
    assert set(loaded) == {"a", "b", "c", "e", "empty"}
    assert loaded.missing == ["b/z", "e"]


def test_loading_strictly_refuses_what_is_missing_and_touches_nothing(
    checkpointer: SyncCheckpointer, tmp_path: Path
) -> None:
    checkpointer.save({"a": torch.ones(2)}, tmp_path / "step1")
    target: dict[str, Any] = {"a": torch.zeros(2), "b": 1}
    with pytest.raises(CheckpointError, match="the checkpoint lacks b") as raised:
        checkpointer.load(tmp_path / "step1", target, strict=True)
    assert isinstance(raised.value, RuntimeError)
    assert target["a"].sum() == 0
    assert checkpointer.load(tmp_path / "step1", {"a": torch.zeros(2)}, strict=True).missing == []


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(2, 1), torch.ones(2, dtype=torch.float64), 5])
def test_loading_into_another_shape_or_type_is_refused(
    checkpointer: SyncCheckpointer, tmp_path: Path, value: Any
) -> None:
    checkpointer.save({"a": {"b": value}}, tmp_path / "step1")
    target = {"a": {"b": torch.zeros(2)}}
    with pytest.raises(CheckpointError, match="does not fit: a/b is"):
        checkpointer.load(tmp_path / "step1", target)
    assert target["a"]["b"].sum() == 0


def test_parameters_are_filled_without_gradient_history(checkpointer: SyncCheckpointer, tmp_path: Path) -> None:
    checkpointer.save({"w": torch.ones(2)}, tmp_path / "step1")
    target = {"w": torch.nn.Parameter(torch.zeros(2))}
    checkpointer.load(tmp_path / "step1", target)
    assert target["w"].is_leaf
    assert target["w"].sum() == 2


@pytest.mark.parametrize(
    ("location", "device"),
    [
        (None, "cpu"), ("meta", "meta"), (torch.device("meta"), "meta"), ({"cpu": "meta"}, "meta"),
        ({"cuda:0": "meta"}, "cpu"), ({}, "cpu"), (lambda storage, location: storage, "cpu"),
        (lambda storage, location: None, "cpu"),
        (lambda storage, location: cast("Any", torch.UntypedStorage)(len(storage), device="meta"), "meta"),
    ],
)  # fmt: skip
def test_new_tensors_go_where_a_map_location_of_torch_says(
    checkpointer: SyncCheckpointer, tmp_path: Path, location: Any, device: str
) -> None:
    checkpointer.save(small_state(), tmp_path / "step1")
    loaded = checkpointer.load(tmp_path / "step1", default_map_location=location)
    assert loaded["model"]["weight"].device.type == device
    assert loaded["model"]["weight"] is loaded["model"]["tied"]
    if device == "cpu":
        assert same(dict(loaded), small_state())
    else:
        assert loaded["model"]["weight"].shape == small_state()["model"]["weight"].shape


def test_the_function_of_a_map_location_gets_storage_and_device(checkpointer: SyncCheckpointer, tmp_path: Path) -> None:
    checkpointer.save({"a": torch.ones(2, 3), "b": torch.zeros(0)}, tmp_path / "step1")
    calls: list[tuple[int, str]] = []
    checkpointer.load(
        tmp_path / "step1", default_map_location=lambda storage, location: calls.append((len(storage), location))
    )
    assert sorted(calls) == [(0, "cpu"), (24, "cpu")]


def test_a_map_location_gets_what_was_saved_for_a_mapping_that_cannot_be_filled(
    checkpointer: SyncCheckpointer, tmp_path: Path
) -> None:
    checkpointer.save({"a": {"b": torch.arange(4096.0)}}, tmp_path / "step1")
    before = torch.ones(4096)
    state = {"a": MappingProxyType({"b": before})}
    checkpointer.load(tmp_path / "step1", state, default_map_location=lambda storage, _: cast("Any", storage).clone())
    assert torch.equal(state["a"]["b"], torch.arange(4096.0))
    assert torch.equal(before, torch.ones(4096))


def test_an_unknown_device_is_refused(checkpointer: SyncCheckpointer, tmp_path: Path) -> None:
    checkpointer.save({"a": torch.ones(2)}, tmp_path / "step1")
    with pytest.raises(UserError, match="default_map_location is 'gpu'"):
        checkpointer.load(tmp_path / "step1", default_map_location="gpu")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (torch.zeros(1, 2).expand(5, 2), "a/b is expanded here"),
        (torch.zeros(2).expand(5, 2), "a/b is expanded here"),
        (torch.zeros(5, 2).to_sparse(), "a/b is torch.sparse_coo here"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged), "a/b is a nested tensor"),
        (torch.inference_mode()(torch.zeros)(5, 2), "a/b is an inference tensor here"),
    ],
)
def test_a_target_that_cannot_be_filled_is_refused_before_anything_is_touched(
    checkpointer: SyncCheckpointer, tmp_path: Path, target: Any, why: str
) -> None:
    checkpointer.save({"a": {"b": torch.ones(5, 2)}, "c": torch.ones(2)}, tmp_path / "step1")
    state: dict[str, Any] = {"c": torch.zeros(2), "a": {"b": target}}
    with pytest.raises(CheckpointError, match=f"does not fit: {why}"):
        checkpointer.load(tmp_path / "step1", state)
    assert state["c"].sum() == 0
