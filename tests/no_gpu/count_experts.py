"""Launches and host waits of the forward and backward of a mixture's experts, on a CUDA device that is not there.

python tests/no_gpu/count_experts.py     a line of JSON for each number of experts and way to compute their gradients
"""

from __future__ import annotations

import device

device.require()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "optim"))

import expert_modules  # noqa: E402
import torch  # noqa: E402
from recorder import Recorder  # noqa: E402
from subjects import fake_device  # noqa: E402

TOKENS, TOP_K, RANK = 512, 2, 32
BASES = {"shared": ("width", False), "own": ("input", True)}


def count(num_experts: int, basis: str | None, biases: bool, recorder: Recorder) -> dict[str, Any]:
    """Totals of forward and backward; ``basis`` None: by autograd."""
    expert_modules.E = num_experts
    sizes = {"dtype": torch.bfloat16, "device": "cuda"}
    with torch.device("cuda"):
        module = expert_modules.experts(torch.bfloat16, "grouped_mm", has_bias=biases)
    if basis is not None:
        links = expert_modules.links_of(module, *BASES[basis], RANK)
        for link in links.values():
            link.projection = link.projection.to("cuda")
        expert_modules.patch(module, links)
    x = torch.zeros(TOKENS, expert_modules.H, **sizes).requires_grad_()
    index = torch.zeros(TOKENS, TOP_K, dtype=torch.long, device="cuda")
    weights = torch.zeros(TOKENS, TOP_K, **sizes).requires_grad_()
    with recorder.counting() as forward:
        y = module(x, index, weights)
    with recorder.counting() as backward:
        y.backward(torch.ones_like(y))
    return {"forward": forward.totals(), "backward": backward.totals()}


def main() -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    with fake_device() as recorder:
        for biases in (False, True):
            for basis in (None, *BASES):
                for num_experts in (8, 64):
                    found = count(num_experts, basis, biases, recorder)
                    print(json.dumps([basis, biases, num_experts, found]), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # else the thread of a device that is not there may end the process by itself
