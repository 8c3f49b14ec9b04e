"""What the projected backward saves: bytes kept for it, and FLOPs of weight gradients."""

import torch
from patched_linears import Attention, D, columns, data, full_gradients, left_patched, patched
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def saved_bytes(model, x):
    """Bytes kept for backward besides the parameters, each storage once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    del out
    return sum(size for size, _ in kept.values())


def test_saves_the_product_instead_of_the_input():
    n, rank = 256, 16
    model = nn.Sequential(*(nn.Linear(n, n) for _ in range(3)))
    x = data(64, n, dtype=torch.float32)
    ordinary = saved_bytes(model, x)
    assert ordinary == 3 * 64 * n * 4
    patched(list(model), width=rank, dtype=torch.float32)
    projected = saved_bytes(model, x)
    assert projected == 3 * 64 * rank * 4
    assert projected <= ordinary / 8


def test_saves_the_flops_of_the_weight_gradient():
    n, rank, tokens = 256, 16, 64
    model, x = nn.Linear(n, n, bias=False), data(64, n, dtype=torch.float32).requires_grad_()
    patched([model], width=rank, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    # Forward, dX, and twice a thin product instead of D^T X.
    assert counter.get_total_flops() == 2 * tokens * n * (2 * n + 2 * rank)


def test_left_saves_the_flops_and_keeps_the_input():
    n, rank, tokens = 256, 16, 64
    model, x = nn.Linear(n, n, bias=False), data(64, n, dtype=torch.float32).requires_grad_()
    ordinary = saved_bytes(model, x)
    left_patched([model], width=rank, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    # Forward, dX, D B and X^T (D B) instead of D^T X.
    assert counter.get_total_flops() == 2 * tokens * n * (2 * n + 2 * rank)
    # The input as ever; the basis is read from the site, where it is for the whole window.
    assert saved_bytes(model, x) == ordinary


def saved_per_layer(model, x, width):
    """Saved tensors as wide as a projection: the number of storages."""
    kept = {}

    def pack(tensor):
        if tensor.dim() == 2 and tensor.shape[1] == width:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    del out
    return len(kept)


def test_one_projection_object_means_one_product():
    """Members of a group whose projection is the same tensor read the same columns of the product."""
    model, x = Attention(), data(4, D)
    sites, shared = patched(model.linears())
    model(x)
    for site in sites[:3]:
        site.projection = sites[0].projection
    shared.lay_out()
    assert [site.span for site in sites[:3]] == [(0, 6)] * 3
    assert sites[0].group.columns is sites[0].projection
    assert saved_per_layer(model, x, 6) == 2
    _, gradients = full_gradients(model, x)
    model(x).square().sum().backward()
    for site, gradient in zip(sites[:3], gradients, strict=False):
        torch.testing.assert_close(site.take(), gradient @ columns(6, 0))
