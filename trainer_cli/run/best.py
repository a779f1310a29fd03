"""Which checkpoint, run or value is best: by `checkpoint.keep_best` of the run, else by its validation loss.

Every mark and rank of the commands follows `best_rule`: `RUN@best`, `train ckpt ls`, the tables of `train validate` and
of sweeps, and the report. Of equal values the newer is best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainer_cli.checkpoint.policy import BestRule
from trainer_cli.config.schema import Mode

MODES: Mapping[str, Mode] = {
    **dict.fromkeys(
        (
            "bce", "bits_per_byte", "bits_per_char", "bpb", "bpc", "bpd", "brier", "ce", "cer", "cross_entropy", "ece",
            "eer", "error", "error_rate", "fid", "kl", "kl_divergence", "log_loss", "loss", "lpips", "mae", "mape",
            "mse", "nll", "nrmse", "per", "perplexity", "ppl", "rmse", "smape", "ter", "wer",
        ),
        Mode.min,
    ),
    **dict.fromkeys(
        (
            "acc", "accuracy", "ap", "auc", "auprc", "auroc", "balanced_accuracy", "bleu", "bleurt", "chrf", "dice",
            "exact_match", "f1", "f1_score", "hit_rate", "iou", "kappa", "map", "mcc", "miou", "mrr", "ndcg",
            "pass_rate", "pearson", "precision", "psnr", "r2", "recall", "rouge", "rouge_l", "spearman", "ssim",
            "success_rate", "top1", "top1_accuracy", "top5", "top5_accuracy", "win_rate",
        ),
        Mode.max,
    ),
}  # fmt: skip
"""Whether the smallest or the largest value of a metric is its best, by the whole name after the loader's. Of a metric
that is not listed, `checkpoint.keep_best` gives the mode."""


def mode_of(metric: str, best_metric: str | None, best_mode: str | None) -> Mode | None:
    """Whether the smallest or the largest value of a metric is best; None if that is unknown.

    Args:
        metric: whole name, such as val/accuracy.
        best_metric, best_mode: `checkpoint.keep_best.metric` and its mode, which decide over the usual mode.
    """
    if metric == best_metric:
        return Mode.max if best_mode == Mode.max else Mode.min
    return MODES.get(metric.rpartition("/")[2].lower())


def best_rule(keep_best: Mapping[str, Any] | None, metrics: Iterable[str]) -> BestRule | None:
    """The rule by which the best of a run is chosen; None if it has neither a rule nor a validation loss.

    Args:
        keep_best: the section `checkpoint.keep_best` of the run's config.
        metrics: names of the metrics that there are. If the section's is not among them, the loss decides.
    """
    names = set(metrics)
    metric = (keep_best or {}).get("metric")
    if isinstance(metric, str) and metric in names:
        return BestRule(metric, mode_of(metric, metric, (keep_best or {}).get("mode")) or Mode.min)
    losses = [name for name in names if name.endswith("/loss") and not name.startswith("train/")]
    return BestRule(min(losses)) if losses else None


def keep_best_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section `checkpoint.keep_best` of a run's config as written."""
    section = config.get("checkpoint")
    best = section.get("keep_best") if isinstance(section, Mapping) else None
    return best if isinstance(best, Mapping) else None


def shared_keep_best(sections: Iterable[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """The section that several runs have; None where they differ."""
    different = list(sections)
    return different[0] if different and all(section == different[0] for section in different) else None


def describe(rule: BestRule) -> str:
    """The rule as a note below a table."""
    return f"{'largest' if rule.mode is Mode.max else 'smallest'} {rule.metric}, of equal ones the newest"
