"""What the user set returns, whichever of torch's settings it was, however many blocks there were."""

import threading

import pytest
import torch

from hmt_deepspeed.kernels.precision import fp32_products

MATMUL = torch.backends.cuda.matmul
newer = pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="torch 2.9's setting")


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    torch.set_float32_matmul_precision("highest")
    if hasattr(MATMUL, "fp32_precision"):
        torch.backends.fp32_precision = "none"
        MATMUL.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("precision", ["high", "medium", "highest"])
def test_the_setting_of_the_process(precision):
    torch.set_float32_matmul_precision(precision)
    with fp32_products():
        assert torch.get_float32_matmul_precision() == "highest"
        with fp32_products():
            pass
        assert torch.get_float32_matmul_precision() == "highest"
        assert not MATMUL.allow_tf32
    assert torch.get_float32_matmul_precision() == precision


def test_what_transformers_sets():
    MATMUL.allow_tf32 = True
    with fp32_products():
        assert not MATMUL.allow_tf32
    assert MATMUL.allow_tf32


@newer
@pytest.mark.parametrize("holder", [torch.backends, MATMUL])
def test_the_setting_of_a_backend(holder):
    holder.fp32_precision = "tf32"
    with fp32_products():
        assert MATMUL.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert MATMUL.fp32_precision == "tf32"


def test_an_error_and_a_decorated_function():
    torch.set_float32_matmul_precision("high")

    @fp32_products()
    def fails():
        assert torch.get_float32_matmul_precision() == "highest"
        raise KeyError("x")

    for _ in range(2):
        with pytest.raises(KeyError):
            fails()
        assert torch.get_float32_matmul_precision() == "high"


def test_a_thread_that_leaves_first_takes_nothing_from_another():
    torch.set_float32_matmul_precision("high")
    entered, left = threading.Event(), threading.Event()

    def other():
        with fp32_products():
            entered.set()
            assert left.wait(60)
            found.append(torch.get_float32_matmul_precision())

    found = []
    thread = threading.Thread(target=other)
    with fp32_products():
        thread.start()
        assert entered.wait(60)
    left.set()
    thread.join()
    assert found == ["highest"]
    assert torch.get_float32_matmul_precision() == "high"
