"""Look at the samples of every set: in two sets, twice, without a label, not finite, or of unequal shapes."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from trainer_cli.addons.precheck.findings import PrecheckReport, Sureness
from trainer_cli.batches import is_dense
from trainer_cli.components import fill_from_data
from trainer_cli.config import Composed
from trainer_cli.data import sample_indices
from trainer_cli.leaves import walk
from trainer_cli.running import Builder
from trainer_cli.terminal import format_count, format_first
from trainer_cli.trainer import seed_everything

_LABELS = ("label", "labels", "target", "targets", "y")
"""Names of a label in a sample that is a mapping or a named tuple; in others it is the last of several values."""
_CLASSES = ("classes", "num_classes", "n_classes", "num_labels")
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
        # Of a loader of this package, or of torch's DataLoader.
        source = getattr(loader, "source", None) or getattr(loader, "loader", None)
        self.name = name
        self.dataset: Any = getattr(source, "dataset", None)
        count = None if isinstance(self.dataset, IterableDataset) else getattr(self.dataset, "__len__", None)
        self.length: float = math.inf if count is None else count()
        """Infinite for a stream whose end was not seen."""
        self.stacks = default_collate in (getattr(source, "collate", None), getattr(source, "collate_fn", None))
        """Whether samples must be of equal shapes."""
        self.order = getattr(source, "order", None)
        self.count, self.draws = 0, False
        self.digests: dict[bytes, Any] = {}
        """Digest -> the key of the first sample that has it."""
        self.repeats: list[str] = []
        self.forms: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        """Value in a sample -> each type and shape that it has -> the key of the first sample with it."""
        self.faults: defaultdict[str, list[str]] = defaultdict(list)
        """What is wrong -> the samples of which it is."""
        self.labels: set[float] = set()

    def read(self, seconds: float) -> None:
        """Look at samples from all parts of the set, until the time is over or all were read."""
        until = time.monotonic() + seconds
        stream = iter(self.dataset) if self.length == math.inf else None
        while self.count < self.length and (not self.count or time.monotonic() < until):
            key = self.count if stream else self._find_key(self.count)
            # One seed for all: where samples are drawn, equal sources give equal samples.
            seed_everything(0)
            try:
                self._look_at(key, next(stream) if stream else self.dataset[key])
                if not stream and self.count < _REREAD:
                    seed_everything(1)
                    self.draws |= _digest(_arrays_in(self.dataset[key])) not in self.digests
            except Exception as error:
                if stream and isinstance(error, StopIteration):
                    self.length = self.count
                    return
                self.faults[f"cannot be read ({type(error).__name__})"].append(f"[{key}: {error}]")
                if stream:
                    # A generator ends with its error, and another stream might repeat it for ever.
                    return
            self.count += 1

    def _find_key(self, number: int) -> Any:
        """The key of a sample in an order of numbers that is spread over the whole set."""
        index = sample_indices(0, 0, number, number + 1, int(self.length))[0]
        return self.order(0, index, index + 1)[0][0] if self.order else index

    def _look_at(self, key: Any, sample: Any) -> None:
        arrays = _arrays_in(sample)
        if (first := self.digests.setdefault(_digest(arrays), key)) != key:
            self.repeats.append(f"[{key}] = [{first}]")
        self.forms["a sample"].setdefault(f"values {' '.join(arrays)}", key)
        last = f"[{len(sample) - 1}]" if isinstance(sample, list | tuple) and len(sample) > 1 else None
        for name, array in arrays.items():
            kind, is_label = array.dtype.kind, name == last or name in _LABELS
            self.forms[name or "value"].setdefault(f"{'text' if kind == 'U' else array.dtype} {array.shape}", key)
            if kind in "fc" and not np.isfinite(array).all():
                self.faults[f"have NaN or infinity in {name or 'their value'}"].append(f"[{key}]")
            elif is_label and kind == "U" and array == "None":
                self.faults[f"have no label ({name} is None)"].append(f"[{key}]")
            elif is_label and kind in "biuf" and array.size == 1:
                self.labels.add(array.item())

    def has_few_values(self) -> bool:
        """Whether most samples are equal to another, as where each is one of a few values."""
        return len(self.digests) < self.count / 2

    def judge(self, report: PrecheckReport) -> None:
        """Report what is wrong in the values of samples."""
        for fault, keys in self.faults.items():
            what = f"{len(keys):,} {fault}: {format_first(keys, 5)}"
            report.add("certain", self.name, what, "Repair these samples, or leave them out")
        for name, forms in self.forms.items():
            shapes = {form.partition(" ")[2] for form in forms}
            if len(forms) > 1 and (self.stacks or len(shapes) == 1):
                what = f"{name} differs: {format_first([f'{form} in [{key}]' for form, key in forms.items()], 3)}"
                cure = "Make them equal in the dataset, or give data.collate_fn, which makes a batch of samples"
                report.add("certain" if len(shapes) > 1 else "likely", self.name, what, cure)
        # With one seed most samples are equal: they are drawn, whatever their number is.
        is_drawn = self.draws and self.has_few_values()
        if not is_drawn and len(self.repeats) > (0 if self.labels else _PASSAGES * self.count):
            what = f"{format_count(len(self.repeats), 'sample')} equal to another: {format_first(self.repeats, 3)}"
            sureness: Sureness = "hint" if self.has_few_values() else "likely"
            report.add(sureness, self.name, what, "Leave out copies that are not meant")

    def judge_labels(self, report: PrecheckReport, classes: int) -> None:
        """Report what is wrong with the labels."""
        if len(self.labels) == 1 < self.count:
            what = f"every label is {min(self.labels):g}"
            cure = "Check how labels are read, and how the set was split"
            report.add("certain" if self.count == self.length else "likely", self.name, what, cure)
        elif self.labels and classes > 1 and all(float(label).is_integer() for label in self.labels):
            if outside := sorted(self.labels - set(range(classes))):
                what = f"labels {format_first(outside)}, and the model has {classes} classes"
                cure = f"Number labels from 0 to {classes - 1}, or give the model more classes"
                report.add("certain", self.name, what, cure)
            missing = sorted(set(range(classes)) - self.labels)
            if self.name == "train" and missing and (self.count == self.length or self.count > _ENOUGH * classes):
                what = f"no sample of class {format_first(missing)} of the model's {classes} classes"
                report.add("likely", self.name, what, "Check how the set was split, or give the model fewer classes")


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
    for number, each in enumerate(sorted(sets, key=lambda each: each.length)):
        each.read((until - time.monotonic()) / (len(sets) - number))
        total = "the samples of a stream" if each.length == math.inf else format_count(int(each.length), "sample")
        report.looked_at.append(f"{each.name}: {each.count:,} of {total} looked at")
        each.judge(report)
        each.judge_labels(report, classes)
    for pair in itertools.combinations(sets, 2):
        _compare(report, *pair)
    return report


def _compare(report: PrecheckReport, one: _Set, other: _Set) -> None:
    """Report samples that are in two sets."""
    names = f"{one.name}, {other.name}"
    shared = [
        f"{one.name}[{one.digests[digest]}] = {other.name}[{other.digests[digest]}]"
        for digest in one.digests
        if digest in other.digests
    ]
    if one.draws != other.draws:
        report.notes.append(
            f"{names}: samples of {(one if one.draws else other).name} are drawn anew at each reading, so they equal "
            "none of the other set; check once with the augmentation switched off"
        )
    elif shared and (one.labels or len(shared) > _PASSAGES * min(one.count, other.count)):
        what = f"{format_count(len(shared), 'sample')} in both: {format_first(shared, 3)}"
        cure = "What was trained on measures nothing: leave them out of one set, or split before copies are made"
        report.add("hint" if one.has_few_values() else "certain", names, what, cure)


def _arrays_in(sample: Any) -> Mapping[str, np.ndarray[Any, Any]]:
    """The numbers of each tensor, array, image and number of a sample by name; anything else as text."""
    arrays = {}
    for name, leaf in walk(sample):
        if isinstance(leaf, torch.Tensor) and is_dense(leaf):
            leaf = (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).detach().cpu().numpy()
        is_number = isinstance(leaf, int | float) or hasattr(leaf, "__array_interface__")
        arrays[name] = np.asarray(leaf if is_number else repr(leaf))
    return arrays


def _digest(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """A digest of the exact values of a sample."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype}{array.shape}".encode(errors="replace") + array.tobytes())
    return digest.digest()
