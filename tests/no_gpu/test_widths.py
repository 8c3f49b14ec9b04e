"""Columns of the projections on a CUDA device, without one: planned and drawn."""

import json

import pytest
from forked_device import output_of

from hmt_deepspeed.planner.model.shapes import parameters, plain_shape
from hmt_deepspeed.planner.run.modes import OptimizerMode
from hmt_deepspeed.planner.run.states import gradient_columns

pytest.importorskip("triton")

FIELDS = [
    {"rank": 100},
    {"rank": 0.1, "residual": "none"},
    {"rank": 500},  # of 512 columns, half of whose rest is fewer than 16
    {"rank": 100, "projection": "left"},
    {"rank": 100, "probes": 9},
]


def test_every_projection_has_a_multiple_of_16_columns_but_by_the_users_own_probes():
    found = json.loads(output_of("widths.py", json.dumps(FIELDS)).splitlines()[-1])
    shape = plain_shape(
        layers=1, hidden=512, heads=4, vocab=32000, intermediate=512 * 43 // 16, gated=True
    )
    for fields, matrices in zip(FIELDS, found, strict=True):
        mode = OptimizerMode(**fields)
        planned = {
            parameter.name.replace("*", "0"): gradient_columns(parameter, mode)[1]
            for parameter in parameters(shape)
            if mode.is_low_rank(parameter)
        }
        assert planned == {name: width for name, (_, width, _) in matrices.items()}
        for rank, width, columns in matrices.values():
            assert width == columns > rank
            assert width == 109 if "probes" in fields else width % 16 == 0
