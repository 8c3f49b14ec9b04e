"""What "auto" probes are."""

import pytest

from hmt_deepspeed.config.probes import auto_probes


@pytest.mark.parametrize("rank", [*range(1, 70), 128, 500, 1000])
@pytest.mark.parametrize("residual", ["probe", "none"])
def test_a_gpu_has_the_next_number_that_makes_all_columns_a_multiple_of_16(
    rank: int, residual: str
) -> None:
    on_cpu = auto_probes(rank, residual, on_gpu=False)
    assert on_cpu == max(8, rank // 4 if residual == "probe" else 0)
    on_gpu = auto_probes(rank, residual, on_gpu=True)
    assert (rank + on_gpu) % 16 == 0
    assert on_cpu <= on_gpu < on_cpu + 16
