"""The tokens of a training, which a step waits for only if a duration is in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer_cli.errors import UserError

if TYPE_CHECKING:
    from trainer_cli.parallel import Agreement
    from trainer_cli.steps import Progress


class TokenCount:
    """Adds the tokens of batches to the progress.

    Args:
        at_every_step: a duration is in tokens, so that the progress has their number after every step; else only
            after `finish`.
    """

    def __init__(self, progress: Progress, agreement: Agreement | None, *, at_every_step: bool) -> None:
        self._progress, self._agreement, self._at_every_step = progress, agreement, at_every_step
        self._pending: Tensor | int | None = None
        """Tokens of this rank that are not in the progress yet."""

    def add(self, outputs: Mapping[str, Any] | None) -> None:
        """Add the tokens of a batch.

        Raises:
            UserError: the outputs have none.
        """
        if not outputs or "tokens" not in outputs:
            raise UserError(
                "a duration is counted in tokens, but the model's outputs have no 'tokens'",
                cure="Return a mapping with 'tokens', or count in steps, samples or epochs.",
            )
        tokens = outputs["tokens"]
        is_alone = self._agreement is None
        if is_alone and (self._at_every_step or not isinstance(tokens, Tensor)):
            # For a tensor the host waits for the device: a duration in tokens needs the count at every step.
            self._progress.tokens += int(tokens)
        else:
            tokens = tokens.detach().long() if isinstance(tokens, Tensor) else tokens
            self._pending = tokens if self._pending is None else self._pending + tokens

    def end_step(self) -> None:
        """With several ranks: count the tokens of all in a step, if a duration is in tokens. Collective."""
        if self._agreement is not None and self._at_every_step:
            self._progress.tokens += self._agreement.total(int(self._pending or 0))
            self._pending = None

    def finish(self) -> None:
        """Count the tokens that were not needed at every step. Collective."""
        # With several ranks all must call `total`, also one without tokens.
        if self._pending is not None or (self._agreement is not None and not self._at_every_step):
            # Only here the host waits for the device.
            tokens = int(self._pending or 0)
            self._progress.tokens += tokens if self._agreement is None else self._agreement.total(tokens)
            self._progress.last_tokens = self._progress.tokens
