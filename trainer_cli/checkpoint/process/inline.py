"""Work done here and now."""

from __future__ import annotations

from trainer_cli.checkpoint.process.port import Work


class Inline:
    """Everything is done before `submit` returns."""

    @property
    def carrier(self) -> None:
        """None: it is all done here."""

    def submit(self, work: Work) -> None:
        work()

    def settle(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self) -> None:
        """Nothing is held."""
