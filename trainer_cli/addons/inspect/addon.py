"""What the add-on `inspect` brings."""

from __future__ import annotations

import os

from trainer_cli.addon import AddOn

ADDON = AddOn(
    configs=os.path.join(os.path.dirname(__file__), "configs"),
    components=("trainer_cli.addons.inspect",),
    names={
        "trainer_cli.addons.inspect.metrics": "ConfusionMatrix Metrics",
        "trainer_cli.addons.inspect.profiling": "DurationProfiler MemoryMonitor Throughput TorchProfiler",
        "trainer_cli.addons.inspect.samples": "EvalHarness TextSamples",
        "trainer_cli.addons.inspect.tensors": "ActivationStatistics DumpActivations Norms TensorListener",
    },
)
