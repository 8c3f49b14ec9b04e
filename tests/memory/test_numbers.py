"""Records of which the device has some values."""

import torch

from hmt_deepspeed.memory.numbers import ArrivingNumbers, Measured, measured_together


def test_parts_get_their_own_values():
    mean = Measured(
        {"bytes": 3, "mean": None},
        torch.tensor([0.1, 0.2]),
        lambda read: {"mean": sum(read) / len(read)},
    )
    norm = Measured(
        {"norm": None}, torch.tensor([0.3], dtype=torch.float64), lambda read: {"norm": read[0]}
    )
    nothing = Measured({"bytes": 4}, torch.zeros(0), lambda read: {})
    both = measured_together([mean, nothing, norm])
    assert list(both.read()) == ["bytes", "mean", "norm"]
    assert both.read() == {"bytes": 4, "mean": mean.read()["mean"], "norm": 0.3}
    assert both.record(ArrivingNumbers(both.values).read()) == both.read()


def test_values_of_a_step_are_not_those_of_the_next():
    values = torch.tensor([1.0, 2.0])
    arriving = ArrivingNumbers(values)
    values.fill_(7.0)
    assert arriving.have_arrived()
    assert arriving.read() == [1.0, 2.0]
