"""How many samples a batch counts as, in means, accumulated gradients, durations and parts, in every form of batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import ListLogger, on, trainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, default_collate

from trainer_cli.batches.samples import sample_count
from trainer_cli.batches.split import split_batch
from trainer_cli.errors import UserError

COUNT = 10


class Items:
    """Samples 0 to 9, as a form makes them of their number."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Subclass(DataLoader[Any]):
    """A loader of another library, which does not say how many samples a batch has."""


class Mean(nn.Module):
    """The loss, and its gradient, is the mean value of a batch's samples."""

    def __init__(self, values: Callable[[Any], list[Tensor]]) -> None:
        super().__init__()
        self.factor, self.values = nn.Parameter(torch.ones(())), values

    def forward(self, batch: Any) -> Any:
        return self.factor * torch.stack(self.values(batch)).mean()


def _value(index: int) -> Tensor:
    return torch.tensor(float(index))


def _image(index: int) -> Tensor:
    return torch.full((3, 5 + index, 2), float(index))


def _columns(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


# Form of a sample, collate_fn, and the values of the samples in a batch.
FORMS: dict[str, tuple[Callable[[int], Any], Callable[..., Any], Callable[[Any], list[Tensor]]]] = {
    "tensor": (_value, default_collate, list),
    "tuple": (lambda i: (torch.zeros(3), _value(i)), default_collate, lambda batch: list(batch[1])),
    "dict": (lambda i: {"x": torch.zeros(3), "y": _value(i)}, default_collate, lambda batch: list(batch["y"])),
    "list of dicts": (lambda i: {"image": _image(i)}, list, lambda batch: [item["image"].mean() for item in batch]),
    "list of pairs": (lambda i: (_image(i), i), list, lambda batch: [image.mean() for image, _ in batch]),
    "detection": (
        lambda i: (_image(i), {"boxes": torch.zeros(i, 4)}), _columns,
        lambda batch: [image.mean() for image in batch[0]],
    ),
    "ragged texts": (lambda i: torch.full((i + 1,), float(i)), list, lambda batch: [text.mean() for text in batch]),
    "dict of lists": (
        _image, lambda images: {"images": images}, lambda batch: [image.mean() for image in batch["images"]]
    ),
    "strings": (str, list, lambda batch: [torch.tensor(float(text)) for text in batch]),
}  # fmt: skip

LOADERS: dict[str, Callable[..., Any]] = {
    "DataLoader": lambda items, collate: DataLoader(items, 4, collate_fn=collate),
    "batch_sampler": lambda items, collate: DataLoader(
        items, batch_sampler=[[0, 1, 2], [3, 4, 5, 6, 7], [8, 9]], collate_fn=collate
    ),
    "BatchSampler": lambda items, collate: DataLoader(
        items, batch_sampler=BatchSampler(range(COUNT), 4, drop_last=False), collate_fn=collate
    ),
    "DistributedSampler": lambda items, collate: DataLoader(
        items, 4, sampler=DistributedSampler(items, 1, 0, shuffle=False), collate_fn=collate
    ),
    "iterable": lambda items, collate: DataLoader(Stream(items), 4, collate_fn=collate),
}


class Stream(IterableDataset[Any]):
    def __init__(self, items: Items) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return map(self.items.make, range(COUNT))


def _fit(form: str, loader: Any, **settings: Any) -> tuple[Any, dict[str, float], list[float]]:
    logger, gradients = ListLogger(), []
    keep = on(on_before_optimizer_step=lambda trainer, model, _: gradients.append(float(model.factor.grad)))
    made = trainer(
        Mean(FORMS[form][2]), lr=1e-9, callbacks=[keep], loggers=[logger],
        settings={"max_duration": "2ep", "log_interval": "1ep", "eval_interval": "1ep", **settings},
    )  # fmt: skip
    made.fit(loader, loader)
    return made, logger.records[-1].metrics, gradients


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("form", FORMS)
def test_every_sample_counts_once_whatever_the_form_of_the_batch(
    form: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, collate, _ = FORMS[form]
    loader = LOADERS[kind](Items(make), collate)
    made, metrics, gradients = _fit(form, loader, grad_accum_steps=3, max_duration="20sp")
    assert (made.progress.samples, made.progress.step) == (20, 2)
    assert [metrics["train/loss"], metrics["val/loss"], *gradients] == pytest.approx([4.5] * 4)
    assert not [record.message for record in caplog.records if "counts as" in record.message]


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_a_batch_hold_whole_samples(form: str) -> None:
    make, collate, values = FORMS[form]
    made, metrics, _ = _fit(form, LOADERS["DataLoader"](Items(make), collate), microbatch=2)
    assert made.progress.samples == 20
    assert metrics["train/loss"] == pytest.approx(4.5)
    batch = collate([make(index) for index in range(5)])
    assert [count for _, count in split_batch(batch, 5, 2)] == [2, 2, 1]
    assert [float(value) for part, _ in split_batch(batch, 5, 2) for value in values(part)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(3, 8, 8)] * 3,
        [{"image": torch.zeros(3, 8, 8)}] * 3,
        [["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"]],
    ],
)
def test_a_batch_that_may_be_cut_in_two_ways_is_refused(batch: Any) -> None:
    with pytest.raises(UserError, match="samples, or fields of all samples"):
        list(split_batch(batch, 3, 2))


def test_fields_of_as_many_rows_as_fields_are_cut_by_rows() -> None:
    batch = [torch.arange(6).reshape(2, 3), torch.arange(2)]
    assert [part[1].tolist() for part, _ in split_batch(batch, 2, 1)] == [[0], [1]]


class Batches:
    """A loader that is no DataLoader."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


WIDE = torch.ones(6, 2)

# Batches of a loader, the number that each counts as, and a part of the warning.
CONTRADICTIONS: dict[str, tuple[Any, list[int], str | None]] = {
    "a collate_fn that drops samples": (
        DataLoader(Items(_value), 5, collate_fn=lambda items: torch.stack(items[1:])), [5, 5],
        "its first tensor has 4 rows",
    ),
    "a collate_fn that drops a sample later": (
        DataLoader(Items(_value), 5, collate_fn=lambda items: torch.stack([item for item in items if item != 7])),
        [5, 5], "its first tensor has 4 rows",
    ),
    "two views of each sample": (
        DataLoader(Items(_value), 5, collate_fn=lambda items: torch.stack([*items, *items])), [5, 5],
        "its first tensor has 10 rows",
    ),
    "graphs joined, with a row of labels": (
        DataLoader(Items(_value), 5, collate_fn=lambda items: {"nodes": torch.ones(37, 2), "y": torch.stack(items)}),
        [5, 5], None,
    ),
    "an iterable of tensors": (Batches(WIDE, torch.ones(3, 2)), [6, 3], None),
    "an iterable of pairs": (Batches((WIDE, torch.ones(6)), (WIDE, torch.ones(6))), [6, 6], None),
    "an iterable of lists of samples": (
        Batches([torch.ones(2), torch.ones(3)], [torch.ones(2)]), [2, 2], "its tensors have 2, 3 rows"
    ),
    "an iterable of lists of mappings": (
        Batches([{"x": torch.ones(3, 2)}, {"x": torch.ones(3, 2)}]), [3], "it is a list of 2 mappings"
    ),
    "without a batch size": (DataLoader([WIDE, WIDE], batch_size=None), [6, 6], None),  # type: ignore[arg-type]
    "a loader of another class": (
        Subclass(Items(lambda index: torch.ones(3, 2)), 4, collate_fn=list), [3, 3, 3], "batch_size=4"  # type: ignore[arg-type]
    ),
}  # fmt: skip


class Sum(nn.Module):
    """Takes any batch; returns `weight` with the loss unless it is None."""

    def __init__(self, weight: int | None) -> None:
        super().__init__()
        self.factor, self.weight = nn.Parameter(torch.ones(())), weight

    def forward(self, batch: Any) -> Any:
        return {"loss": self.factor * 2} | ({} if self.weight is None else {"weight": self.weight})


@pytest.mark.parametrize("weight", [None, 2])
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_batch_whose_form_contradicts_its_number_of_samples_is_warned_of_once(
    name: str, weight: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    loader, counts, warning = CONTRADICTIONS[name]
    made = trainer(Sum(weight), settings={"max_duration": "2ep", "steps_per_epoch": len(counts)})
    made.fit(loader)
    assert made.progress.samples == 2 * sum(counts)
    warnings = [record.message for record in caplog.records if "counts as" in record.message]
    if warning is None or weight is not None:
        assert warnings == []
    else:
        assert len(warnings) == 1
        assert warning in warnings[0]
        assert "'weight'" in warnings[0]


def test_the_number_that_a_loader_names_counts() -> None:
    assert sample_count("text", 3) == 3
    assert sample_count(torch.zeros(2, 4), 3) == 3
    with pytest.raises(UserError, match="how many samples"):
        sample_count("text")
