"""Tasks of the Language Model Evaluation Harness, after evaluations. Needs the extra `eval-harness`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_cli.callbacks.text_samples import Codec, codec_of, context_of, next_scores
from trainer_cli.callbacks.validation_callback import ValidationCallback
from trainer_cli.checkpoint.model_state import unwrapped
from trainer_cli.loggers.own_run import imported

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

_NEW_TOKENS = 64


class EvalHarness(ValidationCallback):
    """Logs `harness/TASK/METRIC` for tasks of `lm_eval`. The model and its tokens are as for `TextSamples`.

    Args:
        tasks: names of tasks.
        limit: documents of each task; None: all.
        include_path: a folder with tasks of one's own, as YAML.
        tokenizer: with `encode` and `decode`; None: that of a validation dataset which has these, else bytes.
        every: evaluations from one call to the next.
    """

    scope = "harness"

    def __init__(
        self,
        tasks: Sequence[str],
        limit: int | None = None,
        include_path: str | None = None,
        tokenizer: Any = None,
        every: int = 1,
    ) -> None:
        super().__init__(every)
        self.tasks, self.limit, self.include_path, self.tokenizer = list(tasks), limit, include_path, tokenizer

    def setup(self, trainer: Trainer) -> None:
        imported("lm_eval", "eval-harness")

    def evaluate(self, trainer: Trainer) -> dict[str, float]:
        harness, tasks = imported("lm_eval", "eval-harness"), imported("lm_eval.tasks", "eval-harness")
        codec = self.tokenizer or codec_of(self.val_loaders.values())
        found = harness.simple_evaluate(
            model=harness_model(unwrapped(trainer.model), codec, trainer.device),
            tasks=self.tasks,
            limit=self.limit,
            task_manager=tasks.TaskManager(include_path=self.include_path),
            bootstrap_iters=0,
        )
        return {
            f"{task}/{key.partition(',')[0]}": float(value)
            for task, metrics in found["results"].items()
            for key, value in metrics.items()
            if isinstance(value, int | float) and not key.partition(",")[0].endswith("_stderr") and "," in key
        }


def harness_model(model: nn.Module, codec: Codec, device: torch.device) -> Any:
    """The model as `lm_eval` calls it; one text at a time, cut to the model's context from the left."""
    base: Any = imported("lm_eval.api.model", "eval-harness").LM

    class HarnessModel(base):  # type: ignore[misc]
        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return [self._continuation(*one.args) for one in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return [self._continuation("\n", one.args[0])[0] for one in requests]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return [self._generated(*one.args) for one in requests]

        def _continuation(self, context: str, continuation: str) -> tuple[float, bool]:
            before, after = codec.encode(context or "\n"), codec.encode(continuation)
            total, likeliest, most = 0.0, True, context_of(model)
            tokens = [*before, *after]
            for place in range(len(before), len(tokens), most // 2 or 1):
                stop = min(place + (most // 2 or 1), len(tokens))
                start = max(0, stop - 1 - most)
                scores = _log_probabilities(tokens[start : stop - 1])[place - 1 - start :]
                targets = torch.tensor(tokens[place:stop])
                total += float(scores.gather(1, targets[:, None]).sum())
                likeliest = likeliest and bool((scores.argmax(1) == targets).all())
            return total, likeliest

        def _generated(self, context: str, settings: dict[str, Any]) -> str:
            tokens, text = list(codec.encode(context or "\n")), ""
            ends = settings.get("until") or []
            begin = len(tokens)
            for _ in range(int(settings.get("max_gen_toks", _NEW_TOKENS))):
                tokens.append(int(_log_probabilities(tokens[-context_of(model) :])[-1].argmax()))
                text = codec.decode(tokens[begin:])
                if found := [one for one in ends if one and one in text]:
                    return text[: min(text.index(one) for one in found)]
            return text

    def _log_probabilities(tokens: list[int]) -> Tensor:
        return next_scores(model, torch.tensor([tokens], device=device))[0].float().log_softmax(-1).cpu()

    return HarnessModel()
