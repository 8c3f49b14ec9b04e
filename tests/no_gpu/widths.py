"""Rank, width and columns of every projection by its matrix, for each of some fields of hmt.optimizer: a line of JSON.

python tests/no_gpu/widths.py '[{"rank": 100}]'
"""

from __future__ import annotations

import device

device.require()

import json  # noqa: E402
import sys  # noqa: E402

from subjects import Case, fake_device, model_of  # noqa: E402

from hmt_deepspeed import HMT  # noqa: E402


def main() -> None:
    found = []
    with fake_device():
        for fields in json.loads(sys.argv[1]):
            optimizer = HMT(model_of(Case("bare", "right", 1, hidden=512)), lr=1e-3, **fields)
            matrices = optimizer.matrices.items()
            found.append({name: (m.rank, m.width, m.projection.shape[1]) for name, m in matrices})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
