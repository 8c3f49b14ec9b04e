"""What the recorder counts of single operations: a JSON of [launches, waits, unpinned copies] by name."""

from __future__ import annotations

import device

device.require()

import json  # noqa: E402
from collections.abc import Callable  # noqa: E402

import torch  # noqa: E402
from subjects import fake_device  # noqa: E402
from torch import Tensor  # noqa: E402

from hmt_deepspeed.kernels.stochastic_rounding import stochastic_round  # noqa: E402


def operations() -> dict[str, Callable[[], object]]:
    x, mask = torch.ones(256, 256, device="cuda"), torch.ones(256, dtype=torch.bool, device="cuda")
    host, pinned = torch.ones(256, 256), torch.empty(256, 256, pin_memory=True)
    rounded = torch.empty(256, 256, dtype=torch.bfloat16, device="cuda")
    many: list[Tensor] = [torch.ones(8, device="cuda") for _ in range(200)]
    large = [torch.ones(2**16 * 400, device="cuda")]
    halves = [t.bfloat16() for t in many]
    return {
        "a view": lambda: x.t()[:8].unsqueeze(0),
        "an allocation": lambda: torch.empty_like(x),
        "zeros": lambda: torch.zeros(8, device="cuda"),
        "on the host": lambda: host + 1,
        "a product and a sum": lambda: (x @ x).add_(1),
        "item": lambda: x[0, 0].item(),
        "of a bool": lambda: bool((x > 0).all()),
        "to the host": lambda: x.cpu(),
        "to pinned memory, no wait": lambda: pinned.copy_(x, non_blocking=True),
        "to pageable memory": lambda: host.copy_(x, non_blocking=True),
        "from pinned memory, no wait": lambda: x.copy_(pinned, non_blocking=True),
        "from a part of pinned memory": lambda: x[:8].copy_(pinned[:8], non_blocking=True),
        "from pageable memory": lambda: host.to("cuda"),
        "a number": lambda: torch.tensor(1.0, device="cuda"),
        "by a mask": lambda: x[mask],
        "an eigenvalue problem": lambda: torch.linalg.eigh(x),
        "foreach of 200": lambda: torch._foreach_add_(many, 1.0),
        "foreach of two lists": lambda: torch._foreach_add_(many, many),
        "foreach of 400 blocks": lambda: torch._foreach_mul_(large, 2.0),
        "foreach of two dtypes": lambda: torch._foreach_add_(many, halves),
        "a cat of 200": lambda: torch.cat(many),
        "a stream": lambda: torch.cuda.current_stream().synchronize(),
        "an event": lambda: torch.cuda.Event().synchronize(),
        "a kernel of Triton": lambda: stochastic_round(x, rounded, 5),
    }


def main() -> None:
    found: dict[str, list[int]] = {}
    with fake_device() as recorder:
        for name, operation in operations().items():
            with recorder.counting() as counts:
                operation()
            totals = counts.totals()
            found[name] = [totals[key] for key in ("launches", "waits", "unpinned")]
        try:
            torch.ones(8, device="cuda") + torch.ones(8)
        except RuntimeError as error:
            found["two devices"] = ["two devices" if "same device" in str(error) else str(error)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
