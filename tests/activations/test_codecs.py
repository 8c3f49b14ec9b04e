"""The forms of an activation: bytes as the formula says, the tensor back as often as asked, freed as garbage."""

import gc

import pytest
import torch
from backends import bytes_of
from torch.multiprocessing.reductions import StorageWeakRef

from hmt_deepspeed.activations.codecs import Fp8, Int8, Keep, build_codec

ON_DEVICE = ("keep", "int8", "fp8")
LOSSY = ("int8", "fp8")


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense():
    """By what is special about them: a tensor whose elements fill its memory, and its token dimensions."""
    return {
        "hidden": (randn(2, 75, 12), (0, 1)),
        "bf16": (randn(2, 75, 12, dtype=torch.bfloat16), (0, 1)),
        "fp16": (randn(150, 12, dtype=torch.float16), 0),
        "flash attention": (randn(2, 75, 3, 4).transpose(1, 2), (0, 2)),
        "eager attention": (randn(2, 3, 75, 4), (0, 2)),
        "sequence first": (randn(75, 2, 12).transpose(0, 1), (0, 1)),
        "transposed": (randn(12, 150).t(), 0),
        "negative dims": (randn(12, 5, 30).permute(1, 2, 0), (-3, -2)),
        "one token": (randn(12), ()),
        "one channel": (randn(150), 0),
        "empty": (randn(0, 12), 0),
    }


def with_gaps():
    base = randn(150, 24)
    return {
        "columns": (base[:, 3:15], 0),
        "every other": (base[::2], 0),
        "expanded tokens": (randn(1, 12).expand(150, 12), 0),
        "expanded heads": (randn(2, 75, 1, 4).expand(2, 75, 3, 4), (0, 1)),
    }


CASES = {**dense(), **with_gaps()}
KINDS = pytest.mark.parametrize("kind", CASES)


def tokens_and_channels(tensor, token_dims):
    dims = (token_dims,) if isinstance(token_dims, int) else token_dims
    tokens = 1
    for dim in dims:
        tokens *= tensor.shape[dim]
    return tokens, tensor.numel() // max(tokens, 1) if tokens else 12


@pytest.mark.parametrize("choice", ON_DEVICE)
@KINDS
def test_what_comes_back(choice, kind):
    tensor, dims = CASES[kind]
    options = {"block_size": 64} if choice in LOSSY else {}
    held = build_codec(choice, **options).encode(tensor, dims, key=3)
    held.prefetch()
    out = held.decode()
    assert (out.shape, out.dtype, out.device) == (tensor.shape, tensor.dtype, tensor.device)
    if choice == "keep" or kind in dense():
        assert out.stride() == tensor.stride()
    else:  # dense, in the same order of dimensions
        assert out.stride() == torch.empty_like(tensor).stride()
        assert out.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    limit = {"keep": 0.0, "int8": 0.015, "fp8": 0.06}[choice]
    assert (out.double() - tensor.double()).norm() <= limit * tensor.double().norm()
    assert torch.equal(held.decode(), out)


@pytest.mark.parametrize("choice", ON_DEVICE)
@pytest.mark.parametrize("block_size", [64, 256])
@pytest.mark.parametrize("kind", dense())
def test_bytes_are_the_formula(choice, block_size, kind):
    tensor, dims = CASES[kind]
    options = {"block_size": block_size} if choice in LOSSY else {}
    held = build_codec(choice, **options).encode(tensor, dims)
    tokens, channels = tokens_and_channels(tensor, dims)
    expected = bytes_of(choice, tokens, channels, tensor.itemsize, block_size)
    assert held.nbytes == expected
    if choice in LOSSY:  # and nothing else is alive
        storages = {
            id(t): t.untyped_storage().nbytes() for t in vars(held).values() if is_on_device(t)
        }
        assert sum(storages.values()) == expected


def is_on_device(value):
    return isinstance(value, torch.Tensor) and not value.is_meta


def test_kept_bytes_are_what_stays_alive():
    base = randn(100, 8)
    assert Keep().encode(base[:10]).nbytes == base.nbytes
    assert Keep().encode(randn(1, 8).expand(100, 8)).nbytes == 32


@pytest.mark.parametrize("kind", ["flash attention", "eager attention", "sequence first"])
def test_blocks_run_along_tokens_whatever_the_strides(kind):
    """A token with large values in one channel, encoded in blocks: other channels do not notice."""
    tensor, dims = CASES[kind]
    tensor = tensor.clone(memory_format=torch.preserve_format)
    tokens_last = [d for d in range(tensor.dim()) if d not in dims] + list(dims)
    loud = tensor.permute(tokens_last)  # channels first
    loud[(0,) * (tensor.dim() - len(dims))] *= 1000
    out = Int8(64).encode(tensor, dims).decode().permute(tokens_last)
    error = (out - loud).abs()
    error[(0,) * (tensor.dim() - len(dims))] = 0
    assert error.max() < 4 / 127 * 1.02  # a step, the largest of these Gaussians being below 4


# -- keep -----------------------------------------------------------------------------------------


def test_keep_is_the_tensor_itself_and_its_changes_are_noticed():
    tensor = randn(4, 4)
    held = Keep().encode(tensor, name="layers.3.mlp.up")
    assert held.decode().data_ptr() == tensor.data_ptr()
    tensor.view(-1)[0].add_(1)
    with pytest.raises(RuntimeError, match=r"'layers\.3\.mlp\.up' was changed by an in-place"):
        held.decode()


def test_changes_of_what_keep_decoded_are_noticed():
    """A second backward must not read what the first one's recomputation wrote."""
    held = Keep().encode(randn(4, 4))
    held.decode().relu_()
    with pytest.raises(RuntimeError, match="in-place"):
        held.decode()


# -- 8 bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Int8(64), Fp8(64)], ids=LOSSY)
def test_8_bits_are_a_copy(codec):
    tensor = randn(100, 8)
    held = codec.encode(tensor, key=1)
    first = held.decode()
    tensor.zero_()
    held.decode().zero_()
    assert torch.equal(held.decode(), first)
    assert first.any()


@pytest.mark.parametrize("choice", LOSSY)
def test_rounding_follows_the_key_and_not_the_global_generator(choice):
    tensor = randn(100, 8)
    codec = build_codec(choice)
    before = torch.get_rng_state()
    one, again, other = (codec.encode(tensor, key=key).decode() for key in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("choice", LOSSY)
def test_decoding_is_no_part_of_a_graph(choice):
    leaf = randn(10, 4).requires_grad_()
    held = build_codec(choice).encode(leaf * 2)
    assert not held.decode().requires_grad


@pytest.mark.parametrize("choice", ON_DEVICE)
def test_memory_is_freed_with_the_holder(choice):
    tensor = randn(100, 8)
    original = StorageWeakRef(tensor.untyped_storage())
    held = build_codec(choice).encode(tensor)
    gc.disable()  # by reference counts alone
    try:
        del tensor
        assert original.expired() is (choice in LOSSY)
        codes = held.codes if choice in LOSSY else held.decode()
        kept = StorageWeakRef(codes.untyped_storage())
        del codes
        assert not kept.expired()
        del held
        assert kept.expired()
    finally:
        gc.enable()


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ON_DEVICE)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_only_floating_point(choice, dtype):
    with pytest.raises(ValueError, match=rf"'mask' is {dtype}; {choice} holds floating-point"):
        build_codec(choice).encode(torch.ones(4, 4, dtype=dtype), name="mask")


@pytest.mark.parametrize("choice", LOSSY)
def test_8_bits_refuse(choice):
    codec = build_codec(choice)
    with pytest.raises(ValueError, match="float64"):
        codec.encode(randn(4, 4, dtype=torch.float64))
    for dims in (2, -3, (0, 0), (0, -2)):
        with pytest.raises(ValueError, match="token_dims of 'up'"):
            codec.encode(randn(4, 4), dims, name="up")
    with pytest.raises(ValueError, match="block_size"):
        build_codec(choice, block_size=0)


@pytest.mark.parametrize("choice", ["recompute", "project", "zip"])
def test_no_codec_for_what_holds_nothing(choice):
    with pytest.raises(ValueError, match=f"'{choice}' holds no tensor"):
        build_codec(choice)


@pytest.mark.parametrize("choice", ["swap_host", "swap_ssd", "swap_host_int8", "swap_host_fp8"])
def test_swap_needs_a_store(choice):
    with pytest.raises(ValueError, match="needs a store"):
        build_codec(choice)
