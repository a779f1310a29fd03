"""What the name of a metric tells: whether it is of the training, and which of its values is best."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from trainer_cli.errors import ConfigError
from trainer_cli.patterns import did_you_mean

TRAIN_PREFIX = "train/"
"""Prefix of the names of training metrics, which are means over the steps since the last log."""


class Mode(StrEnum):
    """Whether the smallest or the largest value of a metric is best; only settings may be `auto`, by its name."""

    auto = "auto"
    min = "min"
    max = "max"


MODES: Mapping[str, Mode] = {
    **dict.fromkeys(
        (
            "bce", "bits_per_byte", "bits_per_char", "bpb", "bpc", "bpd", "brier", "ce", "cer", "cross_entropy", "crps",
            "ece", "eer", "error", "error_rate", "fid", "hamming_loss", "kid", "kl", "kl_divergence", "log_loss",
            "loss", "lpips", "mae", "mape", "mean_absolute_error", "mean_squared_error", "mse", "msle", "nll",
            "nll_loss", "nrmse", "per", "perplexity", "ppl", "rmse", "rmsle", "root_mean_squared_error", "smape", "ter",
            "top1_error", "top5_error", "total_loss", "wer",
        ),
        Mode.min,
    ),
    **dict.fromkeys(
        (
            "acc", "acc1", "acc5", "accuracy", "ap", "auc", "auprc", "auroc", "average_precision", "balanced_accuracy",
            "bertscore", "bleu", "bleurt", "chrf", "cider", "clip_score", "dice", "em", "episode_return",
            "episode_reward", "exact_match", "f1", "f1_macro", "f1_micro", "f1_score", "f1_weighted", "hit_rate",
            "hits", "iou", "jaccard", "kappa", "macro_f1", "map", "map_50", "map_75", "matthews_corrcoef", "mcc",
            "mean_iou", "mean_reward", "meteor", "micro_f1", "miou", "mrr", "ndcg", "pass", "pass_rate", "pearson",
            "pesq", "pr_auc", "precision", "psnr", "r2", "r2_score", "recall", "reward", "roc_auc", "rouge", "rouge1",
            "rouge2", "rouge_l", "rougel", "rougelsum", "sacrebleu", "sensitivity", "si_sdr", "spearman", "specificity",
            "ssim", "stoi", "success_rate", "top1", "top1_accuracy", "top5", "top5_accuracy", "weighted_f1", "win_rate",
        ),
        Mode.max,
    ),
}  # fmt: skip
"""Whether the smallest or the largest value of a metric is best, by its name after the loader's and before `@`."""


# Metrics whose value over a whole set is not the mean of their values over batches.
_NO_MEANS = frozenset((
    "ap", "auc", "auprc", "auroc", "average_precision", "balanced_accuracy", "bleu", "cer", "chrf", "ece", "eer", "f1",
    "f1_macro", "f1_micro", "f1_score", "f1_weighted", "fid", "kappa", "kid", "macro_f1", "map", "map_50", "map_75",
    "matthews_corrcoef", "mcc", "mean_iou", "micro_f1", "miou", "nrmse", "pearson", "pr_auc",
    "precision", "r2", "r2_score", "recall", "rmse", "rmsle", "roc_auc", "root_mean_squared_error", "sacrebleu",
    "spearman", "weighted_f1", "wer",
))  # fmt: skip


def is_no_mean(metric: str) -> bool:
    """Whether the value of a metric of this name, such as val/r2, over a whole set is not its mean over batches."""
    return _last_part(metric) in _NO_MEANS


def find_usual_mode(metric: str) -> Mode | None:
    """The mode of a metric by its name, such as val/accuracy; None if it is unknown."""
    return MODES.get(_last_part(metric))


def _last_part(metric: str) -> str:
    """The name of a metric without its loader and what follows an `@`, in small letters."""
    return metric.rpartition("/")[2].partition("@")[0].lower()


def choose_mode(metric: str, mode: str, key: str) -> Mode:
    """The mode of a metric by the value `mode` of the setting `key`.

    Raises:
        ConfigError: it is no mode, or auto for a metric of unknown mode.
    """
    if mode == Mode.auto:
        if (usual_mode := find_usual_mode(metric)) is not None:
            return usual_mode
        raise ConfigError(
            f"the name of the metric {metric!r} does not tell whether its smallest or its largest value is best",
            location=key,
            # `++` also sets the mode of a component in the config that has none yet.
            hint=f"Set mode: min or mode: max there, on the command line ++{key}=min or ++{key}=max."
            f"{did_you_mean(metric.rpartition('/')[2], MODES)}",
        )
    if mode not in tuple(Mode):
        raise ConfigError(f"{key} is {mode!r}, but it must be auto, min or max", location=key)
    return Mode(mode)
