"""What a batch weighs: the samples or labels it counts as, in every form of batch, and a weight of 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small_parts import data_loader, present
from tiny import ListLogger, on, trainer
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from trainer_cli.batches.samples import sample_count
from trainer_cli.batches.split import split_batch
from trainer_cli.callbacks.check_finite import CheckFinite
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import UserError
from trainer_cli.outputs.label_count import label_counter
from trainer_cli.outputs.metrics import WeightedMeans, weighted
from trainer_cli.trainer.precision import Precision
from trainer_cli.trainer.train_step import TrainStep

COUNT = 10


class Items(Dataset[Any]):
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


def _fit(form: str, loader: Any, **settings: Any) -> tuple[Any, Mapping[str, float], list[float]]:
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
    "without a batch size": (data_loader([WIDE, WIDE], batch_size=None), [6, 6], None),
    "a loader of another class": (
        Subclass(Items(lambda index: torch.ones(3, 2)), 4, collate_fn=list), [3, 3, 3], "batch_size=4"
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


# Models of transformers on padded and masked data: what a batch weighs is what its loss is a mean over.

SMALL = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
GPT: dict[str, Any] = {**SMALL, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0,
                       "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
BERT = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
        "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
T5 = {**SMALL, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
      "decoder_start_token_id": 0}  # fmt: skip
BART = {**SMALL, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "dropout": 0.0,
        "max_position_embeddings": 16, "decoder_start_token_id": 0, "forced_eos_token_id": None}  # fmt: skip
LLAMA = {**SMALL, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
         "max_position_embeddings": 16}  # fmt: skip


def _make(name: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> Any:
        # Here, as importing it takes long.
        import transformers

        cast("Any", transformers.logging).set_verbosity_error()
        kind = getattr(transformers, name)
        return kind(kind.config_class(**settings))

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    name: (_make(name, settings), ndim)
    for name, settings, ndim in (
        ("GPT2LMHeadModel", GPT, 2),
        ("LlamaForCausalLM", LLAMA, 2),
        ("BertLMHeadModel", {**BERT, "is_decoder": True}, 2),
        ("BertForMaskedLM", BERT, 2),
        ("DistilBertForMaskedLM", {"vocab_size": 20, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16,
                                   "max_position_embeddings": 16, "dropout": 0.0, "attention_dropout": 0.0}, 2),
        ("BertForTokenClassification", {**BERT, "num_labels": 20}, 2),
        ("BertForSequenceClassification", {**BERT, "num_labels": 20}, 1),
        ("T5ForConditionalGeneration", T5, 2),
        ("BartForConditionalGeneration", BART, 2),
    )
}  # fmt: skip


class Padded(Dataset[dict[str, Tensor]]):
    """Sequences of different lengths; `first` of each are not labelled, as of a prompt."""

    lengths = (3, 12, 4, 11, 5, 16, 3, 14)

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, places = (torch.arange(16) * (index + 1)) % 19 + 1, torch.arange(16)
        known = places < self.lengths[index]
        labels = tokens.masked_fill(~known | (places < index % 3), -100)
        if self.ndim == 1:
            labels = torch.tensor(-100 if index in (0, 1, 5) else index)
        return {"input_ids": tokens, "labels": labels, "attention_mask": known.long()}


def _fit_padded(make: Callable[[], nn.Module], ndim: int, size: int, accum: int, **settings: Any) -> tuple[Any, float]:
    made = trainer(
        make,
        model_call="kwargs",
        settings={"max_duration": 1, "grad_accum_steps": accum, **settings, "eval_interval": 1},
    )
    result = made.fit(DataLoader(Padded(ndim), size), DataLoader(Padded(ndim), size))
    assert result.metrics["train/loss"] > 0
    return made.model.state_dict(), result.metrics["val/loss"]


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_padded_samples_weighs_as_many_labels_as_its_loss_is_a_mean_over(name: str) -> None:
    make, ndim = MODELS[name]
    torch.manual_seed(0)
    by_hand = make()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    (batch,) = DataLoader(Padded(ndim), 8)
    by_hand(**batch).loss.backward()
    optimizer.step()
    with torch.no_grad():
        loss = by_hand.eval()(**batch).loss.item()
    for size, accum, settings in ((8, 1, {}), (4, 2, {}), (1, 8, {}), (8, 1, {"microbatch": 3})):
        weights, val_loss = _fit_padded(make, ndim, size, accum, log_interval=1, **settings)
        torch.testing.assert_close(dict(weights), by_hand.state_dict(), rtol=1e-4, atol=1e-6)
        assert val_loss == pytest.approx(loss, rel=1e-5), (size, accum)


def _with_own_forward() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    class Own(GPT2LMHeadModel):  # type: ignore[misc]
        """Computes a loss of its own."""

        def forward(self, input_ids: Tensor, **batch: Any) -> Any:
            return super().forward(input_ids).logits.mean()

    return Own(GPT2Config(**GPT))


def _with_own_loss() -> nn.Module:
    model = MODELS["GPT2LMHeadModel"][0]()
    cast("Any", model).loss_function = lambda logits, **_: logits.mean()
    return model


CTC = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
       "conv_dim": [8], "conv_kernel": [4], "conv_stride": [4], "num_feat_extract_layers": 1,
       "num_conv_pos_embedding_groups": 1, "num_conv_pos_embeddings": 4}  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(2, 2),
        _with_own_forward,
        _with_own_loss,
        _make("Wav2Vec2ForCTC", CTC),
    ],
    ids=["no model of transformers", "a forward of its own", "a loss of its own", "a mean over samples"],
)
def test_labels_of_an_unknown_loss_are_not_counted(make: Callable[[], nn.Module]) -> None:
    assert label_counter(make()) is None


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({}, None),
        ({"labels": None}, None),
        ({"labels": torch.ones(2, 3)}, None),
        ({"labels": torch.ones(2, 3, dtype=torch.long)}, 4),
        ({"labels": torch.tensor([[1, -100, 1], [-100, 2, 2]])}, 3),
        ({"labels": torch.ones(2, 3, dtype=torch.long), "shift_labels": torch.tensor([[1, 2, -100]])}, 2),
        ({"labels": torch.ones(2, 3, dtype=torch.long), "num_items_in_batch": 7}, None),
    ],
)
def test_what_counts_is_what_the_loss_of_a_causal_model_is_of(arguments: dict[str, Any], count: int | None) -> None:
    counter = label_counter(MODELS["LlamaForCausalLM"][0]())
    assert counter is not None
    assert counter(arguments) == count


# A batch of weight 0 counts for nothing: in means, gradients and checks, whatever its loss is.


VOID = -1.0


class Targets(Dataset[Any]):
    """Samples of a position and a target; VOID stands for none, in all samples of some batches of two."""

    def __init__(self, *void_batches: int, length: int = 12) -> None:
        self.void_batches, self.length = void_batches, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index / 12, 1.0]), torch.tensor(VOID if index // 2 in self.void_batches else float(index))


KINDS: dict[str, Callable[[float], Any]] = {
    "number": int,
    "int tensor": torch.tensor,
    "float tensor": lambda count: torch.tensor(float(count)),
}


class Masked(nn.Module):
    """The mean over the targets that there are; NaN over none, and its gradients too if `divides`."""

    def __init__(self, kind: str, divides: bool) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)
        self.kind, self.divides = kind, divides

    def forward(self, batch: Any) -> Any:
        x, y = batch
        known = y != VOID
        count = int(known.sum())
        errors = (self.line(x).squeeze(-1) - y).square() * known
        loss = errors.sum() / known.sum() if self.divides or count else errors.sum() + math.nan
        return {"loss": loss, "mae": float(loss.detach()), "weight": KINDS[self.kind](count)}


def _fit_masked(
    kind: str, divides: bool, *void: int, callbacks: Any = (), **settings: Any
) -> tuple[Any, Any, list[Tensor]]:
    logger, precision, gradients = ListLogger(), settings.pop("precision", None), []
    keep = on(on_before_optimizer_step=lambda trainer, model, _: gradients.append(model.line.weight.grad.clone()))
    made = trainer(
        lambda: Masked(kind, divides), lr=0.01, callbacks=[keep, *callbacks], loggers=[logger],
        settings={"max_duration": "1ep", "log_interval": 1, "eval_interval": "1ep", **settings},
        precision=precision,
    )  # fmt: skip
    data = data_loader(Targets(*void), 2)
    made.fit(data, data)
    return made, logger.records, gradients


def test_a_step_of_weight_zero_gives_frozen_parameters_no_gradient() -> None:
    """A gradient of zero is one that weight decay and moments act upon."""
    gradients: list[Any] = []

    def make() -> nn.Module:
        model = Masked("number", divides=False)
        model.line.bias.requires_grad_(False)
        return model

    keep = on(on_before_optimizer_step=lambda trainer, model, _: gradients.append(model.line.bias.grad))
    made = trainer(make, callbacks=[keep], settings={"max_duration": 2})
    made.fit(data_loader(Targets(0, 1), 2))
    assert gradients == [None, None]


@pytest.mark.parametrize("divides", [False, True], ids=["NaN loss", "NaN gradients"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_weight_zero_adds_nothing_to_an_accumulated_step(kind: str, divides: bool) -> None:
    """Batches 1 and 2 of the first step, the first of the second."""
    made, records, gradients = _fit_masked(kind, divides, 1, 2, 3, grad_accum_steps=3)
    model = made.model
    torch.manual_seed(0)
    fresh = Masked(kind, divides)
    fresh(next(iter(data_loader(Targets(), 2))))["loss"].backward()
    assert torch.allclose(gradients[0], present(fresh.line.weight.grad))
    assert all(torch.isfinite(value).all() for value in (*gradients, *model.parameters()))
    assert all(math.isfinite(value) for record in records for value in record.metrics.values())


@pytest.mark.parametrize("scale", [1e-50, 1e50])
def test_weights_of_one_step_are_no_measure_for_those_of_the_next(scale: float) -> None:
    """In units of the first step, these weights would be too large or too small for the gradients of the others."""
    trained = []
    for factor in (1.0, scale):
        weights = iter([1.0, 3.0, factor, 3 * factor, 1.0, 3.0])
        make = type("Weighted", (Masked,), {
            "forward": lambda self, batch, weights=weights: {**Masked.forward(self, batch), "weight": next(weights)}
        })  # fmt: skip
        made = trainer(lambda make=make: make("number", False), lr=0.01, settings={
            "max_duration": 3, "grad_accum_steps": 2,
        })  # fmt: skip
        made.fit(data_loader(Targets(), 2))
        trained.append(made.model.get_parameter("line.weight"))
    torch.testing.assert_close(*trained)


@pytest.mark.parametrize("policy", [None, "raise", "skip"])
@pytest.mark.parametrize("divides", [False, True], ids=["NaN loss", "NaN gradients"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_weight_zero_neither_change_weights_nor_end_the_run(
    kind: str, divides: bool, policy: str | None
) -> None:
    callbacks = [] if policy is None else [CheckFinite(policy)]
    made, records, gradients = _fit_masked(kind, divides, 0, 3, 4, callbacks=callbacks)
    assert made.progress.step == 6
    assert [index for index, gradient in enumerate(gradients) if not gradient.any()] == [0, 3, 4]
    if policy:
        assert callbacks[0].times == 0
    losses = [record.metrics["train/loss"] for record in records if "train/loss" in record.metrics]
    assert [index for index, loss in enumerate(losses) if math.isnan(loss)] in ([0, 3, 4], [])
    assert math.isfinite(records[-1].metrics["val/loss"])
    assert records[-1].metrics["val/loss"] == pytest.approx(records[-1].metrics["val/mae"])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {"microbatch": 1}) for kind in KINDS),
        ("number", {"precision": Precision("fp16", loss_scale=1.0)}),
    ],
)
def test_weight_zero_adds_nothing_in_parts_of_a_batch_and_with_a_loss_scale(
    kind: str, settings: dict[str, Any]
) -> None:
    made, _, gradients = _fit_masked(kind, True, 0, 2, **settings)
    assert not gradients[0].any()
    assert all(torch.isfinite(value).all() for value in made.model.parameters())
    assert made.scaler is None or made.scaler.metrics()["skipped_steps"] == 0


class Twice(TrainStep):
    """Weighs each loss itself."""

    def train_batch(self, batch: Any) -> Any:
        outputs = self.forward(batch)
        self.backward(outputs["loss"] * math.nan, weight=0)
        self.backward(self.forward(batch)["loss"], weight=1)
        return {**outputs, "loss": outputs["loss"].detach()}


@pytest.mark.parametrize("accum", [1, 2])
def test_a_step_of_ones_own_may_give_weight_zero(accum: int, tmp_path: Path) -> None:
    made = trainer(
        Masked("number", False), step=Twice(), callbacks=[CheckFinite()], lr=0.01,
        settings={"max_duration": 2, "grad_accum_steps": accum}, checkpoint=CheckpointerCallback(tmp_path),
    )  # fmt: skip
    made.fit(data_loader(Targets(), 2))
    assert all(torch.isfinite(value).all() for value in made.model.parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_means_leave_out_values_of_weight_zero(kind: str, bad: float) -> None:
    meter = WeightedMeans(torch.device("cpu"))
    for weight, value in ((2, 1.0), (0, bad), (2, 3.0)):
        loss = torch.tensor(value)
        meter.add(loss, {"number": value, "tensor": loss}, KINDS[kind](weight))
    assert meter.means() == {"loss": 2.0, "number": 2.0, "tensor": 2.0}
    assert meter.loss_is_finite
    for other in (bad, torch.tensor(bad)):
        assert float(weighted(other, KINDS[kind](0))) == 0
        assert not math.isfinite(float(weighted(other, KINDS[kind](2))))
