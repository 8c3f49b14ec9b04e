"""A tensor as bytes and back: every dtype and geometry, and no byte more than needed."""

import pytest
import torch
from memory_cases import assert_same, pattern, tensors

from hmt_deepspeed.memory.layout import flatten, new_like

CPU = torch.device("cpu")


def round_trip(tensor):
    layout, flat = flatten(tensor)
    result, target = new_like(layout, CPU)
    assert flat.dtype == target.dtype == torch.uint8
    assert flat.numel() == target.numel() == layout.nbytes
    target.copy_(flat)
    return result


@pytest.mark.parametrize("kind", tensors())
def test_round_trip(kind):
    tensor = tensors()[kind]
    assert_same(round_trip(tensor), tensor)


@pytest.mark.parametrize(
    ("kind", "elements"),
    [("expanded", 6), ("expanded inside", 24), ("expanded scalar", 1), ("expanded slice", 12)],
)
def test_repetitions_are_stored_once(kind, elements):
    tensor = tensors()[kind]
    assert flatten(tensor)[0].nbytes == elements * tensor.itemsize
    assert [s == 0 for s in round_trip(tensor).stride()] == [s == 0 for s in tensor.stride()]


@pytest.mark.parametrize("kind", ["transposed", "permuted", "channels last", "expanded"])
def test_what_has_no_gaps_is_not_copied(kind):
    tensor = tensors()[kind]
    assert flatten(tensor)[1].data_ptr() == tensor.data_ptr()


def test_gaps_go_and_the_order_of_dimensions_stays():
    assert round_trip(pattern(16, 12).t()[2:7]).stride() == (1, 5)


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "subclass": lambda: torch.ones(3).as_subclass(type("Wrapped", (torch.Tensor,), {})),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind):
    with pytest.raises(ValueError, match="can be moved"):
        flatten(REFUSED[kind]())
