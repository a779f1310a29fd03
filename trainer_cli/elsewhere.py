"""What other trainers call the settings of this one: one table, for the command line, config files and Python.

The words are those of Lightning, Hugging Face, accelerate, Keras, ultralytics, torchrun, and of common Hydra templates.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

OWN_METRIC = " The metric may also be one of your own, such as val/accuracy."

_ELSEWHERE = {
    # Length and intervals
    "Leave it out, and give the length in the other unit, as in loop.max_duration=10ep.": "max_steps=-1 max_epochs=-1",
    "loop.max_duration={}ep": "max_epochs num_epochs epochs num_train_epochs n_epochs max_epoch total_epochs",
    "loop.max_duration={}": (
        "max_steps max_step total_steps max_iters max_iter num_steps steps iterations num_iterations num_train_steps "
        "max_train_steps train_steps"
    ),
    "loop.min_duration={}ep": "min_epochs",
    "loop.min_duration={}": "min_steps",
    "loop.grad_accum_steps={}": (
        "accumulate_grad_batches gradient_accumulation_steps grad_accum accumulation_steps accum_steps accumulate "
        "gradient_accumulation"
    ),
    "loop.eval_interval={}ep": "val_check_interval=0.* val_check_interval=1.0 check_val_every_n_epoch validation_freq",
    "loop.eval_interval={}": "val_check_interval eval_every val_interval val_every eval_freq",
    "loop.eval_interval=1ep": "eval_strategy=epoch evaluation_strategy=epoch",
    "loop.eval_interval=null": "eval_strategy=no evaluation_strategy=no",
    "Steps are the unit of loop.eval_interval: give the number as in loop.eval_interval=500, and leave this out.": (
        "eval_strategy=steps evaluation_strategy=steps"
    ),
    "loop.eval_interval={} evaluates after so many steps, loop.eval_steps={} on so many batches.": "eval_steps",
    "loop.eval_steps={}": "limit_val_batches limit_test_batches limit_predict_batches eval_iters validation_steps",
    "loop.eval_sanity_steps={}": "num_sanity_val_steps",
    "loop.eval_at_start={}": "eval_on_start val_before_train",
    "loop.log_interval=1ep": "logging_strategy=epoch",
    "loop.log_interval={}": "log_every_n_steps logging_steps log_every log_freq log_steps print_freq",
    "loop.limit_train_batches={}": "max_train_batches limit_train_batches",
    "debug=fast": "fast_dev_run dry_run smoke_test debug=true debug=1",
    "data.overfit_batches={}": "overfit_batches",
    "`train fit` trains, `train validate` evaluates, and `train predict` predicts: leave it out.": (
        "do_train do_eval do_predict mode=train mode=val mode=eval mode=test mode=predict"
    ),
    # Checkpoints and resuming
    "checkpoint.save_interval=1ep": "save_strategy=epoch",
    "checkpoint.save_interval={}ep": "every_n_epochs save_period save_every_n_epochs",
    "checkpoint.save_interval={}": (
        "save_steps save_every every_n_train_steps checkpoint_interval checkpointing_steps ckpt_interval save_freq "
        "train_time_interval"
    ),
    "checkpoint.enabled=false": "enable_checkpointing=false save_strategy=no checkpoint=false checkpoint=none",
    "checkpoint.max_checkpoints={}": "save_total_limit total_limit keep_last max_to_keep keep_last_n",
    "checkpoint.keep_best.metric=val/loss checkpoint.keep_best.count={} checkpoint.max_checkpoints=1": "save_top_k",
    "checkpoint.keep_best.metric=val/loss checkpoint.max_checkpoints=1": "save_best_only=true",
    "checkpoint.keep_best.metric=val/loss": (
        "save_best=true save_best_model=true save_strategy=best callbacks=model_checkpoint callbacks=modelcheckpoint"
    ),
    "Leave it out and add checkpoint.keep_best.metric=val/loss: the run keeps its last weights, and RUN@best names the "
    f"best, as in `train validate ckpt=RUN@best`.{OWN_METRIC}": (
        "load_best_model_at_end=true restore_best_weights=true restore_best=true"
    ),
    "checkpoint.keep_best.metric=val/loss | checkpoint.keep_best.metric=train/loss": (
        "monitor=loss metric_for_best_model=loss best_metric=loss"
    ),
    "checkpoint.keep_best.metric={}": ("monitor=*/* metric_for_best_model=*/* best_metric=*/*"),
    "checkpoint.keep_best.metric=val/{}": "monitor metric_for_best_model best_metric",
    "checkpoint.keep_best.mode={}": "mode=min mode=max",
    "checkpoint.keep_best.mode=max": "greater_is_better=true",
    "checkpoint.keep_best.mode=min": "greater_is_better=false",
    "The newest checkpoint is always kept: leave it out.": "save_last",
    "checkpoint.leave_out=[*]": "save_weights_only=true save_only_model=true",
    "checkpoint.folder={}": "dirpath checkpoint_dir ckpt_dir checkpoints_dir",
    "The same command resumes where the run stopped: leave it out.": (
        "resume=true resume=last resume=latest resume=yes resume=1 resume_from_checkpoint=true auto_resume autoresume "
        "resume_from_checkpoint=last resume_from_checkpoint=latest ckpt_path=last resume_training=true"
    ),
    "resume=never | resume=anew": "resume=false resume=no resume=0 resume=none",
    "resume={}": "resume_from_checkpoint resume_from resume_path resume_ckpt",
    "resume={} continues a run from that checkpoint, ckpt={} begins one with its weights or evaluates it.": (
        "ckpt_path checkpoint_path load_checkpoint checkpoint=*/*"
    ),
    "ckpt=FILE": "pretrained=true",
    "ckpt={}": "pretrained weights init_from load_from finetune_from pretrained_path",
    "`model=NAME` chooses an architecture, a file of configs/model, and `ckpt={}` loads weights into it.": (
        "model=*.pt model=*.pth model=*.ckpt model=*.safetensors"
    ),
    "resume=anew": (
        "resume=new resume=fresh resume=restart resume=scratch resume=overwrite "
        "overwrite overwrite_output_dir exist_ok force force_restart from_scratch"
    ),
    # Data
    "-1 is no batch size: data.batch_size=32 sets one, data.batch_size=auto finds the largest that fits into memory, "
    "and loop.microbatch=auto halves what is computed at once when memory runs out.": (
        "batch=-1 batch_size=-1 bs=-1 per_device_train_batch_size=-1"
    ),
    "The data says what is held back: its `val` is the dataset for validation, as torch.utils.data.random_split makes "
    "one from a part; `train docs data` shows it. Leave it out.": (
        "validation_split val_split test_size val_size valid_size split_ratio val_fraction validation_fraction"
    ),
    "The model's forward returns the loss: change it there (`train docs own-model`), and leave this out.": (
        "loss loss_fn loss_function criterion objective"
    ),
    "The model's forward may return further values beside the loss, and each is a metric (`train docs own-model`); the "
    "callback trainer_cli.Metrics takes those of torchmetrics. Leave it out.": "metrics metric_fn compute_metrics",
    "Training data is shuffled and validation data is not: leave it out. An IterableDataset orders its samples itself: "
    "for an order of your own give a DataLoader (`train docs data`).": "shuffle",
    "The size of images is that of the samples, which the data makes: leave it out, or give it to your own class as "
    "data.NAME={}.": "imgsz image_size img_size input_size",
    "No model for detection is shipped: `train docs own-model` shows how to use one of your own.": (
        "model=yolo* model=rtdetr* model=*rcnn* model=detr* model=ssd*"
    ),
    "No such data set is shipped: `train docs data` shows how to use one of your own.": (
        "data=coco* data=imagenet* data=cifar* data=mnist* data=voc* data=*.yaml"
    ),
    "data.batch_size={}": (
        "batch bs batch_size per_device_train_batch_size micro_batch_size train_batch_size "
        "train_micro_batch_size_per_gpu"
    ),
    "data.val_batch_size={}": "per_device_eval_batch_size eval_batch_size val_batch_size test_batch_size",
    "data.persistent_workers={}": "dataloader_persistent_workers persistent_workers",
    "Batches for a GPU are in page-locked memory already: leave it out.": "pin_memory dataloader_pin_memory",
    "data.num_workers={}": "num_workers dataloader_num_workers workers n_workers",
    # Optimizer, schedule and precision
    "optimizer.lr={}": "lr learning_rate lr0 base_lr init_lr",
    "optimizer.weight_decay={}": "weight_decay wd",
    "optimizer.betas=[{},0.999]": "adam_beta1",
    "optimizer.betas=[0.9,{}]": "adam_beta2",
    "optimizer.eps={}": "adam_epsilon",
    "optimizer=adamw": "optimizer=adamw* optim=adamw* opt=adamw*",
    "optimizer=adam": "optim=adam* opt=adam*",
    "optimizer={}": "optim opt optimizer.name optimizer.type",
    "model={}": "model.name model.type arch",
    "scheduler=warmup_cosine": "scheduler=cosine* lr_scheduler=cosine* lr_scheduler_type=cosine* lr_schedule=cosine*",
    "scheduler=warmup_linear": "scheduler=linear* lr_scheduler=linear* lr_scheduler_type=linear* lr_schedule=linear*",
    "scheduler=null": "scheduler=constant lr_scheduler=constant lr_scheduler_type=constant scheduler=none",
    "scheduler={}": "lr_scheduler lr_scheduler_type lr_schedule scheduler.name scheduler.type",
    "scheduler.warmup={}dur | scheduler=warmup_cosine scheduler.warmup={}dur": "warmup_ratio warmup_fraction",
    "scheduler.warmup={}ep | scheduler=warmup_cosine scheduler.warmup={}ep": "warmup_epochs",
    "scheduler.warmup={} | scheduler=warmup_cosine scheduler.warmup={}": (
        "warmup_steps num_warmup_steps lr_warmup_steps warmup warmup_iters"
    ),
    "precision=fp16": (
        "fp16=true half=true use_fp16=true mixed_precision=fp16 precision=16* precision=half precision=float16 "
        "dtype=fp16 dtype=float16"
    ),
    "precision=bf16": (
        "bf16=true mixed_precision=bf16 precision=bf16-* precision=bfloat16 dtype=bf16 dtype=bfloat16 use_bf16=true"
    ),
    "precision=fp32": (
        "fp16=false bf16=false amp=false half=false mixed_precision=no mixed_precision=false precision=32* "
        "precision=float32 dtype=fp32 dtype=float32"
    ),
    "precision=bf16 | precision=fp16": "amp use_amp mixed_precision=true",
    "precision.clip_norm={}": (
        "gradient_clip_val max_grad_norm grad_clip clip_grad_norm clip_grad gradient_clipping clipnorm"
    ),
    "precision.clip_value={}": "clipvalue clip_grad_value gradient_clip_value",
    "compile.enabled=true": "torch_compile=true use_compile=true",
    "compile.enabled=true compile.mode={}": "torch_compile_mode",
    "compile.enabled=true compile.backend={}": "torch_compile_backend",
    "`trainer_cli.ScopedFlags`, a callback, sets torch.backends.cudnn.benchmark.": "benchmark cudnn_benchmark",
    "`trainer_cli.ScopedFlags`, a callback, sets torch.backends.cuda.matmul.allow_tf32.": "tf32 allow_tf32",
    "deterministic=true": "deterministic=warn full_determinism=true cudnn_deterministic=true",
    "Any whole number: seed=0.": "seed_everything=true",
    "seed={}": "seed_everything random_seed random_state manual_seed data_seed",
    "+callbacks.anomalies={_target_: trainer_cli.AnomalyDetection}": "detect_anomaly=true",
    "parallel.activation_checkpointing=true": "gradient_checkpointing=true activation_checkpointing=true",
    # Devices and processes
    "The device decides: nccl on GPUs, gloo on the CPU. Leave it out, and choose the device: device=cpu.": (
        "parallel.backend process_group_backend dist_backend ddp_backend distributed_backend backend=gloo backend=nccl "
        "backend=mpi"
    ),
    "device=cpu": "use_cpu=true no_cuda=true cpu=true gpus=0 cuda=false use_cuda=false accelerator=cpu",
    "device=cuda": (
        "device=0 device=gpu device=cuda:0 accelerator=gpu accelerator=cuda gpus=1 "
        "devices=[[]0] cuda=true use_cuda=true gpu=true gpu=0 use_gpu=true no_cuda=false"
    ),
    "Write `device=cuda parallel=ddp parallel.processes_per_node=2`; CUDA_VISIBLE_DEVICES={} before the command "
    "chooses the GPUs.": "device=[0-9],[0-9] gpu=[0-9],[0-9] gpus=[0-9],[0-9] devices=[0-9],[0-9] gpu_ids=[0-9],[0-9]",
    "Write `device=cuda parallel=ddp parallel.processes_per_node=N`, with the number of GPUs as N; "
    "CUDA_VISIBLE_DEVICES={} before the command chooses them.": (
        "device=[0-9],* gpu=[0-9],* gpus=[0-9],* devices=[0-9],* gpu_ids=[0-9],*"
    ),
    "device=cuda:{}": "device=[1-9] gpu=[1-9] gpu_id gpu_ids",
    "A sweep's `--devices {}` gives each run one of these; else CUDA_VISIBLE_DEVICES={} before the command.": (
        "cuda_visible_devices"
    ),
    "OMP_NUM_THREADS={} before the command sets it, and a resume needs the same.": (
        "threads num_threads n_threads omp_num_threads torch_num_threads cpu_threads"
    ),
    "One process, on one device, is the default: leave it out.": (
        "devices=1 num_processes=1 nproc_per_node=1 gpus_per_node=1"
    ),
    "device=auto": "devices=auto",
    "device={}": "accelerator",
    "parallel=ddp parallel.processes_per_node={}": (
        "gpus devices nproc_per_node num_processes n_gpus num_gpus ngpus n_gpu nproc world_size gpus_per_node"
    ),
    "parallel=ddp parallel.find_unused_parameters=true": "strategy=ddp_find_unused_parameters_true",
    "It is off by default: leave it out.": "deepspeed=false deepspeed=no deepspeed=none deepspeed=null deepspeed=0",
    "parallel=ddp parallel.processes_per_node=N": "strategy=ddp* strategy=*ddp",
    "parallel=ddp": "trainer=ddp* distributed=true ddp=true multi_gpu=true",
    "DeepSpeed is not supported; the nearest to ZeRO-3 is `parallel=fsdp parallel.processes_per_node=N` (N: the number "
    "of GPUs).": "strategy=deepspeed* trainer=deepspeed deepspeed parallel=deepspeed* parallel=zero*",
    "parallel=fsdp": "strategy=fsdp* trainer=fsdp* use_fsdp=true fsdp parallel=fsdp2",
    "parallel=ddp parallel.find_unused_parameters={}": "ddp_find_unused_parameters",
    "parallel.timeout={}s": "ddp_timeout",
    "parallel=single": "strategy=auto trainer=cpu trainer=gpu trainer=default",
    "On each machine: `torchrun --nnodes {} --nproc-per-node GPUS --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    "-m trainer_cli fit NAME parallel=ddp`. Under Slurm, once: `srun --nodes {} --ntasks-per-node GPUS train fit NAME "
    "parallel=ddp`.": "num_nodes nnodes num_machines",
    "torchrun and srun set it: leave it out.": "local_rank node_rank rank machine_rank master_addr master_port",
    # Loggers
    "loggers=jsonl": (
        "wandb=false use_wandb=false tensorboard=false logger=false logger=none logger=null report_to=none "
        "report_to=[] loggers=false"
    ),
    "loggers=wandb": "wandb use_wandb wandb.enabled log_wandb wandb_log",
    "loggers=default": (
        "tensorboard use_tensorboard logger=tensorboard loggers=tensorboard report_to=tensorboard log_with=tensorboard "
        "logger=true"
    ),
    "loggers=mlflow": "mlflow use_mlflow",
    "loggers={}": "logger report_to log_with",
    "loggers=wandb loggers.wandb.project={}": "wandb.project wandb_project",
    "run_dir='{}/${name}' | loggers=wandb loggers.wandb.project={}": "project",
    "loggers=wandb loggers.wandb.mode={}": "wandb.mode wandb_mode",
    "logging.console=plain": "enable_progress_bar=false progress_bar=false disable_tqdm=true",
    "logging.console=rich": "enable_progress_bar=true progress_bar=true disable_tqdm=false",
    "logging.console=off": "verbose=0 verbose=false quiet=true silent=true",
    "Each report is a line: loop.log_interval=50 sets the steps between two, and logging.level=debug says more. Leave "
    "it out.": "verbose=2",
    "logging.level=debug": "verbose",
    "logging.level={}": "log_level loglevel verbosity",
    "`train config`, with these overrides, prints the config.": "cfg print_config info",
    # Callbacks
    "callbacks=early_stopping callbacks.early_stopping.metric=val/loss callbacks.early_stopping.patience={}": (
        "patience early_stopping.patience early_stopping_patience early_stop_patience"
    ),
    "callbacks=early_stopping": "early_stopping early_stop use_early_stopping earlystopping",
    "load.average=false takes the trained weights of a checkpoint; no run averages without callbacks=ema.": "ema=none",
    "callbacks=ema callbacks.ema.decay={}": "ema_decay ema.decay",
    "callbacks=ema": "ema use_ema",
    "callbacks=swa": "swa use_swa",
    "callbacks=duration_profiler": "profiler=simple profile=true profiler=advanced",
    "callbacks=torch_profiler": "profiler",
    "callbacks=parameter_table": "enable_model_summary=true model_summary=true",
    # Names and folders
    "name={}": "run_name experiment_name exp_name run_id wandb_name hydra.job.name",
    "run_dir={}": ("output_dir default_root_dir log_dir root_dir logging_dir work_dir out_dir save_dir hydra.run.dir"),
    "run_dir={}/KEY=VALUE of each run: leave it out, and give run_dir={}.": "hydra.sweep.dir",
    "`train fit -m --jobs N` runs N jobs at a time, and --submit slurm on a cluster: leave it out.": (
        "hydra.launcher hydra.sweeper"
    ),
    "-cd {}": "config_path",
    # Names alone: of sections, of choices, and of arguments in Python
    "loop": "trainer training train fit",
    "data": "dataset datasets datamodule dataloader",
    "keep_best": "save_top_k monitor",
    "device": "devices",
    "fp16": "float16 half 16_mixed 16_true",
    "bf16": "bfloat16 bf16_mixed bf16_true",
    "fp32": "float32 32_true",
    "cuda": "gpu",
    "console": "enable_progress_bar progress_bar",
    "ckpt_path": "resume resume_from resume_from_checkpoint checkpoint_path",
    "train_loader": "train_dataloaders train_dataloader dataloaders dataloader loader data train_dataset",
    "val_loader": "val_dataloaders val_dataloader dataloaders dataloader loader data test_loader eval_dataset",
    "val_loaders": "val_dataloaders val_dataloader dataloaders dataloader loader data test_loader eval_dataset",
    "loader": "val_dataloaders val_dataloader dataloaders dataloader val_loader data test_loader test_dataset",
}
"""What is written here -> the words for it elsewhere, each `NAME`, or `NAME=GLOB` for values that match.

Written here are: overrides, with `{}` for the value, alternatives separated by ` | `; a sentence; or a name alone. Of
several that have a word, the first counts.
"""
_SETTINGS: dict[str, list[tuple[str, str]]] = {}
"""Word elsewhere -> (glob of its values, what is written here)."""
NAMES_HERE: dict[str, list[str]] = {}
"""Name elsewhere -> names here, without their sections; the first is suggested."""
for _text, _words in _ELSEWHERE.items():
    for _name, _equals, _glob in (_word.partition("=") for _word in _words.split()):
        if _text.isidentifier():
            NAMES_HERE.setdefault(_name, []).append(_text)
            continue
        _SETTINGS.setdefault(_name, []).append((_glob or "*", _text))
        # The word alone also stands for the key of an override, the last one of several.
        if not _equals and not _text.endswith("."):
            _key = _text.rpartition(" ")[2].partition("=")[0]
            NAMES_HERE.setdefault(_name, []).append(_key.rpartition(".")[2])

_OFF = ("false", "no", "none", "null", "0")


def normalise(word: str) -> str:
    """A name as it is compared: in small letters, with `_` for `-`."""
    return word.lower().replace("-", "_")


def translate_setting(word: str, value: str | None, *, below: bool = True) -> str | None:
    """How a setting of other trainers is written here: an entry of the table with the value filled in, or None.

    Args:
        word: the key there, with its sections.
        value: its value as text; None for a flag without a value.
        below: whether the first sections of the key may be ignored if the table does not have them.
    """
    names = normalise(word).replace("/", ".").split(".")
    for start in range(len(names) if below else 1):
        for glob, translation in _SETTINGS.get(".".join(names[start:]), ()):
            text = "true" if value is None else value.lower()
            is_switch = glob == "*" and "{}" not in translation and not translation.endswith(".")
            if is_switch and text in _OFF:
                return "It is off by default: leave it out."
            if fnmatchcase(text, glob):
                return translation.replace("{}", "VALUE" if value is None else value)
    return None


def hint_on(
    word: str,
    value: str | None,
    *,
    below: bool = True,
    written: Callable[[str], str] = str,
    refused: Callable[[str], str | None] = lambda overrides: None,
) -> str:
    """The hint that names what `translate_setting` returns, or an empty text.

    Args:
        written: how overrides are written where the hint is read.
        refused: why overrides would be refused. Such a suggestion is left out; if all are, the hint is the reason.
    """
    translation = translate_setting(word, value, below=below)
    if translation is None or translation.endswith("."):
        return translation or ""
    reasons = {overrides: refused(overrides) for overrides in translation.split(" | ")}
    alternatives: list[str] = []
    for overrides, reason in reasons.items():
        if reason is None:
            # Quotes would make one word for a shell out of several overrides.
            has_several = " " in overrides and overrides[0] not in "+-"
            mark = "`" if "'" in overrides or has_several else "'"
            alternatives.append(f"{mark}{written(overrides)}{mark}")
    if not alternatives:
        overrides, reason = next(iter(reasons.items()))
        return f"It is '{overrides.rpartition(' ')[2].partition('=')[0]}' here. {reason}."
    note = OWN_METRIC if "metric=val/loss" in translation else ""
    note += " N is the number of GPUs." if translation.endswith("=N") else ""
    return f"Did you mean {' or '.join(alternatives)}?{note}"
