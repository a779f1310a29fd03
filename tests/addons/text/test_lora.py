"""LoRA: only adapters are trained, a resume is exact, and an export holds the model without them."""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer_cli.addons.formats.export import ExportFormat
from trainer_cli.addons.formats.export_run import export_one
from trainer_cli.addons.text.lora import lora
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.data.loader import Loader
from trainer_cli.errors import CheckpointError, ConfigError, UserError
from trainer_cli.loads.options import LoadOptions
from trainer_cli.trainer.trainer import Trainer
from trainer_cli.trainer.training_loop import TrainingLoop

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")


class Two(nn.Module):
    """A linear layer, one as transformers' GPT-2 has them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.first, self.second, self.head = nn.Linear(3, 4), cast("Any", Conv1D)(4, 4), nn.Linear(4, 1)

    def guess(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def forward(self, batch: Tensor) -> Any:
        return (self.guess(batch).squeeze(-1) - batch.sum(1)).square().mean()


def _model(**settings: Any) -> nn.Module:
    torch.manual_seed(7)
    base = Two()
    return lora(base, **{"targets": ["first", "second"], "r": 2, "alpha": 6, "train": ["head.*"], **settings})


def _fit(folder: Path, steps: int) -> Trainer:
    made = Trainer(
        model=_model, optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.05),
        loop=TrainingLoop(max_duration=6, hard_stop=steps, eval_interval=None, log_interval=None),
        checkpoint=CheckpointerCallback(folder, save_interval=3), seed=0, device="cpu",
    )  # fmt: skip
    made.fit(Loader(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), 4, shuffle=True, seed=0))
    return made


def test_adapters_and_chosen_parameters_are_trained_and_nothing_else(tmp_path: Path) -> None:
    first, trained = _model().state_dict(), _fit(tmp_path, 6).model.state_dict()
    moved = {name for name in first if not torch.equal(first[name], trained[name])}
    adapters = {f"{layer}.lora_{part}.default.weight" for layer in ("first", "second") for part in "AB"}
    assert moved == adapters | {"head.weight", "head.bias"}


def test_a_resumed_fine_tune_is_exact(tmp_path: Path) -> None:
    whole = _fit(tmp_path / "whole", 6)
    _fit(tmp_path / "parts", 3)
    resumed = _fit(tmp_path / "parts", 6)
    assert all(torch.equal(whole.model.state_dict()[name], value) for name, value in resumed.model.state_dict().items())


def test_a_merged_export_is_the_model_without_adapters(tmp_path: Path) -> None:
    made = _fit(tmp_path, 6)
    written = export_one(tmp_path / "step6", ExportFormat.safetensors, tmp_path / "merged.safetensors", merge_lora=True)
    plain = Two()
    plain.load_state_dict(load_file(written.path), strict=True)
    made.model.eval()
    x = torch.randn(5, 3)
    torch.testing.assert_close(plain.guess(x), cast("Two", made.model).guess(x))
    with pytest.raises(CheckpointError, match="no LoRA adapters"):
        export_one(written.path, ExportFormat.torch, tmp_path / "again.pt", merge_lora=True)


def _classifier() -> Any:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(7)
    sizes: dict[str, Any] = {"num_labels": 3, "vocab_size": 9, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2ForSequenceClassification(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=8))


def _by_us() -> nn.Module:
    return lora(_classifier(), targets=["*.c_attn"], r=2, train=["score.*"])


def _by_peft(**settings: Any) -> Any:
    import peft

    config = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "SEQ_CLS", **settings}
    return peft.get_peft_model(_classifier(), peft.LoraConfig(**config))


def _by_transformers() -> Any:
    import peft

    model = _classifier()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    return model


_PEFT = r"trainer_cli\.load_model\(CHECKPOINT\)\.save_pretrained\(FOLDER\)"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("make", "cure", "merged_cure"),
    [
        (_by_us, r"Add --merge-lora\.", None),
        (_by_peft, _PEFT, _PEFT),
        (partial(_by_peft, modules_to_save=["score"]), _PEFT, _PEFT),
        (partial(_by_peft, use_dora=True), _PEFT, _PEFT),
        (_by_transformers, _PEFT, _PEFT),
    ],
    ids=["ours", "peft", "modules to save", "dora", "add_adapter"],
)
def test_an_export_with_adapters_is_loaded_whole_by_transformers_or_refused(
    make: Any, cure: str, merged_cure: str | None, tmp_path: Path
) -> None:
    from transformers import GPT2ForSequenceClassification

    model = make().eval()
    checkpoint = tmp_path / "step0"
    Trainer(model=model, device="cpu").save_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match=cure):
        export_one(checkpoint, ExportFormat.huggingface, tmp_path / "plain")
    # Weights by name, for a model with the same adapters.
    export_one(checkpoint, ExportFormat.safetensors, tmp_path / "plain.safetensors")
    if merged_cure is not None:
        with pytest.raises(CheckpointError, match=merged_cure):
            export_one(checkpoint, ExportFormat.huggingface, tmp_path / "merged", merge_lora=True)
        return
    written = export_one(checkpoint, ExportFormat.huggingface, tmp_path / "merged", merge_lora=True)
    load: Any = GPT2ForSequenceClassification.from_pretrained
    loaded, report = load(written.path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.arange(6).reshape(2, 3)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_model_of_peft_in_a_run_is_saved_by_its_own_method_as_peft_loads_it(tmp_path: Path) -> None:
    import peft

    model = _by_peft(modules_to_save=["score"]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    Trainer(model=model, device="cpu").save_checkpoint(tmp_path / "step0")
    made = _by_peft(modules_to_save=["score"]).eval()
    Trainer(model=made, device="cpu").load_checkpoint(tmp_path / "step0", load=LoadOptions(states=["model"]))
    made.save_pretrained(tmp_path / "adapters")
    base = _classifier()
    base.load_state_dict(
        {
            name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", ""): value
            for name, value in state.items()
            if "lora_" not in name and "modules_to_save" not in name
        }
    )
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval()
    tokens = torch.arange(6).reshape(2, 3)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, model(tokens).logits)


def test_mistakes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no linear layer matches"):
        _model(targets=["attention.*"])
    with pytest.raises(ConfigError, match=r"no parameter matches 'tail\.\*'"):
        _model(train=["tail.*"])
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="needs the package peft"):
        _model()
