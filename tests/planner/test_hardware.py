"""Named machines, their limits, and JSON."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from hmt_deepspeed.planner.hardware import (
    MACHINES,
    Machine,
    MatmulRates,
    machine_from_json,
    named_machine,
)

GIB = 2**30


def test_names():
    assert set(MACHINES) == {"rtx4090", "rtx3090", "rtx4080", "a100-80g", "h100", "h200"}


@pytest.mark.parametrize("name", MACHINES)
def test_a_named_machine_is_possible(name):
    machine = named_machine(name)
    assert machine.name == name
    assert machine.matmul.bf16 <= machine.peak_flops  # products never beat the datasheet
    assert machine.both_directions >= max(machine.device_to_host, machine.host_to_device)
    assert machine.ssd_write <= machine.ssd_mixed <= machine.ssd_read


def test_memory_and_ssds_are_settable():
    machine = named_machine(
        "rtx4090", num_gpus=4, host_memory=768 * GIB, num_ssds=12, price_per_hour=1.5
    )
    assert (machine.host_memory, machine.num_ssds, machine.price_per_hour) == (768 * GIB, 12, 1.5)
    assert machine.ssd_memory == 12 * machine.ssd_capacity
    assert machine.total_ssd_read == 12 * machine.ssd_read
    limited = replace(machine, ssd_array_limit=32e9)
    assert (limited.total_ssd_read, limited.total_ssd_write) == (32e9, 32e9)
    assert replace(limited, num_ssds=2).total_ssd_mixed == 2 * machine.ssd_mixed
    assert named_machine("rtx4090", num_ssds=0).ssd_memory == 0


@pytest.mark.parametrize("name", MACHINES)
def test_json_there_and_back(name):
    machine = named_machine(name, num_gpus=2, price_per_hour=3.0)
    assert machine_from_json(machine.to_json()) == machine


def test_json_may_leave_out_what_has_a_default():
    found = json.loads(named_machine("h100").to_json())
    kept = {k: v for k, v in found.items() if not k.startswith(("ssd", "num", "price", "gpus"))}
    machine = machine_from_json(json.dumps(kept))
    assert (machine.num_ssds, machine.num_gpus, machine.ssd_memory) == (0, 1, 0)


def edited(**changes):
    found = json.loads(named_machine("rtx3090").to_json())
    return json.dumps({k: v for k, v in {**found, **changes}.items() if v != "removed"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"no JSON"),
        ("[1]", r"\[1\]; legal"),
        (edited(gpu_memory="removed"), r"lacks \['gpu_memory'\]"),
        (edited(gpu_memroy=1), r"unknown \['gpu_memroy'\].*legal keys"),
        (edited(matmul=3), r"matmul is 3; legal"),
        (edited(matmul={"bf16": 1.0}), r"matmul lacks \['fp16', 'fp32'\]"),
        (edited(device_to_host="fast"), r"device_to_host is 'fast'; legal"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(ValueError, match=message):
        machine_from_json(text)


def test_an_unknown_name_lists_the_legal_ones():
    with pytest.raises(ValueError, match=r"'rtx5090'; legal: rtx4090.*h200.*profile.json"):
        named_machine("rtx5090")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_to_host": 0.0}, "device_to_host is 0.0; legal: a finite number above 0"),
        ({"ssd_write": 0.0}, "ssd_write is 0.0; legal"),
        ({"host_to_device": float("nan")}, "host_to_device is nan"),
        ({"ssd_read": float("inf")}, "ssd_read is inf"),
        ({"cpu_adam_ns": -1.0}, "cpu_adam_ns is -1.0"),
        ({"gpu_memory": 0}, "gpu_memory is 0"),
        ({"gpu_memory": True}, "gpu_memory is True"),
        ({"num_gpus": 0}, "num_gpus is 0; legal: an integer >= 1"),
        ({"num_gpus": 1.5}, "num_gpus is 1.5"),
        ({"gpus_per_link": 2}, "gpus_per_link is 2; legal: 1..1"),
        ({"both_directions": 1e12}, "both_directions is .*; legal: at most 5e.10"),
        ({"ssd_mixed": 1e12}, "ssd_mixed is .*; legal: at most"),
        ({"ssd_array_limit": 0.0}, "ssd_array_limit is 0.0"),
        ({"price_per_hour": -2.0}, "price_per_hour is -2.0"),
        ({"num_ssds": -1}, "num_ssds is -1"),
    ],
)
def test_impossible_machines(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(named_machine("rtx4090"), **changes)


def test_without_ssds_their_rates_do_not_matter():
    zeros = {f.name: 0 for f in fields(Machine) if f.name in ("ssd_read", "ssd_write", "ssd_mixed")}
    machine = replace(named_machine("h200"), num_ssds=0, **zeros)
    assert machine.total_ssd_write == 0


def test_rates_are_positive():
    with pytest.raises(ValueError, match=r"matmul\.fp16 is 0; legal"):
        MatmulRates(1.0, 0, 1.0)
