"""A request of any rank is one of all, handled after the same step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer_cli.policy.stopping import Stop
from trainer_cli.trainer.requests import Requests

FINISH, OTHER_FINISH = Stop("enough", True, None, ()), Stop("also enough", True, None, ())
SIGTERM, SIGUSR1 = Stop("SIGTERM", False, None, ()), Stop("SIGUSR1", False, None, ())


class Ranks:
    """The group of one rank; the numbers of the other are known."""

    def __init__(self, rank: int, other: Any = 0, stops: Any = (FINISH,)) -> None:
        self.is_main, self.other, self.stops = rank == 0, other, stops
        self.sent: Any = None

    def sum(self, numbers: Any) -> Any:
        self.sent = numbers
        return numbers + self.other

    def gather(self, value: Any) -> list[Any]:
        return [value, self.stops]


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
    first.share(0.0)
    assert not group.sent.any()


@pytest.mark.parametrize("rank", [None, 0, 1], ids=["alone", "both of rank 0", "one of each rank"])
@pytest.mark.parametrize(
    ("stops", "open_now", "held", "released"),
    [
        ([FINISH, SIGTERM], FINISH, SIGTERM, FINISH),
        ([SIGTERM, FINISH], FINISH, SIGTERM, FINISH),
        ([FINISH, OTHER_FINISH], FINISH, None, FINISH),
        ([SIGTERM, SIGUSR1], SIGTERM, SIGTERM, SIGTERM),
    ],
    ids=lambda value: "+".join(stop.reason for stop in value) if isinstance(value, list) else None,
)
def test_a_request_to_finish_and_a_signal_of_one_step_both_count_in_any_order(
    stops: list[Stop], open_now: Stop, held: Stop | None, released: Stop, rank: int | None
) -> None:
    def make(*, may_hold: bool) -> Requests:
        group = Ranks(0, stops=stops[1:] if rank == 1 else ())
        agreement: Any = None if rank is None else SimpleNamespace(request=lambda: None)
        requests = Requests(group, agreement, None, may_hold=may_hold)  # type: ignore[arg-type]
        for stop in stops[:1] if rank == 1 else stops:
            requests.stop(stop)
        requests.share(0.0)
        return requests

    assert make(may_hold=False).stop_request == open_now, "the run is over, as without the signal"
    requests = make(may_hold=True)
    requests.hold_stop(holds=True)
    assert requests.stop_request == held, "before the least duration the signal alone ends the process"
    requests.hold_stop(holds=False)
    assert (requests.stop_request, requests.held_stop) == (released, None)
