"""Evaluations of a language model: texts that it continues, and tasks of the Language Model Evaluation Harness.

The harness needs the extra `eval-harness`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from trainer_cli.callbacks import ValidationCallback
from trainer_cli.errors import UserError
from trainer_cli.loggers import import_extra
from trainer_cli.state import unwrap
from trainer_cli.values import check_at_least

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer

log = logging.getLogger(__name__)


class Codec(Protocol):
    """Text to tokens and back, as tokenizers of `transformers` do it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class ByteCodec:
    """Each byte of UTF-8 is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token % 256 for token in tokens).decode(errors="replace")


class TextSamples(ValidationCallback):
    """Logs how the model continues each prompt, as the texts `samples/0`, `samples/1` and so on.

    The model has `logits(tokens)`, as the GPT of this package, or is one of `transformers`. Samples depend on the
    weights, the step and the seed alone.

    Args:
        prompts: beginnings of texts, of at least one token.
        length: tokens to add to each.
        temperature: of the softmax that is drawn from; 0: always the most likely token.
        tokenizer: with `encode` and `decode`; None: that of a validation dataset which has these, else bytes.
        seed: of the draws.
        every: evaluations from one sample to the next.
    """

    measures_only = True
    scope = "samples"

    def __init__(
        self,
        prompts: Sequence[str] = ("\n",),
        length: int = 100,
        temperature: float = 0.8,
        tokenizer: Any = None,
        seed: int = 0,
        every: int = 1,
    ) -> None:
        super().__init__(every)
        check_at_least("length", length, 1)
        check_at_least("temperature", temperature, 0)
        self.prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        self.length, self.temperature, self.tokenizer, self.seed = length, temperature, tokenizer, seed

    def evaluate(self, trainer: Trainer) -> None:
        """Continue each prompt, and log the text."""
        codec, model = self.tokenizer or codec_of(self.val_loaders.values()), unwrap(trainer.model)
        # A generator of its own: the draws of the training must not depend on samples.
        generator = torch.Generator().manual_seed(self.seed + trainer.progress.step)
        for index, prompt in enumerate(self.prompts):
            tokens = list(codec.encode(prompt))
            if not tokens:
                raise UserError(f"the prompt {prompt!r} has no token", where="prompts")
            for _ in range(self.length):
                tokens.append(self._draw_next(model, tokens, trainer.device, generator))
            text = codec.decode(tokens)
            trainer.log_text(str(index), text)
            if not trainer.sanity_checking:
                log.info("sample %d at step %d: %s", index, trainer.progress.step, text)

    def _draw_next(self, model: nn.Module, tokens: list[int], device: torch.device, generator: torch.Generator) -> int:
        """The token that follows these: the most likely one, or one that is drawn."""
        scores = next_scores(model, torch.tensor([tokens[-context_of(model) :]], device=device))[0, -1].float().cpu()
        if self.temperature == 0:
            return int(scores.argmax())
        return int(torch.multinomial((scores / self.temperature).softmax(-1), 1, generator=generator))


def next_scores(model: nn.Module, tokens: Tensor) -> Tensor:
    """Scores (N, T, vocabulary) of the tokens that follow (N, T) tokens."""
    if callable(logits := getattr(model, "logits", None)):
        scores: Tensor = logits(tokens)
        return scores
    outputs = model(input_ids=tokens)
    if not isinstance(output_scores := getattr(outputs, "logits", None), Tensor):
        raise UserError(
            f"{type(model).__name__} gives no scores of next tokens",
            cure="Give it a method logits(tokens), or use a model of transformers.",
        )
    return output_scores


def context_of(model: nn.Module) -> int:
    """How many tokens a model takes at most."""
    config = getattr(model, "config", None)
    return int(getattr(model, "context", None) or getattr(config, "max_position_embeddings", None) or 1024)


def codec_of(loaders: Iterable[Any]) -> Codec:
    """The first dataset of these loaders that encodes and decodes text; bytes without one."""
    for loader in loaders:
        dataset: Any = getattr(getattr(loader, "source", None), "dataset", None)
        if hasattr(dataset, "encode") and hasattr(dataset, "decode"):
            codec: Codec = dataset
            return codec
    return ByteCodec()


_NEW_TOKENS = 64


class EvalHarness(ValidationCallback):
    """Logs `harness/TASK/METRIC` for tasks of `lm_eval`. The model and its tokens are as for `TextSamples`.

    Args:
        tasks: names of tasks.
        limit: documents of each task; None: all.
        include_path: a folder with your own tasks, as YAML.
        tokenizer: with `encode` and `decode`; None: that of a validation dataset which has these, else bytes.
        every: evaluations from one call to the next.
    """

    measures_only = True
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
        """Fail at once if the extra is not installed."""
        import_extra("lm_eval", "eval-harness")

    def evaluate(self, trainer: Trainer) -> dict[str, float]:
        """Run the tasks. Returns `TASK/METRIC` -> value, without the standard errors."""
        harness, tasks = import_extra("lm_eval", "eval-harness"), import_extra("lm_eval.tasks", "eval-harness")
        codec = self.tokenizer or codec_of(self.val_loaders.values())
        results = harness.simple_evaluate(
            model=harness_model(unwrap(trainer.model), codec, trainer.device),
            tasks=self.tasks,
            limit=self.limit,
            task_manager=tasks.TaskManager(include_path=self.include_path),
            # Errors of the means are not logged.
            bootstrap_iters=0,
        )
        values: dict[str, float] = {}
        for task, metrics in results["results"].items():
            for key, value in metrics.items():
                # A key is `METRIC,FILTER`; others, such as the alias of a task, are no metrics.
                metric, comma, _ = key.partition(",")
                if comma and isinstance(value, int | float) and not metric.endswith("_stderr"):
                    values[f"{task}/{metric}"] = float(value)
        return values


def harness_model(model: nn.Module, codec: Codec, device: torch.device) -> Any:
    """The model as `lm_eval` calls it; one text at a time, cut to the model's context from the left."""
    base: Any = import_extra("lm_eval.api.model", "eval-harness").LM

    class HarnessModel(base):  # type: ignore[misc]
        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return [self._continuation(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return [self._continuation("\n", request.args[0])[0] for request in requests]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return [self._generated(*request.args) for request in requests]

        def _continuation(self, context: str, continuation: str) -> tuple[float, bool]:
            """The log probability of a continuation, and whether each of its tokens is the most likely one."""
            context_tokens, longest = codec.encode(context or "\n"), context_of(model)
            tokens = [*context_tokens, *codec.encode(continuation)]
            total, is_likeliest = 0.0, True
            # Half a context at a time, so that each token is scored with at least half a context before it.
            half = longest // 2 or 1
            for begin in range(len(context_tokens), len(tokens), half):
                end = min(begin + half, len(tokens))
                # The scores of tokens[begin:end] are those after each token before them.
                window_begin = max(0, end - 1 - longest)
                scores = _log_probabilities(tokens[window_begin : end - 1])[begin - 1 - window_begin :]
                targets = torch.tensor(tokens[begin:end])
                total += float(scores.gather(1, targets[:, None]).sum())
                is_likeliest = is_likeliest and bool((scores.argmax(1) == targets).all())
            return total, is_likeliest

        def _generated(self, context: str, settings: dict[str, Any]) -> str:
            """The most likely continuation, up to the first of the texts `until`."""
            tokens, text = list(codec.encode(context or "\n")), ""
            ends = settings.get("until") or []
            begin = len(tokens)
            for _ in range(int(settings.get("max_gen_toks", _NEW_TOKENS))):
                tokens.append(int(_log_probabilities(tokens[-context_of(model) :])[-1].argmax()))
                # All of them anew: a character may have many tokens.
                text = codec.decode(tokens[begin:])
                if matches := [end for end in ends if end and end in text]:
                    return text[: min(text.index(end) for end in matches)]
            return text

    def _log_probabilities(tokens: list[int]) -> Tensor:
        """Log probabilities (T, vocabulary) of the token after each of T tokens."""
        return next_scores(model, torch.tensor([tokens], device=device))[0].float().log_softmax(-1).cpu()

    return HarnessModel()
