"""Windows of text: every position for training, side by side for evaluation."""

from pathlib import Path

import pytest
import torch

from trainer_cli.addons.text.text import Text
from trainer_cli.data.loader import Loader
from trainer_cli.errors import UserError

WORDS = "the quick brown fox jumps over the lazy dog; " * 10


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(WORDS)
    return path


def test_training_has_a_window_at_every_position(file: Path) -> None:
    text = Text(str(file), context=8)
    content = WORDS.encode()[:405]
    assert len(text.train) == len(content) - 8
    for index in (0, 1, 17, len(text.train) - 1):
        tokens, following = text.train[index]
        assert bytes(tokens.tolist()) == content[index : index + 8]
        assert bytes(following.tolist()) == content[index + 1 : index + 9]
        assert tokens.dtype == following.dtype == torch.int64


def test_evaluation_sees_each_held_out_token_once(file: Path) -> None:
    text = Text(str(file), context=8)
    tail = WORDS.encode()[405:]
    seen = b"".join(bytes(text.val[index][1].tolist()) for index in range(len(text.val)))
    assert len(text.val) == 5
    assert seen == tail[1:41]
    with pytest.raises(IndexError):
        text.val[5]


def test_windows_by_list_are_the_windows_one_by_one(file: Path) -> None:
    train = Text(str(file), context=8).train
    indices = [0, 396, 5, 5]
    for (tokens, following), index in zip(train.__getitems__(indices), indices, strict=True):
        assert torch.equal(tokens, train[index][0])
        assert torch.equal(following, train[index][1])


def test_batches_are_what_a_language_model_takes(file: Path) -> None:
    loader = Loader(Text(str(file), context=8).train, 12, shuffle=True, seed=0)
    tokens, following = next(loader.iterate(0))
    assert tokens.shape == following.shape == (12, 8)
    assert torch.equal(tokens[:, 1:], following[:, :-1])


def test_characters_are_numbered_by_the_text(tmp_path: Path) -> None:
    path = tmp_path / "greek.txt"
    path.write_text("αβγ δε\n" * 20)
    text = Text(str(path), unit="characters", context=4)
    assert text.characters == "\n αβγδε"
    assert text.vocab_size == 7
    assert "".join(text.characters[token] for token in text.train[0][0]) == "αβγ "
    assert Text(str(path), unit="bytes", context=4).vocab_size == 256


def test_lists_and_folders_are_read_in_order(tmp_path: Path) -> None:
    for name, letter in (("b/z.txt", "z"), ("a.txt", "a"), ("b/c.txt", "c")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(letter * 50)
    folder = Text(str(tmp_path), unit="characters", context=4, val_fraction=0.2)
    assert folder.characters == "acz"
    assert folder.train[0][0].tolist() == [0] * 4
    files = [str(tmp_path / "b/z.txt"), str(tmp_path / "a.txt")]
    assert Text(files, unit="bytes", context=4).train[0][0].tolist() == [ord("z")] * 4


def test_the_default_is_the_standard_library_and_the_same_each_time() -> None:
    text = Text()
    assert 1_000_000 < len(text.train) < 2_000_000
    assert text.train.fingerprint == Text().train.fingerprint
    assert bytes(text.train[0][0].tolist()).isascii()


def test_fingerprints_tell_texts_apart(file: Path) -> None:
    before = Text(str(file), context=8)
    assert before.train.fingerprint != before.val.fingerprint
    file.write_text(WORDS.replace("fox", "ox "))
    assert Text(str(file), context=8).train.fingerprint != before.train.fingerprint


def test_mistakes_are_reported_with_a_cure(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no text at .*absent"):
        Text(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no files"):
        Text(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="empty list"):
        Text([])
    with pytest.raises(UserError, match="too short"):
        Text(str(file), context=64)
    with pytest.raises(UserError, match="one of bytes, characters"):
        Text(str(file), unit="words")
    with pytest.raises(UserError, match="at least 1"):
        Text(str(file), context=0)
    (tmp_path / "binary").write_bytes(b"\xff" * 1000)
    with pytest.raises(UserError, match=r"not UTF-8 .*data.unit=bytes"):
        Text(str(tmp_path / "binary"), unit="characters")
