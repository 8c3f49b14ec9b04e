"""torch.compile around projected linears, which stay out of its graphs; "eager" needs no compiler."""

import pytest
import torch
from hmt_runs import OPTIONS, WIDTHS, assert_same_weights, batches, train
from torch import nn

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
