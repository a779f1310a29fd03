"""The loop of pytorch's translation tutorial: teacher forcing, smoothed labels, the rate of Vaswani et al. (2017)."""

import torch


def train(model, batches):
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)

    def rate(step):
        step += 1
        return 32**-0.5 * min(step**-0.5, step * 100**-1.5)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for source, target in batches:
        start = torch.zeros(len(target), 1, dtype=torch.long)
        scores = model.scores(source, torch.cat([start, target[:, :-1]], dim=1))
        loss = criterion(scores.reshape(-1, scores.shape[-1]), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses
