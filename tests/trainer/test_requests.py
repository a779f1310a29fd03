"""A request of any rank is one of all, handled after the same step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer_cli.core.stopping import Stop
from trainer_cli.trainer.requests import Requests


class Ranks:
    """The group of one rank; the numbers of the other are known."""

    def __init__(self, rank: int, other: Any = 0) -> None:
        self.is_main, self.other, self.sent = rank == 0, other, None

    def sum(self, numbers: Any) -> Any:
        self.sent = numbers
        return numbers + self.other

    def gather(self, value: Any) -> list[Any]:
        return [value, Stop("enough", True, None, ())]


REQUESTS = {
    "save": lambda requests: requests.save(),
    "evaluate": lambda requests: requests.evaluate(),
    "roll back": lambda requests: requests.roll_back(),
    "stop": lambda requests: requests.stop(Stop("enough", True, None, ())),
}


def seen(requests: Requests, saver: Any) -> dict[str, bool]:
    return {
        "save": saver.save_requested,
        "evaluate": requests.evaluation_requested,
        "roll back": requests.roll_back_requested,
        "stop": requests.stop_request is not None,
    }


@pytest.mark.parametrize("request_of_rank_1", REQUESTS)
def test_a_request_of_rank_1_reaches_rank_0_and_only_once(request_of_rank_1: str) -> None:
    asked: list[str] = []
    agreement: Any = SimpleNamespace(request=lambda: asked.append("interrupt"))
    savers = [SimpleNamespace(save_requested=False) for _ in range(2)]
    group = Ranks(1)
    first: Any = Requests(group, agreement, savers[1], may_hold=False)  # type: ignore[arg-type]
    REQUESTS[request_of_rank_1](first)
    assert asked == ["interrupt"]
    assert not any(seen(first, savers[1]).values()), "no rank acts before all know"
    first.share(0.0)
    main = Requests(Ranks(0, group.sent), agreement, savers[0], may_hold=False)  # type: ignore[arg-type]
    main.share(0.0)
    assert [name for name, value in seen(main, savers[0]).items() if value] == [request_of_rank_1]
    if request_of_rank_1 != "stop":
        first.share(0.0)
        assert not group.sent.any()
