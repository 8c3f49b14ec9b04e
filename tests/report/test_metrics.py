"""Metrics file, summary, memory readings and tables."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from hmt_deepspeed.report.metrics import (
    MetricsWriter,
    device_memory,
    flops_utilization,
    format_bytes,
    format_table,
    host_bytes,
    machine_info,
    model_flops_per_token,
    peak_host_bytes,
    write_summary,
)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_is_on_disk_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "loss": torch.tensor(2.5), "rank": {"q": np.int64(8)}})
        assert lines(path) == [{"step": 1, "loss": 2.5, "rank": {"q": 8}}]
        writer.write({"step": 2, "loss": float("nan")})
        assert lines(path)[1]["loss"] is None
        with pytest.raises(ValueError, match="'step'"):
            writer.write({"loss": 1.0})


def test_resume_keeps_the_lines_before_it_and_drops_the_rest(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, 6):
            writer.write({"step": step})
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    with MetricsWriter(path, resume_step=3) as writer:
        writer.write({"step": 4, "again": True})
    assert lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": True}]
    with MetricsWriter(path, resume_step=100):
        pass
    assert len(lines(path)) == 4
    MetricsWriter(path).close()
    assert path.read_text() == ""


def test_summary_is_whole_or_absent(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, {"eval_loss": 1.5, "folder": tmp_path, "nothing": None})
    with pytest.raises(TypeError, match="object"):
        write_summary(path, {"bad": object()})
    assert json.loads(path.read_text()) == {
        "eval_loss": 1.5,
        "folder": str(tmp_path),
        "nothing": None,
    }
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_peak_host_bytes_sees_a_buffer_that_is_gone():
    before = peak_host_bytes()
    buffer = np.ones(32 << 20)  # 256 MiB
    assert host_bytes() > 256 << 20
    del buffer
    assert peak_host_bytes() >= max(before, 256 << 20)


def test_peak_host_bytes_is_not_inherited_from_the_parent():
    buffer = np.ones(64 << 20)  # 512 MiB here, nothing in the child
    code = "from hmt_deepspeed.report.metrics import peak_host_bytes; print(peak_host_bytes())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(child.stdout) < 256 << 20 < peak_host_bytes()
    del buffer


def test_device_memory_reads_the_accelerator_or_says_it_is_the_host():
    class Gpu:
        def device_name(self, device_index=None):
            return "cuda"

        def memory_allocated(self, device_index=None):
            return 5

        def max_memory_allocated(self, device_index=None):
            return 7

    assert device_memory(Gpu()) == ("cuda", 5, 7)
    name, allocated, peak = device_memory()
    assert name == "cpu (process RSS)"
    assert 0 < allocated <= peak


def test_utilization_of_ordinary_training():
    # PaLM 540B, table 4: 238.3K tokens/s on 6144 chips of 275 TFLOP/s, 46.2 % (45.7 % without attention)
    flops = model_flops_per_token(540_350_000_000, 118, 48 * 256, 2048)
    assert flops_utilization(238.3e3 * flops, 1.0, 6144 * 275e12) == pytest.approx(0.462, abs=5e-4)
    without = model_flops_per_token(540_350_000_000, 0, 0, 2048)
    assert flops_utilization(238.3e3 * without, 1.0, 6144 * 275e12) == pytest.approx(
        0.457, abs=5e-4
    )
    with pytest.raises(ValueError, match="above 0"):
        flops_utilization(1, 1, 0)


def test_machine_info_names_processor_and_versions():
    info = machine_info()
    assert info["cpu"]
    assert info["cpu_cores"] >= 1
    assert info["torch"] == torch.__version__.split("+")[0] or info["torch"] == torch.__version__


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]


def test_format_table():
    table = format_table([("q_proj", 1024, 0.123456), ("norm", None, 2.0)], ("name", "rank", "x"))
    assert table.splitlines() == [
        "name     rank       x",
        "------  -----  ------",
        "q_proj  1,024  0.1235",
        "norm        -       2",
    ]
    assert format_table([], ("a", "b")).splitlines() == ["a  b", "-  -"]
    with pytest.raises(ValueError, match="1 cells for 2 headers"):
        format_table([(1,)], ("a", "b"))
