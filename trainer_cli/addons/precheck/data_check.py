"""Look at the samples of every set: in two sets, twice, without a label, not finite, or of unequal shapes."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from trainer_cli.addons.precheck.findings import PrecheckReport, Sureness, Suspicion
from trainer_cli.batches import is_dense
from trainer_cli.components import fill_from_data
from trainer_cli.config import Composed
from trainer_cli.leaves import walk
from trainer_cli.running import Builder
from trainer_cli.terminal import format_count, format_first
from trainer_cli.trainer import seed_everything

_LABELS = frozenset({"label", "labels", "target", "targets", "y"})
"""Names of a label in a sample that is a mapping or a named tuple; in others it is the last of several values."""
_CLASSES = frozenset({"classes", "num_classes", "n_classes", "num_labels"})
"""Arguments of a model that are its number of classes."""
_REREAD = 4
"""Samples that are read with another seed, to see whether they are drawn."""
_ENOUGH = 50
"""Samples for each class, among which a class that is not seen is likely missing."""
_PASSAGES = 0.01
"""Share of samples without a label of their own, as windows of text, that may be equal to others."""


class _Set:
    """The samples of a loader, and what was seen in those that were read."""

    def __init__(self, name: str, loader: Any) -> None:
        source = getattr(loader, "source", None) or getattr(loader, "loader", None)
        self.name = name
        self.dataset: Any = getattr(source, "dataset", None)
        # Of a loader of this package, or of torch's DataLoader.
        self.stacks = default_collate in (getattr(source, "collate", None), getattr(source, "collate_fn", None))
        """Whether samples must be of equal shapes."""
        self.own_order, self.seed = getattr(source, "own_order", None), getattr(source, "seed", 0)
        length = None if isinstance(self.dataset, IterableDataset) else getattr(self.dataset, "__len__", None)
        self.length: int | None = None if length is None else length()
        self.count, self.is_whole, self.draws = 0, False, False
        self.digests: dict[bytes, Any] = {}
        """Digest -> the first sample that has it."""
        self.repeats: list[str] = []
        self.forms: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        """Value in a sample -> each type and shape that it has -> the first sample with it."""
        self.faults: defaultdict[str, list[Any]] = defaultdict(list)
        """What is wrong -> the samples of which it is."""
        self.labels: Counter[float] = Counter()

    def read(self, seconds: float) -> None:
        """Look at samples from all parts of the set, until the time is over or all were read."""
        until, self.is_whole = time.monotonic() + seconds, True
        for key, read in self._each():
            # One seed for all: where samples are drawn, equal sources give equal samples.
            seed_everything(0)
            try:
                self._look_at(key, read())
                if self.length and self.count < _REREAD:
                    seed_everything(1)
                    self.draws |= _digest(read()) not in self.digests
            except Exception as error:
                self.faults[f"cannot be read ({type(error).__name__})"].append(f"{key}: {error}")
            self.count += 1
            if time.monotonic() > until:
                self.is_whole = self.count == self.length
                break

    def _each(self) -> Iterator[tuple[Any, Callable[[], Any]]]:
        """The number of each sample, and a function that reads it."""
        if self.length is None:
            yield from ((key, partial(lambda sample: sample, sample)) for key, sample in enumerate(self.dataset))
            return
        # Numbers that are spread evenly over the set, from the first on; a step without a common factor meets all.
        step = next(n for n in itertools.count(round(0.618 * self.length) or 1) if math.gcd(n, self.length) == 1)
        for index in (number * step % self.length for number in range(self.length)):
            key = index if self.own_order is None else self.own_order(self.seed, 0, index, index + 1)[0]
            yield key, partial(self.dataset.__getitem__, key)

    def _look_at(self, key: Any, sample: Any) -> None:
        digest = _digest(sample)
        if digest in self.digests:
            self.repeats.append(f"[{key}] = [{self.digests[digest]}]")
        self.digests.setdefault(digest, key)
        leaves = dict(walk(sample))
        self.forms["a sample"].setdefault(f"values {' '.join(leaves)}", key)
        last = f"[{len(sample) - 1}]" if isinstance(sample, list | tuple) and len(sample) > 1 else None
        for name, leaf in leaves.items():
            array, is_label = _as_array(leaf), name == last or name in _LABELS
            self.forms[name or "value"].setdefault(
                f"{type(leaf).__name__ if array is None else array.dtype} {() if array is None else array.shape}", key
            )
            if array is not None and array.dtype.kind in "fc" and not np.isfinite(array).all():
                self.faults[f"have NaN or infinity in {name or 'their value'}"].append(key)
            elif leaf is None and is_label:
                self.faults[f"have no label ({name} is None)"].append(key)
            elif is_label and array is not None and array.size == 1:
                self.labels[array.item()] += 1


def check_data(composed: Composed, seconds: float) -> PrecheckReport:
    """Look at the samples of every set of an experiment, for as long as `seconds`."""
    data, report = Builder(composed.config, composed.trust).data(), PrecheckReport()
    sets = [_Set(name, loader) for name, loader in data.loaders.items()]
    for each in [each for each in sets if each.dataset is None]:
        report.notes.append(f"{each.name}: its loader makes batches of its own, whose samples are not looked at")
        sets.remove(each)
    until = time.monotonic() + seconds
    node = fill_from_data(composed.config.model, data.source, "model") or {}
    classes = next((value for key, value in node.items() if key in _CLASSES and isinstance(value, int)), 0)
    # The short ones first: what they leave of their time is for the others.
    for number, each in enumerate(sorted(sets, key=lambda each: (each.length is None, each.length))):
        each.read((until - time.monotonic()) / (len(sets) - number))
        of = "" if each.length is None else f"{each.count:,} of "
        samples = format_count(each.count if each.length is None else each.length, "sample")
        of_stream = "" if each.length is not None or each.is_whole else ", the first of a stream,"
        report.looked_at.append(f"{each.name}: {of}{samples}{of_stream} looked at")
        report.findings.extend(
            Suspicion(each.name, *judged) for judged in (*_judge(each), *_judge_labels(each, classes))
        )
    for one, other in itertools.combinations(sets, 2):
        both = [
            f"{one.name}[{key}] = {other.name}[{other.digests[digest]}]"
            for digest, key in one.digests.items()
            if digest in other.digests
        ]
        if one.draws != other.draws:
            report.notes.append(
                f"{one.name}, {other.name}: samples of {(one if one.draws else other).name} are drawn anew at each "
                "reading, so they equal none of the other set; check once with the augmentation switched off"
            )
        elif both and (one.labels or len(both) > _PASSAGES * min(one.count, other.count)):
            what = f"{format_count(len(both), 'sample')} in both: {format_first(both, 3)}"
            cure = "What was trained on measures nothing: leave them out of one set, or split before copies are made"
            sureness = Sureness.hint if _has_few_values(one) else Sureness.certain
            report.findings.append(Suspicion(f"{one.name}, {other.name}", sureness, what, cure))
    return report


def _has_few_values(each: _Set) -> bool:
    """Whether most samples are equal to another, as where each is one of a few values."""
    return len(each.digests) < each.count / 2


def _judge(each: _Set) -> Iterator[tuple[Sureness, str, str]]:
    """What is wrong in the values of samples: how sure, what, and a cure."""
    for fault, keys in each.faults.items():
        yield Sureness.certain, f"{len(keys):,} {fault}: {_list(keys)}", "Repair these samples, or leave them out"
    for name, forms in each.forms.items():
        shapes = {form.partition(" ")[2] for form in forms}
        if len(forms) > 1 and (each.stacks or len(shapes) == 1):
            listed = format_first([f"{form} in [{key}]" for form, key in forms.items()], 3)
            cure = "Make them equal in the dataset, or give data.collate_fn, which makes a batch of samples"
            yield Sureness.certain if len(shapes) > 1 else Sureness.likely, f"{name} differs: {listed}", cure
    # With one seed most samples are equal: they are drawn, whatever their number is.
    is_drawn = each.draws and _has_few_values(each)
    if not is_drawn and len(each.repeats) > (0 if each.labels else _PASSAGES * each.count):
        what = f"{format_count(len(each.repeats), 'sample')} equal to another: {format_first(each.repeats, 3)}"
        yield Sureness.hint if _has_few_values(each) else Sureness.likely, what, "Leave out copies that are not meant"


def _judge_labels(each: _Set, classes: int) -> Iterator[tuple[Sureness, str, str]]:
    """What is wrong with the labels, as `_judge`."""
    sureness = Sureness.certain if each.is_whole else Sureness.likely
    if len(each.labels) == 1 < each.count:
        yield (
            sureness,
            f"every label is {next(iter(each.labels)):g}",
            "Check how labels are read, and how the set was split",
        )
    elif each.labels and classes > 1 and all(float(label).is_integer() for label in each.labels):
        if outside := sorted(label for label in each.labels if not 0 <= label < classes):
            what = f"labels {format_first(outside)}, and the model has {classes} classes"
            yield Sureness.certain, what, f"Number labels from 0 to {classes - 1}, or give the model more classes"
        missing = [label for label in range(classes) if label not in each.labels]
        if each.name == "train" and missing and (each.is_whole or each.count > _ENOUGH * classes):
            what = f"no sample of class {format_first(missing)} of the model's {classes} classes"
            yield Sureness.likely, what, "Check how the set was split, or give the model fewer classes"


def _digest(sample: Any) -> bytes:
    """A digest of the exact values of a sample."""
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in walk(sample):
        array = _as_array(leaf)
        described = f"{leaf!r}" if array is None else f"{array.dtype}{array.shape}"
        digest.update(f"{name} {described}".encode(errors="replace") + (b"" if array is None else array.tobytes()))
    return digest.digest()


def _as_array(leaf: Any) -> np.ndarray[Any, Any] | None:
    """The numbers of a tensor, an array, an image or a number; None for anything else."""
    if isinstance(leaf, torch.Tensor) and is_dense(leaf):
        leaf = leaf.detach().cpu()
        leaf = (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()
    is_number = isinstance(leaf, bool | int | float) or hasattr(leaf, "__array_interface__")
    return np.asarray(leaf) if is_number else None


def _list(keys: list[Any]) -> str:
    return format_first([f"[{key}]" for key in keys], 5)
