"""Whether the smallest or the largest value of a metric is the best one."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_cli.core.checkpoint_config import Mode

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
"""Whether the smallest or the largest value of a metric is best, by its name after the loader's. The mode of a metric
that is not listed comes from `checkpoint.keep_best`."""


def mode_of(metric: str, best_metric: str | None, best_mode: str | None) -> Mode | None:
    """Whether the smallest or the largest value of a metric is best; None if that is unknown.

    Args:
        metric: whole name, such as val/accuracy.
        best_metric, best_mode: `checkpoint.keep_best.metric` and its mode, which decide over the usual mode.
    """
    if metric == best_metric:
        return Mode.max if best_mode == Mode.max else Mode.min
    return MODES.get(metric.rpartition("/")[2].lower())
