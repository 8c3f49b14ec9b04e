"""Partitioned checkpoints through DeepSpeed's own ways of asking for them, on two ranks."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from checkpointing_service import (
    BATCH,
    WIDTH,
    assert_equal,
    layer_inputs,
    plainly,
    serve,
)
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn
from training import VOCAB, make_engine

from hmt_deepspeed.activations.codecs import Keep


class Grid:
    """An mpu whose only group is the whole world, as tensor-parallel ranks."""

    get_model_parallel_rank = staticmethod(lambda: torch.distributed.get_rank())
    get_model_parallel_world_size = staticmethod(lambda: torch.distributed.get_world_size())
    get_model_parallel_group = staticmethod(lambda: torch.distributed.group.WORLD)
    get_data_parallel_rank = staticmethod(lambda: 0)


class _Copy(torch.autograd.Function):
    """Megatron's f: identity forward, sum of gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    """Megatron's g: sum forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        torch.distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ParallelLayer(nn.Module):
    """Columns of the first weight and rows of the second on each rank; dropout differs between ranks inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.up(_Copy.apply(x)))
        with checkpointing.get_cuda_rng_tracker().fork():
            y = nn.functional.dropout(y, 0.2)
        return x + nn.functional.dropout(_Reduce.apply(self.down(y)), 0.2)


def tensor_parallel_gradients(checkpoint: Any) -> list[Tensor]:
    checkpointing.model_parallel_cuda_manual_seed(11)
    layers = nn.ModuleList(ParallelLayer() for _ in range(3))
    with checkpointing.get_cuda_rng_tracker().fork():
        for p in layers.parameters():
            nn.init.normal_(p)
    x = torch.randn(BATCH, WIDTH).requires_grad_()
    y = x * 1
    for layer in layers:
        y = checkpoint(layer, y)
    y.square().sum().backward()
    return [x.grad, *(p.grad for p in layers.parameters())]


def configured_on_two_ranks(cpu: bool) -> dict[str, Any]:
    """What ``configure`` is told reaches us, before or after the service is made."""
    deepspeed.checkpointing.configure(Grid(), partition_activations=False)
    expected = tensor_parallel_gradients(plainly)
    service = serve(nn.Identity())
    found: dict[str, Any] = {"bytes": []}
    for partition in (False, True):
        deepspeed.checkpointing.configure(
            Grid(), partition_activations=partition, checkpoint_in_cpu=cpu and partition
        )
        assert deepspeed.checkpointing.is_configured()
        service.inputs.held.clear()
        gradients = tensor_parallel_gradients(deepspeed.checkpointing.checkpoint)
        assert_equal(gradients, expected)
        found["bytes"].append([held.nbytes for held in service.inputs.held])
    service.inputs.held.clear()
    deepspeed.checkpointing.partition_activations_in_checkpoint(False)
    tensor_parallel_gradients(deepspeed.checkpointing.checkpoint)
    found["bytes"].append([held.nbytes for held in service.inputs.held])
    service.close()
    deepspeed.checkpointing.configure(Grid(), partition_activations=True)
    assert_equal(tensor_parallel_gradients(deepspeed.checkpointing.checkpoint), expected)  # stock
    return found


def groups_on_two_ranks() -> dict[str, Any]:
    """Without ``configure``: the engine's mpu, then DeepSpeed's own tensor-parallel group."""
    from deepspeed.utils import groups

    by_mpu = layer_inputs(Grid(), partition_activations=True).codec(Keep()).current()
    error = ""
    try:
        layer_inputs(partition_activations=True).codec(Keep())
    except ValueError as refused:
        error = str(refused)
    groups._init_tp_mesh_device(tensor_model_parallel_size=2)
    for mpu in (None, groups):  # AutoTP makes the module the engine's mpu
        held = layer_inputs(mpu, partition_activations=True).codec(Keep()).encode(torch.ones(6, 2))
    return {
        "mpu": by_mpu.replicas.world,
        "error": error,
        "autotp": held.nbytes,
        "back": held.decode(),
    }


def trained_with_tensor_parallelism() -> dict[str, Any]:
    """DeepSpeed's AutoTP and AdamW, HMT's activations: from the JSON alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    found = {}
    for name, keys in (
        ("whole", {}),
        ("partitioned", {"partition_activations": True}),
        ("on the host", {"partition_activations": True, "cpu_checkpointing": True}),
    ):
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"autotp_size": 2},
            "activation_checkpointing": keys,
            "hmt": {"activations": {}},
        }
        engine = make_engine(config, LlamaForCausalLM(shape))
        for step in range(2):
            tokens = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        held = engine.hmt_activations.backend.report().held_bytes
        weights = [p.detach().clone() for p in engine.module.parameters()]
        found[name] = (weights, [sum(layer.values()) for layer in held.values()])
        engine.destroy()
    return found


def test_the_json_alone_under_autotp(ranks):
    layer_input = 2 * 8 * 32 * 4
    for found in ranks.run(trained_with_tensor_parallelism, 2):
        expected, whole = found["whole"]
        for name, held_part in (("partitioned", layer_input // 2), ("on the host", 0)):
            weights, held = found[name]
            assert_equal(weights, expected)
            less = [w - h for w, h in zip(whole, held, strict=True)]
            assert less == [layer_input - held_part] * 2 + [0]  # and the final norm's input


@pytest.mark.parametrize("cpu", [False, True])
def test_configured_partitioning_on_two_ranks(ranks, cpu):
    whole = BATCH * WIDTH * 4
    for found in ranks.run(configured_on_two_ranks, 2, cpu):
        assert found["bytes"] == [
            [whole] * 3,
            [0 if cpu else whole // 2] * 3,
            [0 if cpu else whole] * 3,
        ]


def test_model_parallel_groups_on_two_ranks(ranks):
    for found in ranks.run(groups_on_two_ranks, 2):
        assert found["mpu"] == 2
        assert "no model-parallel group" in found["error"]
        assert found["autotp"] == 3 * 2 * 4
        assert torch.equal(found["back"], torch.ones(6, 2))
