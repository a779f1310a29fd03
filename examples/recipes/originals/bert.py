"""A loop as of transformers' run_glue_no_trainer.py: AdamW without decay on biases and norms, a linear schedule."""

import torch
from transformers import get_linear_schedule_with_warmup


def train(model, batches, steps=250):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    undecayed = ("bias", "LayerNorm.weight")
    groups = [
        {"params": [p for name, p in named if not name.endswith(undecayed)], "weight_decay": 0.01},
        {"params": [p for name, p in named if name.endswith(undecayed)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 25, steps)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
