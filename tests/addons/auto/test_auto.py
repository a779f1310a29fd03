"""Values that are `auto`: how they are written, what contradicts them, and what is tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_cli.addons.auto.decisions import batch_sizes
from trainer_cli.auto_values import auto_keys
from trainer_cli.config.composing import compose
from trainer_cli.config.contradictions import check_processes
from trainer_cli.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("data", "samples", "ranks", "sizes"),
    [
        ({"batch_size": "auto"}, 20, 1, [2, 4, 8, 16]),
        ({"batch_size": "auto"}, 20, 2, [2, 4, 8]),
        ({"batch_size": "auto"}, 10**9, 1, [2**power for power in range(1, 14)]),
        ({"batch_size": "auto:100"}, 10**9, 1, [2, 4, 8, 16, 32, 64]),
        ({"batch_size": "auto:1"}, 20, 1, [1]),
        ({"batch_size": "auto"}, 1, 2, [1]),
        ({"batch_size": "auto", "global_batch_size": 90}, 200, 1, [2, 5, 10, 30, 90]),
        ({"batch_size": "auto", "global_batch_size": 90}, 20, 1, [2, 5, 10]),
        ({"batch_size": "auto:10", "global_batch_size": 90}, 200, 2, [3, 9]),
    ],
)
def test_the_sizes_that_are_tried_double_or_divide_the_global_batch(
    data: dict[str, Any], samples: int, ranks: int, sizes: list[int]
) -> None:
    assert batch_sizes(data, samples, ranks) == sizes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.batch_size=auto", "loop.microbatch=4"], "data.batch_size is auto, and loop.microbatch splits"),
        (["data.batch_size=auto", "parallel=fsdp"], "under fsdp the other ranks would wait"),
        (
            ["data.batch_size=auto", "data.global_batch_size=64", "loop.grad_accum_steps=2"],
            "data.global_batch_size and loop.grad_accum_steps decide it",
        ),
        (["data.batch_size=auto:0"], "'auto:0', but it must be a whole number of at least 1, or auto, or auto:LIMIT"),
        (["data.batch_size=automatic"], "or auto, or auto:LIMIT"),
        (["optimizer.lr=auto", "parallel=fsdp"], "optimizer.lr is auto, but one process makes the range test alone"),
        (
            ["optimizer.lr=auto", "+param_groups={*.bias: {lr: 0.1}}"],
            "the rate of param_groups.*.bias is a number, which does not follow it",
        ),
        (["optimizer.lr=auto", "ckpt=x", "load.states=[all]"], "takes more than the weights from the checkpoint"),
        (
            ["optimizer=null", "optimizer={a: {_target_: torch.optim.SGD, lr: auto}}"],
            "optimizer.a.lr is auto, which only a single optimizer may have",
        ),
        (["data.val_batch_size=auto"], "data.val_batch_size is 'auto', but it must be a whole number"),
    ],
)
def test_what_contradicts_auto_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=digits_mlp", *overrides], cwd=ROOT)
    assert message in str(caught.value)
    assert "command line" in str(caught.value)


def test_a_found_value_stands_in_the_config_and_in_what_refers_to_it() -> None:
    composed = compose(
        ["experiment=digits_mlp", "data.batch_size=auto", "+data.val_batch_size=${data.batch_size}"],
        cwd=ROOT,
    )
    assert auto_keys(composed.config) == ("data.batch_size",)
    filled = composed.with_values({"data.batch_size": 16})
    assert auto_keys(filled.config) == ()
    assert (filled.config.data["batch_size"], filled.config.data["val_batch_size"]) == (16, 16)
    assert filled.raw["data"]["batch_size"] == 16
    assert composed.raw["data"]["batch_size"] == "auto", "the other config is unchanged"


def test_a_global_batch_that_ranks_cannot_divide_is_refused_before_anything_is_tried() -> None:
    composed = compose(
        ["experiment=digits_mlp", "data.batch_size=auto", "data.global_batch_size=9", "parallel=ddp"], cwd=ROOT
    )
    check_processes(composed.config, 3)
    with pytest.raises(ConfigError, match="cannot be divided between 2 ranks"):
        check_processes(composed.config, 2)
