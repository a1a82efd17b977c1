"""The KV cache under a model: int8 is near, and what does not fit is refused with its size."""

from typing import Any

import pytest
import torch

from tandem.core.errors import CapacityError
from tandem.hf.rows import CachedRows
from tandem.kernels.dense import CpuThreads
from tests.architectures import build_tiny_model


@pytest.fixture(scope="module")
def threads() -> CpuThreads:
    return CpuThreads(num_threads=2)


def test_int8_keys_and_values_write_nearly_the_same(threads: CpuThreads) -> None:
    model: Any = build_tiny_model("qwen3_moe")
    logits, sizes = [], []
    for kv_dtype in ("auto", "int8"):
        rows = CachedRows(model, threads, [[40, 41, 42], [60] * 90], 8, kv_dtype=kv_dtype)
        steps = [rows.prefill(), *(rows.decode([50 + i, 60 + i]).clone() for i in range(8))]
        logits.append(torch.stack(steps))
        sizes.append(rows.cache.num_bytes)
        assert rows.step.is_replaying
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < error < 0.02
    assert sizes[1] < 0.4 * sizes[0]  # fp32 before


def test_a_kv_cache_larger_than_memory_is_refused_with_its_size(
    monkeypatch: pytest.MonkeyPatch, threads: CpuThreads
) -> None:
    model: Any = build_tiny_model("qwen3_moe")
    rows = CachedRows(model, threads, [[40, 41]] * 2, 8)
    rows.prefill()
    per_token = rows.cache.num_bytes / 2 / 256
    monkeypatch.setattr("tandem.offload.host_memory.available_bytes", lambda: 1 << 20)
    with pytest.raises(CapacityError, match=r"2 rows of \d+ tokens takes .* 1 MiB .*='int8'"):
        CachedRows(model, threads, [[40] * int((1 << 20) / per_token)] * 2, 8).prefill()
    before = rows.decode([50, 51]).clone()
    with pytest.raises(CapacityError):
        rows.cache.pretend(int((2 << 20) / per_token))
    rows.cache.truncate(0, 2)  # it goes on with what it has
    rows.cache.truncate(1, 2)
    torch.testing.assert_close(rows.decode([50, 51]), before)
