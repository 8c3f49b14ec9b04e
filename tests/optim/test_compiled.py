"""torch.compile around projected linears, which stay out of its graphs; the "eager" backend needs no compiler."""

import pytest
import torch
from hmt_runs import OPTIONS, WIDTHS, assert_same_weights, batches, train
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hmt_deepspeed.optim.hmt import HMT


class Network(nn.Module):
    """Not a loop over modules, which Dynamo leaves as it is where one of them breaks the graph."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        n, hidden, _, m = WIDTHS
        self.up, self.gate = nn.Linear(n, hidden), nn.Linear(n, hidden)
        self.down = nn.Linear(hidden, m)

    def forward(self, x):
        return torch.tanh(self.down(torch.sigmoid(self.gate(x)) * self.up(x)))


@pytest.mark.parametrize(
    "options", [{}, {"projection": "left"}, {"weight_dtype": "int8"}], ids=["right", "left", "int8"]
)
def test_a_compiled_model_trains_as_it_is(options):
    """Over two refreshes: what a linear's backward does differs between windows."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    losses, models = {}, {}
    for name in ("eager", "compiled"):
        models[name] = model = Network()
        optimizer = HMT(model, **OPTIONS, **options)
        called = torch.compile(model, backend=backend) if name == "compiled" else model
        losses[name] = train(called, optimizer, batches(9))
        optimizer.close()
    assert graphs, "nothing was compiled"
    assert losses["compiled"] == losses["eager"]
    assert_same_weights(models["compiled"], models["eager"])


@pytest.mark.slow
@pytest.mark.parametrize("projection", ["right", "left"])
def test_a_llama_under_inductor(projection):
    """Its kernels add in another order than eager ones: equal but for fp32's rounding."""
    losses = []
    for compiled in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128,
                hidden_size=64,
                intermediate_size=160,
                num_hidden_layers=2,
                num_attention_heads=4,
            )
        )
        optimizer = HMT(model, lr=1e-3, rank=8, update_interval=4, projection=projection)
        called = torch.compile(model) if compiled else model
        losses.append([])
        for step in range(9):
            tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(step))
            loss = called(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        optimizer.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
