"""A Llama block's linears, data for it and steps on them, for tests of linears that read the same input."""

import torch
from torch import nn
from torch.nn import functional as F

D, KV, HIDDEN = 32, 16, 48


class Block(nn.Module):
    """The linears of a Llama block, with fewer key and value heads."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.q, self.o = nn.Linear(D, D), nn.Linear(D, D)
        self.k, self.v = nn.Linear(D, KV), nn.Linear(D, KV)
        self.gate, self.up = nn.Linear(D, HIDDEN), nn.Linear(D, HIDDEN)
        self.down = nn.Linear(HIDDEN, D)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        mixed = torch.tanh(k) * v
        x = x + self.o(torch.sigmoid(q) * torch.cat((mixed, mixed), dim=-1))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def block_batches(count, size=32):
    generator = torch.Generator().manual_seed(5)
    teacher = torch.randn(D, D, generator=generator) / D**0.5
    for _ in range(count):
        x = torch.randn(size, D, generator=generator)
        yield x, torch.tanh(x @ teacher)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def train_block(model, optimizer, data):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
