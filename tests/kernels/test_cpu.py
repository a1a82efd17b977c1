from pathlib import Path

import pytest

from tandem.kernels.cpu import detect_cpu

CPUINFO = Path("/proc/cpuinfo")


def test_instruction_sets_agree_with_the_kernels_word() -> None:
    if not CPUINFO.exists() or "flags" not in CPUINFO.read_text():
        pytest.fail("this test reads /proc/cpuinfo of an x86 Linux; run it there")
    flags = next(x for x in CPUINFO.read_text().splitlines() if x.startswith("flags")).split()
    # Linux does not list avx_vnni_int8 under this name on every version.
    found = set(detect_cpu().instruction_sets) - {"avx_vnni_int8"}
    assert found <= set(flags)
    for name in ("avx2", "fma", "avx512f", "avx512_vnni"):
        assert (name in found) == (name in flags)


def test_cores_and_caches_are_plausible() -> None:
    cpu = detect_cpu()
    assert 1 <= cpu.num_threads <= len(cpu.topology.cores) <= len(cpu.topology.usable)
    assert cpu.model_name
    assert 0 <= cpu.l1_data_bytes <= cpu.l2_bytes or cpu.l2_bytes == 0
