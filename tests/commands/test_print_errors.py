"""What is printed of an error that is not of this package."""

from __future__ import annotations

import traceback

import pytest
import torch

from trainer_cli.commands.print_errors import print_crash
from trainer_cli.data.loader import Loader


@pytest.mark.parametrize("of_worker", [False, True])
def test_a_batch_that_torch_cannot_make_is_printed_without_its_calls(
    of_worker: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError) as caught:
        next(Loader([torch.zeros(2), torch.zeros(3)], 2, shuffle=False, seed=0).iterate(1))
    error: Exception = caught.value
    trace = error.__traceback__
    assert trace is not None
    # Without the call of this file, which is not of train.
    error = error.with_traceback(trace.tb_next)
    if of_worker:
        calls = "".join(traceback.format_exception(error))
        error = RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\nOriginal {calls}")
        # The calls of the main process are those of torch.
        error = error.with_traceback(trace.tb_next)
    print_crash(error)
    err = capsys.readouterr().err
    assert "  File " not in err
    assert "error: RuntimeError: stack expects each tensor to be equal size" in err
    assert "\nwhile collating samples [0, 1] of epoch 1\nhelp: data.collate_fn=MODULE.FUNCTION" in err
    print_crash(error, whole=True)
    assert "collate_tensor_fn" in capsys.readouterr().err
