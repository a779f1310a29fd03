"""`train check resume` passes on what the documentation shows: a GAN, a GPT-2 of transformers, a LoRA fine-tune of it,
and a network with frozen norms."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from exact_project import WarmProbes

from trainer_cli.addons.exact import resume
from trainer_cli.commands.command_line import main

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"`([\w/.]+)`:\n\n^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FROZEN = 'freeze=["features.0.*","features.1.*"]'
GPT2 = "transformers.models.gpt2.modeling_gpt2"


@pytest.mark.parametrize(
    ("page", "overrides", "imports"),
    [
        ("training-step", ("+experiment=gan",), ()),
        # The row of its adapters trains it as well.
        pytest.param("huggingface", ("+experiment=gpt2",), (GPT2,), marks=pytest.mark.campaign),
        pytest.param("huggingface", ("+experiment=gpt2_lora",), (GPT2, "peft"), marks=pytest.mark.addon("text")),
        ("freezing", ("+experiment=digits", FROZEN, "data.batch_size=8", "loop.limit_train_batches=5"), ()),
    ],
    ids=["gan", "gpt2", "lora", "frozen norms"],
)
def test_the_check_passes_on_what_the_documentation_shows(
    page: str,
    overrides: tuple[str, ...],
    imports: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for file, text in BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8")):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resume, "Probes", partial(WarmProbes, imports=imports))
    assert main(["check", "resume", *overrides, "--steps", "6", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exact"]
    assert len(report["rows"]) == 5
    assert all(row["exact"] for row in report["rows"])
