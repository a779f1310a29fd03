"""Which keys of a config may change on a resume, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainer_cli.patterns import matches
from trainer_cli.schema import SYSTEM

_SHARING = (
    "strategy", "find_unused_parameters", "shard_size", "tensor_size", "wrap", "wrap_min_parameters", "cpu_offload",
    "activation_checkpointing",
)  # fmt: skip
"""Keys of `parallel` that divide the work among processes and do not affect precision."""
MAY_CHANGE: Mapping[str, str] = {
    "name": "a label: it does not affect training",
    "run_dir": "where the run is kept",
    "notes": "a description: it does not affect training",
    "tags": "a description: it does not affect training",
    "report": "what is written after the end",
    "device": "where it trains",
    "parallel.processes_per_node": "where it trains",
    "parallel.timeout": "when the processes give up",
    **{f"parallel.{key}": "how processes share the work" for key in _SHARING},
    "model_call": "a model that takes a batch one way refuses the others",
    "resume": "how to start",
    "resume_allow": "how to start",
    "source": "which source is used, if the project was edited",
    "ckpt": "is used only while the run has no checkpoint",
    "load.chunk_size": "how checkpoints are downloaded",
    "load.progress": "how checkpoints are downloaded",
    "load.*": "is used only while the run has no checkpoint",
    "trust": "whose code may be built",
    "vars": "only the keys that refer to it matter",
    "vars.*": "only the keys that refer to it matter",
    "validate.*": "is used by `train validate` only",
    "predict.*": "is used by `train predict` only",
    "loop.max_duration": "where the run ends",
    "loop.hard_stop": "where the run ends",
    "loop.min_duration": "where the run ends",
    "loop.max_time": "when this process stops",
    "loop.eval_*": "evaluations do not affect training",
    "loop.log_interval": "what is recorded",
    "restarts.*": "what happens after a failure",
    "notify.*": "who is told",
    "sweep.*": "which runs a sweep makes",
    "logging.*": "what is printed",
    "loggers": "what is recorded",
    "loggers.*": "what is recorded",
    f"callbacks.{SYSTEM}": "what is recorded",
    f"callbacks.{SYSTEM}.*": "what is recorded",
    "checkpoint.*": "what is saved and kept, when and where",
    "data.num_workers": "samples do not depend on who loads them",
    "data.persistent_workers": "samples do not depend on who loads them",
    "data.worker_timeout": "samples do not depend on who loads them",
}
"""Config key, or the beginning of keys with a `*`, -> why they may change."""
SOURCE = "source"
"""The key of the source that commands take, and the entry of `resume_allow` and of `trust` for source."""


def why_may_change(key: str, allowed: Iterable[str] = ()) -> str | None:
    """Why a key may change on a resume, or None. `allowed` are further globs; a section includes all keys below it."""
    for pattern, reason in MAY_CHANGE.items():
        # They are asked for every key at the start of a run: a regular expression for each takes 20 ms.
        if key == pattern or (pattern.endswith("*") and key.startswith(pattern[:-1])):
            return reason
    return "resume_allow" if matches_any(key, allowed) else None


def matches_any(key: str, allowed: Iterable[str]) -> bool:
    """Whether one of these globs matches a key or a section above it."""
    return any(key == pattern or key.startswith(f"{pattern}.") or matches(key, pattern) for pattern in allowed)
