"""Forward and backward of an ordinary step never wait for the device."""

import pytest
import torch
from tiny import MODELS, batch, fpdt, step, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from hmt_deepspeed.fpdt import masks
from hmt_deepspeed.fpdt.sequence import SequenceParallel

aten = torch.ops.aten
# What copies a value, or a number of values that only the device knows, to the host.
READS = (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.is_nonzero, aten.masked_select)


class NoReads(TorchDispatchMode):
    """Raises where the host would wait for the device, if the tensors were on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._overloadpacket not in READS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_without_masks(name):
    """Transformers would look for documents in the positions that the model itself counts."""
    model = tiny(name)
    with fpdt(model):
        step(model, batch())  # compares the model's mask rule, once for its shape
        with NoReads():
            step(model, batch(seed=2))
            with torch.no_grad():
                model(input_ids=batch(seed=3)["input_ids"])


def test_a_rule_is_compared_once_for_its_code_and_shape(monkeypatch):
    masks._check_plain.cache_clear()
    calls = []
    monkeypatch.setattr(masks, "_compare", lambda *given: calls.append(given))
    model = tiny("qwen2, one layer with a window")
    with fpdt(model):
        for seed in (1, 2, 3):
            step(model, batch(seed=seed))
        assert len(calls) == 2  # a rule for each kind of layer
        step(model, batch(length=9))
        assert len(calls) == 4


def test_masks_in_host_memory_are_read_there(monkeypatch):
    """Not by transformers' rule, whose tensors are on the device."""
    monkeypatch.setattr(masks, "_read", lambda *_: pytest.fail("asked the device"))
    model, inputs = tiny(), batch()
    inputs["position_ids"] = torch.tensor([[*range(10), *range(27)], [*range(37)]])
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with fpdt(model):
        step(model, inputs)
        mask = torch.ones(2, 37, dtype=torch.long)
        mask[0, 30:] = 0
        step(model, inputs | {"attention_mask": mask})
    packed, padded = seen
    assert (packed.documents, packed.lengths) == (((0, 10), (0,)), (37, 37))
    assert (padded.documents, padded.lengths) == (((0,), (0,)), (30, 37))


class TwoRanks:
    """A group whose other rank holds ``different`` more than this one."""

    rank, size, different = 0, 2, 0

    def exchange(self, parts, shapes):
        return [parts[0], parts[1] + self.different]


def test_rows_of_ranks_are_compared_without_a_wait():
    group = TwoRanks()
    sequence, rows = SequenceParallel(group), batch()["input_ids"]
    sequence.check_same(rows)
    group.different = 1
    sequence.check_same(rows)
    with pytest.raises(ValueError, match="different rows in the forward before this one"):
        sequence.check_same(rows)
    with pytest.raises(ValueError, match="got different rows: "):
        sequence.check_same(rows)
