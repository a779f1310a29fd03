"""Models of transformers on padded and masked data: what a batch weighs is what its loss is a mean over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny import trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainer_cli.outputs.label_count import label_counter

transformers.logging.set_verbosity_error()

SMALL = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
GPT = {**SMALL, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
       "attn_pdrop": 0.0}  # fmt: skip
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
    kind = getattr(transformers, name)
    return lambda: kind(kind.config_class(**settings))  # type: ignore[no-any-return]


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


def _fit(make: Callable[[], nn.Module], ndim: int, size: int, accum: int, **settings: Any) -> tuple[Any, float]:
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
        weights, val_loss = _fit(make, ndim, size, accum, log_interval=1, **settings)
        torch.testing.assert_close(dict(weights), by_hand.state_dict(), rtol=1e-4, atol=1e-6)
        assert val_loss == pytest.approx(loss, rel=1e-5), (size, accum)


class Own(transformers.GPT2LMHeadModel):
    """Computes a loss of its own."""

    def forward(self, input_ids: Tensor, **batch: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids).logits.mean()


def _with_own_loss() -> nn.Module:
    model = MODELS["GPT2LMHeadModel"][0]()
    model.loss_function = lambda logits, **_: logits.mean()
    return model


CTC = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
       "conv_dim": [8], "conv_kernel": [4], "conv_stride": [4], "num_feat_extract_layers": 1,
       "num_conv_pos_embedding_groups": 1, "num_conv_pos_embeddings": 4}  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(2, 2),
        lambda: Own(transformers.GPT2Config(**GPT)),
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
