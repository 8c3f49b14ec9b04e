"""The whole method on one matrix, in float64 and with nothing that makes it fast: the readable twin of the rules.

It imports nothing of the package; the rules' tests compare with it. Random numbers are an input: ``draw(label, number,
rows, columns)`` gives a standard Gaussian matrix, the same one for the same label and number.

Shapes, as a matrix is projected (from the left: everything of its transpose)

    W, G   m x n   weight and gradient
    Q      n x r   orthonormal basis of the gradient's dominant row space
    P      m x r   orthonormal basis of its image G Q, where both sides are projected; else m x m, the identity
    Z      n x k   orthonormal probe columns outside Q
    A, S           G Q, m x r, and G Z, m x k
    X              what Adam's moments are of: A, or the core P^T A, r x r
    M, V, U        of X: running mean, running mean of X o X, Adam's direction
    e1, e2         evidence in M (a number) and in V (as V): Adam's 1 - beta^t, lowered by a new basis where the old
                   one had seen nothing

Papers: Adam 1412.6980, AdamW 1711.05101, Halko, Martinsson and Tropp 0909.4061, GaLore 2403.03507, Fira
2410.01623, LDAdam 2410.16103, Adafactor 1804.04235, APOLLO 2412.05270, NorMuon 2510.05491; the HMT paper: cores of
r x r.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

OVERSAMPLING = 8
GROWTH = 1.01  # a step, at most, of the norm that Fira and APOLLO limit


def orth(x: Tensor) -> Tensor:
    return torch.linalg.qr(x).Q


def range_finder(g: Tensor, r: int, gaussian: Tensor, old: Tensor | None) -> Tensor:
    """Q by subspace iteration (Halko, Martinsson and Tropp, algorithms 4.4 and 5.1), from the old one on."""
    q = gaussian if old is None else torch.cat((old, gaussian), dim=1)
    for _ in range(2 if old is None else 1):
        q = orth(g.T @ orth(g @ q))  # Q <- orth(G^T orth(G Q))
    b = g @ q
    rotation = torch.linalg.eigh(b.T @ b).eigenvectors.flip(1)  # B^T B = R diag(sigma^2) R^T
    return q @ rotation[:, :r]


def probe_columns(q: Tensor, gaussian: Tensor) -> Tensor:
    """Z, uniform outside the basis: E[Z Z^T] = k/(n - r) (I - Q Q^T)."""
    return orth(gaussian - q @ (q.T @ gaussian))


def clipped(g: Tensor, norm: Tensor, max_norm: float) -> Tensor:
    return g * (max_norm / (norm + 1e-6)).clamp(max=1)


class Adam:
    """Adam (algorithm 1) on what is like X; ``factored``: V as Adafactor's means, v and e2 of columns (1 x r)."""

    def __init__(self, x: Tensor, betas: tuple[float, float], eps: float, factored: bool) -> None:
        self.betas, self.eps, self.factored = betas, eps, factored
        self.m, self.e1 = torch.zeros_like(x), 0.0
        self.v = self.e2 = self.m[:1] if factored else self.m
        self.rows = self.m[..., :1]

    def step(self, x: Tensor) -> Tensor:
        """U."""
        b1, b2 = self.betas
        square = x.square()
        self.m = b1 * self.m + (1 - b1) * x
        self.v = b2 * self.v + (1 - b2) * (square.mean(dim=0) if self.factored else square)
        self.e1, self.e2 = b1 * self.e1 + 1 - b1, b2 * self.e2 + 1 - b2
        v = self.v / self.e2
        if self.factored:  # V_ij = R_i C_j / mean(R) (Adafactor, section 3)
            self.rows = b2 * self.rows + (1 - b2) * square.mean(dim=1, keepdim=True)
            v = self.rows / self.rows.mean() * v
        return self.m / self.e1 / (v.sqrt() + self.eps)

    def turn(self, right: Tensor, left: Tensor) -> None:
        """Into new bases: R = Q_old^T Q_new, L = P_old^T P_new (LDAdam's rule, over what the old bases had seen)."""
        m, v = self.m / self.e1, self.v / self.e2
        self.m = left.T @ self.m @ right  # M <- L^T M R
        if self.factored:  # of columns: no row, and no row's mean
            m, left = torch.zeros_like(v), v.new_ones(1, 1)
        right2, left2 = right.square(), left.square()
        # v <- |(L o L)^T (v - m o m) (R o R) + (L^T m R)^2| / rho
        v = (left2.T @ (v - m.square()) @ right2 + (left.T @ m @ right).square()).abs()
        # rho_ij: the share of the new directions that the old ones spanned
        v = v / torch.outer(left2.sum(0).clamp(max=1), right2.sum(0).clamp(max=1)).clamp(min=1e-6)
        v = torch.maximum(v, 1e-3 * v.mean(dim=1, keepdim=True))  # little may be left
        self.e2 = (left2.T @ self.e2 @ right2).clamp(1e-8, 1)
        self.v = v * self.e2


class Muon:
    """Muon's momentum of A, orthogonalised, and NorMuon's mean square of each row."""

    def __init__(self, a: Tensor, beta2: float) -> None:
        self.m, self.v, self.beta2 = torch.zeros_like(a), torch.zeros_like(a[:, :1]), beta2

    def direction(self, a: Tensor) -> Tensor:
        """U."""
        self.m = 0.95 * self.m + 0.05 * a
        x = 0.95 * self.m + 0.05 * a  # Nesterov's
        s = x.T @ x
        values, vectors = torch.linalg.eigh(s + 1e-5 * s.norm() * torch.eye(len(s), dtype=s.dtype))
        return len(a) ** 0.5 * x @ vectors @ (values**-0.5 * vectors).T  # sqrt(m) X (X^T X)^(-1/2)

    def step(self, a: Tensor) -> Tensor:
        """O."""
        u = self.direction(a)
        self.v = self.beta2 * self.v + (1 - self.beta2) * u.square().mean(dim=1, keepdim=True)
        o = u / self.v.sqrt()
        return o * u.norm() / o.norm()

    def turn(self, right: Tensor, left: Tensor) -> None:
        self.m = self.m @ right


@dataclass
class SimpleHMT:
    """One matrix. method: adamw, lowrank_adamw, muon, apollo or apollo_mini. The other names are those of hmt.optimizer."""

    draw: Callable[[str, int, int, int], Tensor]
    lr: float
    rank: int | str = 1
    method: str = "lowrank_adamw"
    projection: str = "right"
    residual: str = "probe"
    probes: int = 0
    second_moment: str = "full"
    scale: float = 1.0
    update_interval: int = 200
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self.t = 0
        self.q: Tensor | None = None
        self.adam: Adam | Muon | None = None
        self.growths: list[float] = []  # of the limited norm, as it would have been

    def step(self, w: Tensor, g: Tensor, max_norm: float = inf) -> Tensor:
        """W after a step with the gradient G, clipped to ``max_norm``."""
        apollo, full = self.method.startswith("apollo"), self.rank == "full"
        smaller = (apollo or full) and g.shape[0] < g.shape[1]
        transposed = self.projection == "left" or smaller
        rule = self.dense if self.method == "adamw" else self.apollo if apollo else self.low_rank
        rule = self.whole_muon if full else rule
        d = rule(g.T if transposed else g, max_norm)
        self.t += 1
        # W <- (1 - lr wd) W - lr D (AdamW, algorithm 2)
        return (1 - self.lr * self.weight_decay) * w - self.lr * (d.T if transposed else d)

    def adam_on(self, x: Tensor) -> Tensor:
        factored = self.second_moment == "factored"
        if self.method == "muon":
            self.adam = self.adam or Muon(x, self.betas[1])
        self.adam = self.adam or Adam(x, self.betas, self.eps, factored)
        return self.adam.step(x)

    def dense(self, g: Tensor, max_norm: float) -> Tensor:
        return self.adam_on(clipped(g, g.norm(), max_norm))

    def whole_muon(self, g: Tensor, max_norm: float) -> Tensor:
        """D of Muon itself: no basis, no normalised rows."""
        self.adam = self.adam or Muon(g, self.betas[1])
        return self.scale * self.adam.direction(clipped(g, g.norm(), max_norm))

    def low_rank(self, g: Tensor, max_norm: float) -> Tensor:
        """D of GaLore, or of the HMT paper's core, and the residual outside it."""
        n, r, k, full = g.shape[1], self.rank, self.probes, self.residual == "full"
        if self.t % self.update_interval == 0:
            self.new_bases(g)
        q, p = self.q, self.p
        z = probe_columns(q, self.draw("probes", self.t, n, k))
        ratio = (n - r) / max(k, 1)
        # ||G||^2 ~ ||G Q||^2 + ||G Z||^2 (n - r)/k
        norm = ((g @ q).square().sum() + (g @ z).square().sum() * ratio).sqrt()
        g = clipped(g, g.norm() if full else norm, max_norm)
        a, s = g @ q, g @ z
        # E[c S Z^T] = G - A Q^T for c = (n - r)/k, held down where its noise would be large
        rest = g - a @ q.T if full else min(ratio, 8.0) * s @ z.T
        if self.projection == "two_sided":
            x = p.T @ a
            u = self.adam_on(x)
            d = p @ u @ q.T  # the HMT paper's core: D = P U Q^T
            phi = u.norm() / torch.maximum(x.norm(), s.norm())
            rest = rest + (a - p @ x) @ q.T
        else:
            u = self.adam_on(a)
            d = u @ q.T  # D = U Q^T (GaLore, algorithm 2)
            # phi_j = ||U_j|| / ||A_j|| (Fira, section 4.1), bounded for a row that Q hardly sees
            least = (0.1 * rest if full else s).norm(dim=1, keepdim=True)
            phi = u.norm(dim=1, keepdim=True) / torch.maximum(a.norm(dim=1, keepdim=True), least)
        if self.residual != "none":
            d = d + phi * rest * self.limit((phi * rest).norm())
        return self.scale * d

    def new_bases(self, g: Tensor) -> None:
        """Q from the whole gradient, P from its image, and the moments turned into both."""
        (m, n), r, old = g.shape, self.rank, self.q
        width = min(r + OVERSAMPLING, m, n) - (0 if old is None else r)
        q = range_finder(g, r, self.draw("sketch", self.t, n, width), old)
        p = torch.eye(m, dtype=g.dtype)
        if self.projection == "two_sided":
            # turned at random: between singular vectors the core is diagonal, and Adam would blow up its zeros
            p = orth(g @ q) @ orth(self.draw("turn", self.t, r, r))
        if self.adam is not None:
            self.adam.turn(old.T @ q, self.p.T @ p)
        self.q, self.p = q, p

    def apollo(self, g: Tensor, max_norm: float) -> Tensor:
        """APOLLO, algorithm 1: how far Adam moves a random projection of a row is how far the row moves."""
        g = clipped(g, g.norm(), max_norm)
        number = self.t // self.update_interval
        a = g @ self.draw("apollo", number, g.shape[1], self.rank) / self.rank**0.5  # N(0, 1/r)
        u = self.adam_on(a)
        each = {} if self.method == "apollo_mini" else {"dim": 1, "keepdim": True}
        # s_j = ||U_j|| / ||A_j|| by rows; Mini: ||U|| / ||A||
        d = g * u.norm(**each) / (a.norm(**each) + 1e-8)
        # as published, the norm that is limited is the one before Adam's bias correction
        corrected = self.adam.e2[0, 0].sqrt() / self.adam.e1
        return self.scale**0.5 * d * self.limit(d.norm() / corrected)

    def limit(self, norm: Tensor) -> Tensor:
        """Factor that keeps a norm from growing by more than GROWTH a step (Fira, section 4.2)."""
        self.growths.append(float(norm / self.before) if self.growths else 1.0)
        factor = min(GROWTH / self.growths[-1], 1.0)
        self.before = norm * factor
        return factor
