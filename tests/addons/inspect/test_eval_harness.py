"""The evaluation harness on a task of two documents, without a network; where the extra is installed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import ListLogger, loader, trainer
from torch import nn

from trainer_cli.addons.inspect import samples as eval_harness
from trainer_cli.addons.inspect.samples import ByteCodec, EvalHarness, harness_model
from trainer_cli.errors import UserError

TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: DOCUMENTS}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc}]
"""


class Successor(nn.Module):
    """Each byte is followed by the next one, by far the most likely."""

    context = 6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= self.context
        return nn.functional.one_hot((tokens + 1) % 256, 256) * 8.0

    def forward(self, batch: Any) -> Any:
        return self.weight.sum()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(eval_harness, "import_extra", lambda module, extra: SimpleNamespace(LM=object))
    return harness_model(Successor(), ByteCodec(), torch.device("cpu"))


def _asked(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=arguments)]


def test_texts_longer_than_the_context_are_scored_whole(model: Any) -> None:
    likely = 8.0 - math.log(math.exp(8.0) + 255)
    ((total, likeliest),) = model.loglikelihood(_asked("ab", "cdefghijklm"))
    assert total == pytest.approx(11 * likely, abs=1e-4)
    assert likeliest
    ((total, likeliest),) = model.loglikelihood(_asked("ab", "cd!f"))
    assert total == pytest.approx(2 * likely + 2 * (likely - 8), abs=1e-4)
    assert not likeliest
    (rolled,) = model.loglikelihood_rolling(_asked("abcdefghij"))
    assert rolled == pytest.approx(9 * likely + (likely - 8), abs=1e-4)


def test_a_text_is_generated_up_to_its_end(model: Any) -> None:
    assert model.generate_until(_asked("ab", {"until": ["g"], "max_gen_toks": 9})) == ["cdef"]
    assert model.generate_until(_asked("ab", {"max_gen_toks": 3})) == ["cde"]


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(UserError, match=r'needs the package lm_eval.*"trainer-cli\[eval-harness\]"'):
        trainer(Successor, callbacks=[EvalHarness(["tiny"])])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_task_from_a_file_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'trainer-cli[eval-harness]'")
    documents = tmp_path / "documents.jsonl"
    rows = [
        {"question": "ab", "choices": ["c", "x"], "label": 0},
        {"question": "ab", "choices": ["c", "x"], "label": 1},
        {"question": "st", "choices": ["x", "uv"], "label": 1},
        {"question": "st", "choices": ["vw", "uv"], "label": 1},
    ]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/tiny.yaml").write_text(TASK.replace("DOCUMENTS", str(documents)))
    logger = ListLogger()
    harness = EvalHarness(["tiny"], include_path=str(tmp_path / "tasks"))
    trainer(Successor, callbacks=[harness], loggers=[logger], settings={"max_duration": 1}).fit(loader(), loader(4))
    assert logger.records[-1].metrics["harness/tiny/acc"] == 0.75
