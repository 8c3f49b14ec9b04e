"""Gradients of known directions and noise, and runs on them, for tests of ranks that are chosen."""

import torch
from hmt_runs import (
    PAPERS_RULE,
)
from low_rank_adamw import low_rank_adamw
from torch import nn

SHAPE = (48, 64)
CANDIDATES = (4, 8, 16, 32)


def orthonormal(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator)).Q


class Source:
    """Gradients of a matrix: this many directions of equal energy, a share of noise elsewhere."""

    def __init__(self, directions, noise, shape=SHAPE, seed=0):
        self.shape, self.noise, self.directions = shape, noise, directions
        self.generator = torch.Generator().manual_seed(100 + seed)
        self.turn(seed)

    def turn(self, seed):
        self.right = orthonormal(self.shape[1], self.directions, seed)

    def __call__(self):
        def randn(*shape):
            return torch.randn(*shape, generator=self.generator)

        m, n = self.shape
        signal = randn(m, self.directions) @ self.right.t() / (m * self.directions) ** 0.5
        outside = randn(m, n) / (m * n) ** 0.5
        return (1 - self.noise) ** 0.5 * signal + self.noise**0.5 * outside


class BatchNoise(Source):
    """A share of every gradient lies in a few directions of its own, which the next one does not have."""

    def __init__(self, directions, share, noisy, shape=SHAPE, seed=0):
        super().__init__(directions, 0.0, shape, seed)
        self.share, self.noisy, self.draws = share, noisy, 0

    def __call__(self):
        self.draws += 1
        (m, n), k = self.shape, self.noisy
        right = orthonormal(n, k, 1000 * self.draws + self.draws)
        left = torch.randn(m, k, generator=self.generator) / (m * k) ** 0.5
        return (1 - self.share) ** 0.5 * super().__call__() + self.share**0.5 * left @ right.t()


class Turned:
    """The gradients of a source, transposed: what lasts is on the left."""

    def __init__(self, source):
        self.source, self.shape = source, source.shape[::-1]

    def __call__(self):
        return self.source().t()


def heterogeneous():
    """Few directions with noise that no rank captures, and many that a large rank does."""
    return [
        Source(d, noise, seed=i)
        for i, (d, noise) in enumerate(
            [(3, 0.5), (3, 0.5), (3, 0.5), (30, 0.02), (30, 0.02), (30, 0.02)]
        )
    ]


def construct(sources, **options):
    weights = [nn.Parameter(torch.zeros(s.shape)) for s in sources]
    given = {**PAPERS_RULE, "rank_candidates": CANDIDATES, **options}
    return weights, low_rank_adamw(weights, lr=1e-3, **given)


def train(weights, optimizer, sources, steps):
    """Yields after every step."""
    for _ in range(steps):
        for weight, source in zip(weights, sources, strict=True):
            weight.grad = source()
        optimizer.step()
        yield


def moment_and_basis_bytes(optimizer):
    """Of what is really allocated; the budget leaves out evidence."""
    matrices = optimizer.matrices.values()
    return sum(m.state_bytes() - m.moments.evidence.nbytes - 4 for m in matrices)


def captured(optimizer, sources):
    """Sum over the matrices of the energy that the bases hold of fresh gradients."""
    total = 0.0
    for matrix, source in zip(optimizer.matrices.values(), sources, strict=True):
        draws = [source() for _ in range(4)]
        shares = [((g @ matrix.basis).norm() / g.norm()).square().item() for g in draws]
        total += sum(shares) / len(shares)
    return total
