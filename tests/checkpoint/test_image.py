"""The image of a state: the very bytes that are written straight from it, taken once, and never of two moments."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from states import small_state

from trainer_cli.checkpoint.format.image import TensorsImage
from trainer_cli.checkpoint.format.memory import Memory
from trainer_cli.checkpoint.format.tensors import TensorsFormat


class Kept:
    """A folder and its files in memory."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.pieces: list[tuple[int, int]] = []
        """Address and size of what was written at a time."""

    def create(self, file: str) -> Any:
        kept = self

        class Sink:
            def __enter__(self) -> Sink:
                kept.contents[file] = b""
                return self

            def __exit__(self, *_: Any) -> None:
                pass

            def wait(self, *, but_last: bool = False, timeout_s: float | None = None) -> None:
                """All is taken at once."""

            def write(self, data: Any, *, stays: bool = False) -> None:
                if isinstance(data, memoryview):
                    array = np.frombuffer(data, dtype=np.uint8)
                    kept.pieces.append((array.ctypes.data, array.size))
                kept.contents[file] += bytes(data)

        return Sink()


def written(tree: Mapping[str, Any]) -> tuple[dict[str, bytes], Any]:
    """What is written straight from a state."""
    folder = Kept()
    record = TensorsFormat().write(folder, tree)  # type: ignore[arg-type]
    return folder.contents, record


def addresses(*tensors: torch.Tensor) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors}


def odd_state() -> dict[str, Any]:
    """Tensors of all layouts: sliced, transposed, conjugated, empty, scalar, of every size of element, tied."""
    base = torch.arange(24.0).reshape(4, 6)
    tied = torch.ones(3, dtype=torch.float64)
    return {
        "model": {
            "slice": base[1:, 2:], "turned": base.T, "whole": base, "conj": torch.complex(base, base).conj(),
            "neg": torch.complex(base, base).conj().imag, "empty": torch.empty(0, 3), "scalar": torch.tensor(3),
            "half": torch.ones(5, dtype=torch.bfloat16), "bits": torch.tensor([True, False]),
            "tied": tied, "again": tied, "wide": torch.ones(2, 1).expand(2, 7),
        },
        "numpy": {"fortran": np.asfortranarray(np.arange(6).reshape(2, 3)), "number": np.float32(1.5)},
    }  # fmt: skip


@pytest.mark.parametrize("tree", [small_state(4), odd_state(), {}, {"a": 1}], ids=["small", "odd", "empty", "none"])
@pytest.mark.parametrize("late", ["all", "none"])
def test_an_image_has_the_very_bytes_that_are_written_straight_from_the_state(tree: Any, late: str) -> None:
    image = TensorsImage()
    image.plan(tree)
    everything = list(tree.get("model", {}).values())
    image.take(addresses(*everything) if late == "all" else ())
    list(image.copy_late())
    assert image.moved() == []
    image.finish()
    folder = Kept()
    contents, record = written(tree)
    assert image.write(folder) == record  # type: ignore[arg-type]
    assert folder.contents == contents


def test_what_is_not_late_is_taken_at_once_and_the_late_ones_when_they_are_copied() -> None:
    weight, buffer, text = torch.zeros(3), torch.zeros(3), ["as it was"]
    tree = {"weight": weight, "buffer": buffer, "array": np.zeros(2), "text": text}
    before, _ = written(tree)
    image = TensorsImage()
    image.plan(tree)
    image.take(addresses(weight))
    buffer += 1
    tree["array"] += 1  # type: ignore[operator]
    text[0] = "changed"
    list(image.copy_late())
    assert image.moved() == []
    weight += 1
    folder = Kept()
    image.write(folder)  # type: ignore[arg-type]
    assert folder.contents == before


@pytest.mark.parametrize("overlapped", [True, False])
def test_a_late_tensor_that_was_changed_is_named_whether_it_was_copied_before_or_not(overlapped: bool) -> None:
    model = torch.nn.Linear(2, 2)
    tree = {"model": model.state_dict()}
    image = TensorsImage()
    image.plan(tree)
    image.take(addresses(*model.parameters()), overlapped=overlapped)
    list(image.copy_late())
    with torch.no_grad():
        model.bias.mul_(2)
    assert image.moved() == ["model/bias"]
    assert image.moved() == [], "told once"


def test_a_tensor_without_a_version_is_copied_at_once() -> None:
    with torch.inference_mode():
        weight = torch.ones(3)
    before, _ = written({"weight": weight})
    image = TensorsImage()
    image.plan({"weight": weight})
    image.take(addresses(weight))
    with torch.inference_mode():
        weight += 1
    list(image.copy_late())
    assert image.moved() == []
    folder = Kept()
    image.write(folder)  # type: ignore[arg-type]
    assert folder.contents == before


def test_the_memory_is_got_once_and_written_in_one_aligned_piece() -> None:
    image, places = TensorsImage(), []
    for step in range(3):
        tree = {"a": torch.full((5000,), float(step)), "n": step}
        image.plan(tree)
        image.take()
        folder = Kept()
        image.write(folder)  # type: ignore[arg-type]
        assert folder.contents == written(tree)[0]
        places += folder.pieces
    assert len(set(places)) == 1
    assert places[0][0] % mmap.PAGESIZE == 0
    held = image.held_bytes
    image.plan({"a": torch.ones(9_000)})
    image.take()
    assert image.held_bytes > held, "a state that has grown gets more"
    image.close()
    assert image.held_bytes == 0


def forms() -> dict[str, Any]:
    """States of which each is like the one before it in all but one thing."""
    one, other, square = torch.ones(3), torch.zeros(3), torch.arange(4.0).reshape(2, 2)
    return {
        "first": {"a": {"x": one, "y": other}, "n": 1},
        "another value": {"a": {"x": one + 1, "y": other}, "n": 2},
        "tied": {"a": {"x": one, "y": one}, "n": 2},
        "untied": {"a": {"x": one, "y": other}, "n": 2},
        "another shape": {"a": {"x": one, "y": other.reshape(1, 3)}, "n": 2},
        "another type": {"a": {"x": one, "y": other.double()}, "n": 2},
        "another name": {"a": {"x": one, "z": other}, "n": 2},
        "another order": {"a": {"z": other, "x": one}, "n": 2},
        "an array": {"a": {"z": other, "x": np.ones(3)}, "n": 2},
        "turned": {"a": {"z": square, "x": square.T}, "n": 2},
        "not turned": {"a": {"z": square, "x": square}, "n": 2},
        "turned again": {"a": {"z": square, "x": square.T}, "n": 2},
        "two of a name": {"a": {"x": one}, "a/x": other},
        "and once more": {"a/x": other, "a": {"x": one}},
        "nested": {"a": {"p": {"x": one}, "q": {"y": other}}},
        "nested, another value": {"a": {"p": {"x": one}, "q": {"y": one + 1}}},
        "moved": {"a": {"p": {"x": one, "y": other}, "q": {}}},
        "grown": {"a": {"p": {"x": one, "y": other}, "q": {"x": other + 1}}},
        "not nested": {"a": {"p": one, "q": other}},
        "half nested": {"a": {"p": one, "q": {"y": other}}},
        "a number as key": {"a": {1: one}},
        "an equal one": {"a": {True: one}},
        "the mark of a tag": {"a": {"$": one}},
        "nothing": {},
    }


def test_what_is_remembered_of_one_state_is_never_taken_for_another() -> None:
    image = TensorsImage()
    states = [*forms().values(), *reversed(forms().values())]
    for state in [*states, *(state for state in states for _ in range(2))]:
        image.plan(state)
        image.take()
        folder = Kept()
        record = image.write(folder)  # type: ignore[arg-type]
        assert (folder.contents, record) == written(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64,
                                   torch.float8_e5m2])  # fmt: skip
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_only_the_trained_tensors_are_asked_to_be_finite(dtype: torch.dtype, value: float) -> None:
    trained, frozen = torch.full((70_000,), 3.0).to(dtype), torch.full((3,), value).to(dtype)
    image = TensorsImage()
    for last, finite in ((1.0, True), (value, False)):
        trained[-1] = last
        image.plan({"model": {"trained": trained, "frozen": frozen}})
        image.take(trained=addresses(trained))
        image.write(Kept())  # type: ignore[arg-type]
        assert image.is_finite() is finite


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float16, 60_000.0), (torch.bfloat16, 3e38), (torch.float32, 3e38), (torch.float64, 1e308)],
)
def test_large_finite_numbers_are_finite(dtype: torch.dtype, value: float) -> None:
    """Though their sum is not."""
    values = torch.full((1000,), value, dtype=dtype)
    image = TensorsImage()
    image.plan({"a": values})
    image.take(trained=addresses(values))
    image.write(Kept())  # type: ignore[arg-type]
    assert image.is_finite()


def test_memory_is_aligned_whatever_its_size() -> None:
    for size in (0, 1, 4096, 100_001):
        memory = Memory(size)
        assert memory.address % mmap.PAGESIZE == 0
        assert memory.size_bytes >= size
        memory.close()


def test_what_has_arrived_is_told_in_order_and_can_be_written_before_the_rest_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer_cli.checkpoint.format.image._TOLD_BYTES", 8192)
    tree = {"model": {f"w{number}": torch.full((1500,), float(number)) for number in range(9)}}
    image = TensorsImage()
    image.plan(tree)
    image.take(addresses(*tree["model"].values()))
    folder, told = Kept(), []

    def copying() -> Iterator[int]:
        for here in image.copy_late():
            told.append(here)
            yield here

    # What is not copied yet when its turn comes would be zeros here.
    image.write(folder, copying())  # type: ignore[arg-type]
    assert told == sorted(told)
    assert len(told) >= 3
    assert all(here % 4096 == 0 for here in told)
    assert folder.contents == written(tree)[0]


def test_memory_that_was_got_ready_is_what_the_first_copy_uses() -> None:
    tensors = [torch.ones(50_000) for _ in range(3)]
    image = TensorsImage()
    image.prepare([*tensors, tensors[0]])()
    held = image.held_bytes
    assert 600_000 < held < 3_000_000
    image.plan({"model": dict(enumerate(tensors))})
    image.take()
    assert image.held_bytes - held < 10_000, "it was got again"
    folder = Kept()
    image.write(folder)  # type: ignore[arg-type]
    assert folder.contents == written({"model": dict(enumerate(tensors))})[0]
