"""The loop of pytorch/examples/dcgan."""

import torch


def train(model, batches):
    criterion = torch.nn.BCEWithLogitsLoss()
    net_g, net_d = model.generator, model.discriminator
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    losses = []
    for images, _ in batches:
        size = len(images)
        net_d.zero_grad()
        error_real = criterion(net_d(images.view(size, -1)), torch.full((size, 1), 1.0))
        error_real.backward()
        fake = net_g(torch.randn(size, 16))
        error_fake = criterion(net_d(fake.detach()), torch.full((size, 1), 0.0))
        error_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        error_g = criterion(net_d(fake), torch.full((size, 1), 1.0))
        error_g.backward()
        optimizer_g.step()
        losses.append((error_real + error_fake + error_g).item())
    return losses
