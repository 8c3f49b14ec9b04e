"""A small network, its data and a training loop for the tests of HMT."""

import io

import torch
from low_rank_adamw import LOW_RANK_ADAMW
from torch import nn

from hmt_deepspeed.optim.decisions.policy import build_policy
from hmt_deepspeed.optim.settings.options import complete_options, matrix_settings

WIDTHS = (24, 40, 40, 16)


def network(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = []
    for m, n in zip(WIDTHS[1:], WIDTHS, strict=False):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def batches(count, size=32, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    teacher = torch.randn(WIDTHS[0], WIDTHS[-1], generator=generator) / WIDTHS[0] ** 0.5
    for _ in range(count):
        x = torch.randn(size, WIDTHS[0], generator=generator)
        yield x.to(dtype), torch.tanh(x @ teacher).to(dtype)


# Ranks as the HMT paper chooses them: by what a basis holds of the gradient that it is made from.
PAPERS_RULE = {"energy_threshold": 0.95, "energy_estimate": "in_sample", "rank_budget": None}
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "rank": 8, "update_interval": 6}


def train(model, optimizer, data, micro_batches=1, max_norm=None):
    """Losses of a run; weights change in place."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            loss = (model(part_x) - part_y).float().square().mean() / micro_batches
            loss.backward()
        losses.append(loss.item())
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
    return losses


def assert_same_weights(first, second, tolerance=0.0):
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        error = (a.float() - b.float()).abs().max().item()
        assert error <= tolerance, f"{name} differs by {error}"


def movement(model, seed=0):
    start = network(seed)
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same_state(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if isinstance(value, str):
            assert value == theirs[key]
        else:
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key])), key


def refreshes(optimizer):
    """How many bases each matrix has taken, by name."""
    state = optimizer.state_dict()
    names = state["hmt"]["names"]
    found = {names[i]: own.get("num_refreshes") for i, own in state["state"].items()}
    return {name: number for name, number in found.items() if number is not None}


def policy_like(optimizer):
    """A rank policy that knows what the optimizer's own does, of matrices that share no basis."""
    policy = build_policy([[matrix] for matrix in optimizer.matrices.values()], optimizer.options)
    policy.load_state_dict(optimizer.state_dict()["hmt"]["policy"])
    return policy


def settings_of(**fields):
    """Settings of one matrix from fields of ``hmt.optimizer``; low-rank AdamW's where they name no method."""
    return matrix_settings(complete_options({**LOW_RANK_ADAMW, **fields}))
