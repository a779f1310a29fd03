"""Text as data: documents, files of token ids, mixtures of sources, and `GPT` and `lora` for models of text.

A sample is a pure function of the data, the seed and its position: `Text`, `TokenFiles` and `Mixture` can be read from
any position at once, so a resume takes the same time at any step. What was tokenized or packed is a cache that is made
again if it is missing.

`PackedRows` and `MixedDataset` tell where a sample comes from; `SCALING` is the buffer by which an export finds the
layers that `lora` has adapted. Begin with `text.py` for texts, with `tokens.py` for files of token ids.
"""

from __future__ import annotations

from trainer_cli.lazy import add_lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_cli.addons.text.lora import SCALING as SCALING
    from trainer_cli.addons.text.mixture import MixedDataset as MixedDataset
    from trainer_cli.addons.text.text import PackedRows as PackedRows

    __all__: list[str]
else:
    add_lazy_names(
        globals(),
        {
            "lora": "SCALING",
            "mixture": "MixedDataset",
            "text": "PackedRows",
        },
    )
