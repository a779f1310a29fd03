"""Match names against globs and regular expressions, and suggest the nearest valid name to a misspelt one.

A glob may have alternatives: `a{b,c}d` matches `abd` and `acd`. `re:a(b|c)d` does the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

_NAMES_ELSEWHERE = {
    "max_duration": "max_steps max_step max_epochs num_epochs epochs num_train_epochs total_steps max_iters",
    "grad_accum_steps": "accumulate_grad_batches gradient_accumulation_steps grad_accum accumulation_steps",
    "eval_interval": "val_check_interval check_val_every_n_epoch eval_every val_interval",
    "eval_steps": "limit_val_batches limit_test_batches limit_predict_batches eval_iters",
    "log_interval": "log_every_n_steps logging_steps log_every",
    "save_interval": "save_steps save_every every_n_train_steps every_n_epochs checkpoint_interval",
    "max_checkpoints": "save_total_limit save_top_k keep_last max_to_keep",
    "clip_norm": "gradient_clip_val max_grad_norm grad_clip",
    "num_workers": "dataloader_num_workers workers",
    "batch_size": "per_device_train_batch_size micro_batch_size train_batch_size",
    "lr": "learning_rate",
    "fp16": "float16 half 16_mixed 16_true",
    "bf16": "bfloat16 bf16_mixed bf16_true",
    "fp32": "float32 32_true",
    "cuda": "gpu",
    "loop": "trainer training",
    "data": "dataset datasets datamodule dataloader",
    "scheduler": "lr_scheduler lr_schedule",
    "loggers": "logger",
    "device": "accelerator devices",
    "run_dir": "default_root_dir log_dir output_dir root_dir",
    "ckpt_path": "resume resume_from resume_from_checkpoint checkpoint_path",
    "train_loader": "train_dataloaders train_dataloader dataloaders dataloader loader data train_dataset",
    "val_loader": "val_dataloaders val_dataloader dataloaders dataloader loader data test_loader eval_dataset",
    "val_loaders": "val_dataloaders val_dataloader dataloaders dataloader loader data test_loader eval_dataset",
    "loader": "val_dataloaders val_dataloader dataloaders dataloader val_loader data test_loader test_dataset",
    "console": "enable_progress_bar progress_bar",
}
"""Name here -> names in other trainers, as `_plain` writes them; of two names with one alias the first is suggested."""
_NAMES_HERE: dict[str, list[str]] = {}
for _name, _aliases in _NAMES_ELSEWHERE.items():
    for _alias in _aliases.split():
        _NAMES_HERE.setdefault(_alias, []).append(_name)


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that other trainers call by this word, or the most similar one; None if there is neither.

    Case is ignored, and `-` equals `_`.
    """
    plain = _by_plain_name(choices)
    if (match := _translated(word, plain)) is not None:
        return match
    similar = get_close_matches(_plain(word), plain, n=1, cutoff=0.6)
    return plain[similar[0]] if similar else None


def find_name(word: str, choices: Iterable[str]) -> str | None:
    """The choice with this name here or in another trainer, by the rules of `nearest`; None if there is none."""
    plain = _by_plain_name(choices)
    return plain.get(_plain(word)) or _translated(word, plain)


def _by_plain_name(choices: Iterable[str]) -> dict[str, str]:
    # The first of two choices that differ in case alone is suggested.
    plain: dict[str, str] = {}
    for choice in choices:
        plain.setdefault(_plain(choice), choice)
    return plain


def _translated(word: str, plain: Mapping[str, str]) -> str | None:
    section, dot, name = _plain(word).rpartition(".")
    translations = (f"{section}{dot}{translation}" for translation in _NAMES_HERE.get(name, ()))
    return next((plain[translation] for translation in translations if translation in plain), None)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'x'?"`, or an empty text if no choice is near."""
    return _question(word, nearest(word, choices))


def of_a_section(word: str, keys: Iterable[str]) -> str:
    """`did_you_mean` for the key that ends in the word, or in its translation: `lr` suggests `optimizer.lr`."""
    keys = list(keys)
    names = {key.rpartition(".")[2]: key for key in keys} | {key.replace(".", "_"): key for key in keys}
    match = find_name(word, names)
    return _question(word, None if match is None else names[match])


def _question(word: str, match: str | None) -> str:
    if match is None:
        return ""
    epochs = " Epochs are written as 5ep." if "epoch" in word and match.endswith("max_duration") else ""
    return f" Did you mean '{match}'?{epochs}"


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


def alternatives(pattern: str) -> Iterator[str]:
    """The patterns without braces that a pattern expands to, in the order written."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", pattern)
    if match is None:
        yield pattern
        return
    # The innermost braces are expanded first; the recursion expands those around them.
    for alternative in match[1].split(","):
        yield from alternatives(pattern[: match.start()] + alternative + pattern[match.end() :])


REGEX = "re:"
"""Prefix of a regular expression, where a glob is allowed too."""


def why_no_pattern(pattern: str) -> str | None:
    """The fault of a regular expression that does not compile; None for one that does, and for a glob."""
    if not pattern.startswith(REGEX):
        return None
    try:
        re.compile(pattern.removeprefix(REGEX))
    except re.error as error:
        return f"{pattern!r} is not a regular expression: {error}"
    return None


def matches(name: str, pattern: str) -> bool:
    """Whether a whole name matches a glob, or a regular expression after `re:`; case matters."""
    if pattern.startswith(REGEX):
        return re.fullmatch(pattern.removeprefix(REGEX), name) is not None
    return any(fnmatchcase(name, alternative) for alternative in alternatives(pattern))
