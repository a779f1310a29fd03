"""Files of token ids: every format and split, borders of documents, flat memory, and mistakes with a cure."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_parts import present

from trainer_cli.addons.text.gpt import GPT
from trainer_cli.addons.text.mixture import Mixture
from trainer_cli.addons.text.text import IGNORED
from trainer_cli.addons.text.tokens import TokenFiles, TokenWindows
from trainer_cli.data.loader import Loader
from trainer_cli.errors import UserError

IDS = np.random.default_rng(0).integers(1, 90, 405)


def write(path: Path, ids: Any = IDS, dtype: str = "<u2", header: tuple[int, int] | None = None) -> str:
    path.parent.mkdir(exist_ok=True)
    fields = np.zeros(256, "<i4")
    if header is not None:
        fields[:3] = *header, len(ids)
    path.write_bytes((b"" if header is None else fields.tobytes()) + np.asarray(ids, dtype).tobytes())
    return str(path)


def save(path: Path, ids: Any) -> str:
    np.save(path, ids)
    return str(path)


def make(path: Any, **settings: Any) -> TokenFiles:
    return TokenFiles(path, **{"vocab_size": 100, "context": 8, "val_fraction": 0.1, **settings})


def inputs(windows: TokenWindows | None) -> list[int]:
    assert windows is not None
    return [token for index in range(len(windows)) for token in windows[index][0].tolist()]


FORMATS: dict[str, Callable[[Path], tuple[str, str]]] = {
    "bin, 16 bits": lambda folder: (write(folder / "a.bin"), "uint16"),
    "bin, 32 bits": lambda folder: (write(folder / "a.bin", dtype="<u4"), "uint32"),
    "bin of llm.c, GPT-2": lambda folder: (write(folder / "a.bin", header=(20240520, 1)), "uint32"),
    "bin of llm.c, Llama 3": lambda folder: (write(folder / "a.bin", dtype="<u4", header=(20240801, 7)), "uint16"),
    "npy": lambda folder: (save(folder / "a.npy", IDS), "uint16"),
    "npy, big-endian": lambda folder: (save(folder / "a.npy", IDS.astype(">u2")), "uint16"),
    "npy without a header": lambda folder: (write(folder / "a.npy", dtype="<u4"), "uint32"),
}


@pytest.mark.parametrize("file", FORMATS.values(), ids=FORMATS)
def test_every_format_gives_each_token_as_a_target_once(file: Callable[[Path], Any], tmp_path: Path) -> None:
    path, dtype = file(tmp_path)
    data = make(path, dtype=dtype)
    # 365 tokens: 45 windows, and 4 tokens that fill none. Of the 40 held out, 4 windows.
    for part, ids in ((data.train, IDS[:361]), (data.val, IDS[365:398])):
        assert part is not None
        pairs = [part[index] for index in range(len(part))]
        assert torch.cat([tokens for tokens, _ in pairs]).tolist() == ids[:-1].tolist()
        assert torch.cat([following for _, following in pairs]).tolist() == ids[1:].tolist()
        assert pairs[0][0].dtype == pairs[0][1].dtype == torch.int64
        with pytest.raises(IndexError):
            part[len(part)]


def test_no_window_crosses_files_or_the_split(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.bin", np.arange(30) + 30 * number)
    data = make(str(tmp_path / "*.bin"), val_fraction=0.5)
    # The split is at token 45. A window takes the token after it too.
    assert inputs(data.train) == [*range(24), *range(30, 38)]
    assert inputs(data.val) == [*range(45, 53), *range(60, 84)]


@pytest.mark.parametrize(
    ("path", "order"),
    [
        ("*.bin", [1, 2]),
        ("**/*.bin", [1, 2, 4]),
        ("", [1, 2, 3, 4]),
        (["b.bin", "a.bin"], [2, 1]),
        (["inner", "a.bin"], [4, 1]),
    ],
    ids=["a pattern", "a pattern of folders", "a folder", "a list", "a list with a folder"],
)
def test_files_are_read_in_order(path: Any, order: list[int], tmp_path: Path) -> None:
    for number, name in enumerate(("a.bin", "b.bin", "c.npy", "inner/d.bin"), start=1):
        write(tmp_path / name, [number] * 9)
    (tmp_path / "notes.txt").write_text("not tokens")
    entries = [str(tmp_path / entry) for entry in path] if isinstance(path, list) else str(tmp_path / path)
    assert inputs(make(entries, val_fraction=0).train)[::8] == order


def test_files_can_be_held_out(tmp_path: Path) -> None:
    write(tmp_path / "train_1.bin", range(9)), write(tmp_path / "val.bin", range(20, 29))
    data = make(str(tmp_path / "train_*"), val_path=str(tmp_path / "val.bin"))
    assert (inputs(data.train), inputs(data.val)) == ([*range(8)], [*range(20, 28)])
    assert make(str(tmp_path / "train_*"), val_fraction=0).val is None


def test_with_an_end_token_nothing_crosses_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [5, 6, 0, 7, 8, 9, 0, 0, 4])
    row = make(path, end_token=0, val_fraction=0).train[0]
    assert {name: value.tolist() for name, value in row.items() if name != "count"} == {
        "tokens": [5, 6, 0, 7, 8, 9, 0, 0],
        "targets": [6, 0, IGNORED, 8, 9, 0, 0, IGNORED],
        "segments": [1, 1, 1, 2, 2, 2, 2, 2],
        "positions": [0, 1, 2, 0, 1, 2, 3, 4],
    }
    assert row["count"] == 6


def test_a_model_loses_as_much_on_documents_in_a_window_as_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [5, 6, 0, 7, 8, 9, 3, 0, 4])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(vocab_size=10, context=8, layers=1, heads=2, width=8).eval()
    batch = next(
        Loader(make(path, vocab_size=10, end_token=0, val_fraction=0).train, 1, shuffle=True, seed=0).iterate(0)
    )
    outputs = model(batch)
    alone = [model((torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]))) for ids in ([5, 6, 0], [7, 8, 9, 3, 0])]
    assert outputs["tokens"] == outputs["weight"] == 6
    torch.testing.assert_close(outputs["loss"] * 6, sum(part["loss"] * part["tokens"] for part in alone))


def test_a_window_of_end_tokens_alone_has_targets(tmp_path: Path) -> None:
    assert make(write(tmp_path / "a.bin", [0] * 9), end_token=0, val_fraction=0).train[0]["count"] == 8


def test_a_mixture_draws_from_token_files_by_weight(tmp_path: Path) -> None:
    sources = {name: make(write(tmp_path / f"{name}.bin", [token] * 90)) for name, token in (("a", 1), ("b", 2))}
    mixture = Mixture(sources, {"a": 3, "b": 1}, epoch_samples=1000)
    batches = list(Loader(mixture.train, 100, shuffle=True, seed=0).iterate(0))
    assert sum(int((tokens[:, 0] == 1).sum()) for tokens, _ in batches) == 750
    assert (mixture.vocab_size, mixture.context, sorted(mixture.val)) == (100, 8, ["a", "b"])


def test_fingerprints_depend_on_names_sizes_content_and_settings_but_not_on_folders(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin")
    changed = IDS.copy()
    changed[0] += 1
    fingerprints = [
        make(path).train.fingerprint,
        make(write(tmp_path / "b.bin")).train.fingerprint,
        make(write(tmp_path / "1/a.bin", [*IDS, 5])).train.fingerprint,
        make(write(tmp_path / "2/a.bin", changed)).train.fingerprint,
        make(path, context=9).train.fingerprint,
        make(path, end_token=3).train.fingerprint,
        make(path, val_fraction=0.2).train.fingerprint,
        present(make(path).val).fingerprint,
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert make(write(tmp_path / "elsewhere/a.bin")).train.fingerprint == fingerprints[0]


def test_files_of_any_size_take_no_memory(tmp_path: Path) -> None:
    """A sparse file of 100 GB: what is read is counted, and is the same as of a small one."""
    read: list[int] = []
    for size in (1 << 20, 100_000_000_000):
        path = tmp_path / f"{size}.bin"
        path.touch()
        os.truncate(path, size)
        before = _bytes_read()
        data = make(str(path), context=1023)
        next(Loader(data.train, 16, shuffle=True, seed=0).iterate(0))
        read.append(_bytes_read() - before)
        assert len(data.train) + len(data.val or ()) == pytest.approx(size / 2 / 1023, rel=0.01)
    assert read[1] < read[0] + 10_000 < 400_000


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_more_files_than_may_be_open_are_read(tmp_path: Path) -> None:
    for number in range(70):
        write(tmp_path / f"{number:02}.bin", [number] * 9)
    before = len(os.listdir("/proc/self/fd"))
    data = make(str(tmp_path), val_fraction=0)
    assert inputs(data.train)[::8] == inputs(pickle.loads(pickle.dumps(data.train)))[::8] == [*range(70)]
    assert len(os.listdir("/proc/self/fd")) == before + 64
    del data
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_changes_while_it_is_used_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin")
    data = make(path)
    copy = pickle.loads(pickle.dumps(data.train))
    os.truncate(path, 100)
    for windows in (data.train, copy):
        with pytest.raises(UserError, match=r"a\.bin' was changed while it is used: it has 100 bytes, and had 810"):
            windows[40]


def test_an_id_outside_the_vocabulary_is_found_in_the_window_that_is_read(tmp_path: Path) -> None:
    ids = np.ones(300_000, int)
    # Between the sampled parts.
    ids[3000] = 100
    data = make(write(tmp_path / "a.bin", ids))
    data.train[373]
    with pytest.raises(UserError, match=r"token 3,000 of '.*a.bin' is 100, and data.vocab_size is 100"):
        data.train.__getitems__([1, 374])


MISTAKES: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "no file": (lambda folder: str(folder / "*.bin"), {}, r"there is no token file at .*Give a \.bin"),
    "an empty list": (lambda folder: [], {}, "data.path is an empty list"),
    "an odd size": (lambda folder: write(folder / "a.bin", [1] * 405, "u1"), {}, "not a whole number of uint16 tokens"),
    "another file": (lambda folder: write(folder / "a.txt"), {}, "neither in .bin nor in .npy.*data=text"),
    "wrong magic": (lambda folder: write(folder / "a.bin", header=(20240522, 1)), {}, "unknown magic number 20240522"),
    "wrong version": (lambda folder: write(folder / "a.bin", header=(20240520, 2)), {}, "version 2 .* expected 1"),
    "wrong type": (lambda folder: save(folder / "a.npy", IDS / 2), {}, r"\(405,\) of float64, expected one dimension"),
    "two dimensions": (lambda folder: save(folder / "a.npy", IDS.reshape(5, 81)), {}, r"\(5, 81\) of int64"),
    "32 bits read as 16": (lambda folder: write(folder / "a.bin", dtype="<u4"), {}, "data.dtype=uint32"),
    "16 bits read as 32": (
        lambda folder: write(folder / "a.bin", IDS[1:]),
        {"dtype": "uint32"},
        "data.vocab_size is 100",
    ),
    "a short file": (lambda folder: write(folder / "a.bin", IDS[:8]), {}, "has 8 tokens, too few for a window of 8"),
    "a short tail": (lambda folder: write(folder / "a.bin", IDS[:50]), {}, "0.1 of them held out, are too few"),
    "an empty tail": (lambda folder: write(folder / "a.bin"), {"val_fraction": 0.001}, "are too few"),
    "an id above the vocabulary": (lambda folder: write(folder / "a.bin"), {"vocab_size": 50}, "data.vocab_size is 50"),
    "a negative id": (lambda folder: save(folder / "a.npy", -IDS), {}, "token 0 of .* is -"),
    "another type": (lambda folder: write(folder / "a.bin"), {"dtype": "float32"}, "one of uint16, uint32"),
    "no context": (lambda folder: write(folder / "a.bin"), {"context": 0}, "data.context is 0"),
    "a fraction of all": (lambda folder: write(folder / "a.bin"), {"val_fraction": 1}, "data.val_fraction is 1"),
    "an end token of no vocabulary": (
        lambda folder: write(folder / "a.bin"),
        {"end_token": 100},
        "data.end_token is 100",
    ),
}


@pytest.mark.parametrize(("path", "settings", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_reported_with_a_cure(
    path: Callable[[Path], Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        make(path(tmp_path), **settings)


@pytest.mark.parametrize("name", ["a.bin", "a.npy"])
def test_a_truncated_file_with_a_header_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    (write(path, header=(20240520, 1)) if name == "a.bin" else save(path, IDS))
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(UserError, match=r"again"):
        make(str(path))


def test_a_file_in_both_parts_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"in data\.path and in data\.val_path"):
        make(str(tmp_path), val_path=str(tmp_path / "a.bin"))
