"""The loop of karpathy/nanoGPT's train.py."""

import math

import torch


def train(model, batches, accumulation=4, length=200, warmup=10, rate=1e-3, lowest=1e-4):
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99))

    def rate_at(step):
        if step < warmup:
            return rate * (step + 1) / (warmup + 1)
        done = (step - warmup) / (length - warmup)
        return lowest + 0.5 * (1 + math.cos(math.pi * done)) * (rate - lowest)

    losses = []
    for micro, batch in enumerate(batches):
        step = micro // accumulation
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        loss = model(batch)["loss"]
        (loss / accumulation).backward()
        losses.append(loss.item())
        if micro % accumulation == accumulation - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return losses
