"""All that a step may change of what a rank has, bit for bit."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor


def held(optimizer: Any) -> dict[str, Tensor]:
    """Copies of this rank's weights, states, energies and bases, as they are stored."""
    found = {}
    for state in optimizer.zero.param_states:
        matrix, weight = state.matrix, state.weight
        with weight.shard() as shard:
            own = {"weight": shard.clone(), "master": weight.master}
        if hasattr(weight, "encoded"):
            own |= {"codes": weight.encoded.codes, "scales": weight.encoded.scales}
        if state.dense_state is not None:
            first, second, own["steps"] = state.dense_state
            own |= {"exp_avg": first.data, "exp_avg_sq": second.data}
        if matrix is not None:
            own |= {name: attrgetter(path)(matrix) for name, path in matrix.paths().items()}
            own |= {"draw": torch.tensor(matrix.draw)}
            columns = getattr(matrix, "columns", None)
            for kind in ("whole", "local"):
                stored = getattr(columns, kind, None)
                own[kind] = None if stored is None else stored[:, : matrix.rank]
        found |= {f"{state.name}: {key}": t.clone() for key, t in own.items() if t is not None}
    return found
