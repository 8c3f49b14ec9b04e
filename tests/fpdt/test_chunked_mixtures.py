"""Mixtures of experts in chunks: experts with projected backward, and the router's auxiliary loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_modules import links_of, patch
from harness import Ranks
from tiny import FP32, LENGTH, batch, compare, error, fpdt, step, tiny

MIXTURES = ["mixtral", "qwen3_moe, a layer without experts"]


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 21:] = 0
    return batch() | {"attention_mask": mask}


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("name", MIXTURES)
def test_projected_gradients_of_experts_add_up_over_chunks(name: str, own: bool) -> None:
    """A chunk's experts have other tokens than the next one's, and some of them have none."""
    model, inputs = tiny(name), batch()
    whole = step(model, inputs)[1]
    links = patch(model, links_of(model, "input" if own else "width", own))
    assert len(links) == 4
    expected = step(model, inputs)[1]
    products = {name: link.take() for name, link in links.items()}
    with fpdt(model, chunk_size=8, piece_size=3):
        found = step(model, inputs)[1]
    assert found.keys() == whole.keys() - links.keys()
    assert error(found, expected) <= FP32
    assert error({name: link.take() for name, link in links.items()}, products) <= FP32


@pytest.mark.parametrize("inputs", [batch(), padded()], ids=["all tokens", "padded"])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_auxiliary_loss_is_that_of_all_chunks(name: str, inputs: dict[str, Any]) -> None:
    """Of so large a factor that without its gradients routers would have others."""
    model = tiny(name, output_router_logits=True, router_aux_loss_coef=3.0)
    plain = step(model, inputs | {"output_router_logits": False})[1]
    expected = step(model, inputs)[1]
    routers = [name for name in plain if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    assert all(torch.dist(plain[n], expected[n]) > 0.1 * expected[n].norm() for n in routers)
    compare(model, inputs, piece_size=3)
    compare(model, inputs | {"output_router_logits": False}, piece_size=3)


def z_loss(outputs: Any) -> torch.Tensor:
    """ST-MoE (2202.08906), equation 5."""
    return sum(logits.logsumexp(-1).square().mean() for logits in outputs.router_logits)


def z_step(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    outputs = model(**inputs, output_router_logits=True)
    (outputs.loss + 0.1 * z_loss(outputs)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_loss_of_ones_own_of_router_logits(name: str) -> None:
    model, inputs = tiny(name), batch()
    expected = z_step(model, inputs)
    theirs = model(**inputs, output_router_logits=True)
    with fpdt(model, piece_size=3):
        assert error(z_step(model, inputs), expected) <= FP32
        ours = model(**inputs, output_router_logits=True)
    torch.testing.assert_close(ours.aux_loss, theirs.aux_loss, rtol=FP32, atol=0)
    torch.testing.assert_close(ours.router_logits, theirs.router_logits, rtol=FP32, atol=1e-5)


def test_logits_without_labels_have_the_auxiliary_loss_beside_them() -> None:
    model, ids = tiny("mixtral", output_router_logits=True), batch()["input_ids"]

    def gradients() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        outputs = model(input_ids=ids)
        (outputs.logits.square().mean() + outputs.aux_loss).backward()
        return outputs.aux_loss.detach(), {n: p.grad for n, p in model.named_parameters()}

    aux_loss, expected = gradients()
    with fpdt(model, piece_size=3):
        found_loss, found = gradients()
    torch.testing.assert_close(found_loss, aux_loss, rtol=FP32, atol=0)
    assert error(found, expected) <= FP32


def test_noise_on_what_routers_read_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"router_jitter_noise is 0\.1"),
        fpdt(tiny("mixtral", router_jitter_noise=0.1)),
    ):
        pass


def test_an_auxiliary_loss_that_is_not_transformers_is_refused() -> None:
    model = tiny("mixtral", output_router_logits=True)
    kind = type(model)
    own = type("Own", (kind,), {"forward": lambda self, **kwargs: kind.forward(self, **kwargs)})
    model.__class__ = own
    with fpdt(model), pytest.raises(ValueError, match=r"Own.s forward.*leave hmt\.fpdt out"):
        model(**batch())


def shared(name: str) -> list[tuple[float, float]]:
    """The loss's and the gradients' error against this rank alone: with the auxiliary loss, and with one's own."""
    import torch.distributed as dist

    from hmt_deepspeed.fpdt.sequence import TorchGroup

    model, inputs = tiny(name, output_router_logits=True, router_aux_loss_coef=3.0), padded()
    loss, expected = step(model, inputs)
    expected_z = z_step(model, inputs)
    links = patch(model, links_of(model, "width", own=False))
    step(model, inputs)
    products = {name: link.take() for name, link in links.items()}
    with fpdt(model, chunk_size=9, piece_size=3, group=TorchGroup()):
        own_loss, grads = step(model, inputs)
        own_products = {name: link.take() for name, link in links.items()}
        grads_z = z_step(model, inputs)
        for link in links.values():
            link.take()
    for found in (grads, own_products, grads_z):
        for grad in found.values():
            if grad is not None:
                dist.all_reduce(grad)
                grad /= dist.get_world_size()
    rest, rest_z = ({n: g for n, g in e.items() if n not in links} for e in (expected, expected_z))
    grads_z = {name: grad for name, grad in grads_z.items() if grad is not None}
    return [
        (abs(float(own_loss / loss) - 1), error(grads, rest)),
        (0.0, error(own_products, products)),
        (0.0, error(grads_z, rest_z)),
    ]


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_that_share_a_sequence(ranks: Ranks, name: str) -> None:
    for found in ranks.run(shared, 2, name):
        for loss, gradients in found:
            assert loss <= FP32
            assert gradients <= FP32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_no_token_changes_experts_when_backward_computes_a_piece_again(
    name: str, dtype: torch.dtype
) -> None:
    model: Any = tiny(name, dtype)
    calls: dict[str, list[torch.Tensor]] = {}
    routers = [(n, m) for n, m in model.named_modules() if n.endswith("mlp.gate")]
    for key, router in routers:
        router.register_forward_hook(
            lambda _, __, out, key=key: calls.setdefault(key, []).append(out[2])
        )
    with fpdt(model, chunk_size=8, piece_size=3):
        step(model, batch())
    assert len(calls) == 2
    for found in calls.values():
        half = len(found) // 2
        assert half > LENGTH // 8
        assert all(map(torch.equal, found[:half], found[half:]))
