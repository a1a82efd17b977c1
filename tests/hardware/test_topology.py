"""Tests of default threads and their processors, from system files of real PCs and this one."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.hardware.topology import parse_processors, read_topology
from tandem.kernels.cpu import detect_cpu

CPUS = Path("sys/devices/system/cpu")
CPUINFO = Path("/proc/cpuinfo")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def write_cores(
    root: Path, cores: Sequence[Sequence[int]], *, capacities: Sequence[int] = ()
) -> range:
    """Write the cores' hyper-threads and capacities; return all processor numbers."""
    for number, siblings in enumerate(cores):
        for processor in siblings:
            directory = root / CPUS / f"cpu{processor}"
            text = ",".join(str(other) for other in siblings)
            write(directory / "topology" / "thread_siblings_list", text)
            if capacities:
                write(directory / "cpu_capacity", str(capacities[number]))
    return range(sum(len(siblings) for siblings in cores))


def pairs(first: int, count: int) -> list[tuple[int, ...]]:
    """Return cores whose two hyper-threads have consecutive numbers."""
    return [(first + 2 * core, first + 2 * core + 1) for core in range(count)]


def singles(first: int, count: int) -> list[tuple[int, ...]]:
    return [(first + core,) for core in range(count)]


def test_six_fast_and_eight_slow_cores_by_kind(tmp_path: Path) -> None:
    usable = write_cores(tmp_path, pairs(0, 6) + singles(12, 8))
    write(tmp_path / "sys/devices/cpu_core/cpus", "0-11")
    write(tmp_path / "sys/devices/cpu_atom/cpus", "12-19")
    found = read_topology(usable, tmp_path)
    assert found.num_threads == 6
    assert found.places(6) == (0, 2, 4, 6, 8, 10)
    assert found.places(14) == found.cores == (0, 2, 4, 6, 8, 10, *range(12, 20))
    assert found.places(20) == tuple(usable)
    assert found.describe() == "14 physical, 20 logical: 6 threads, as 8 cores are slow"


def test_eight_fast_and_sixteen_slow_cores_by_capacity(tmp_path: Path) -> None:
    capacities = [1024] * 8 + [620] * 16
    usable = write_cores(tmp_path, pairs(0, 8) + singles(16, 16), capacities=capacities)
    found = read_topology(usable, tmp_path)
    assert found.fast_cores == tuple(range(0, 16, 2))
    assert found.num_threads == 8


def test_cores_that_differ_little_all_count(tmp_path: Path) -> None:
    usable = write_cores(tmp_path, singles(0, 8), capacities=[1024, 1009, 1009, 980] * 2)
    assert read_topology(usable, tmp_path).num_threads == 8


def test_two_dies_with_hyper_threads_far_apart(tmp_path: Path) -> None:
    usable = write_cores(tmp_path, [(core, core + 16) for core in range(16)])
    found = read_topology(usable, tmp_path)
    assert found.fast_cores == tuple(range(16))
    assert found.describe() == "16 physical, 32 logical: 16 threads, one a core"


def test_without_hyper_threads(tmp_path: Path) -> None:
    usable = write_cores(tmp_path, singles(0, 8))
    found = read_topology(usable, tmp_path)
    assert (found.num_threads, found.places(8)) == (8, tuple(range(8)))


def test_slow_cores_alone_are_used(tmp_path: Path) -> None:
    write_cores(tmp_path, pairs(0, 6) + singles(12, 8))
    write(tmp_path / "sys/devices/cpu_core/cpus", "0-11")
    assert read_topology(range(12, 20), tmp_path).fast_cores == tuple(range(12, 20))


def test_processors_that_are_offline_or_forbidden_do_not_count(tmp_path: Path) -> None:
    write_cores(tmp_path, pairs(0, 4))
    found = read_topology([1, 4, 5], tmp_path)
    assert found.cores == (1, 4)
    assert found.places(3) == (1, 4, 5)


def test_hidden_files_make_each_processor_a_core(tmp_path: Path) -> None:
    found = read_topology([0, 1, 2, 3], tmp_path)
    assert (found.num_threads, found.quota) == (4, None)


@pytest.mark.parametrize(
    ("limit", "threads"), [("150000 100000", 1), ("300000 100000", 3), ("20000 100000", 1)]
)
def test_a_containers_limit(tmp_path: Path, limit: str, threads: int) -> None:
    usable = write_cores(tmp_path, singles(0, 8))
    write(tmp_path / "sys/fs/cgroup/cpu.max", limit)
    found = read_topology(usable, tmp_path)
    assert found.num_threads == threads
    assert f"limit of {int(limit.split()[0]) / 1e5:.1f}: {threads} thread" in found.describe()


def test_the_lowest_limit_of_a_group_and_those_above_it_holds(tmp_path: Path) -> None:
    usable = write_cores(tmp_path, singles(0, 8))
    write(tmp_path / "proc/self/cgroup", "0::/user.slice/app.scope")
    write(tmp_path / "sys/fs/cgroup/user.slice/cpu.max", "400000 100000")
    write(tmp_path / "sys/fs/cgroup/user.slice/app.scope/cpu.max", "max 100000")
    assert read_topology(usable, tmp_path).quota == 4


def test_limits_of_version_1(tmp_path: Path) -> None:
    usable = write_cores(tmp_path, singles(0, 8))
    write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert read_topology(usable, tmp_path).num_threads == 2


@pytest.mark.parametrize("limit", ["max 100000", "", "many 100000", "-1 100000", "100000 0"])
def test_no_limit(tmp_path: Path, limit: str) -> None:
    usable = write_cores(tmp_path, singles(0, 4))
    write(tmp_path / "sys/fs/cgroup/cpu.max", limit)
    assert read_topology(usable, tmp_path).quota is None


@pytest.mark.parametrize(
    ("cores", "limit", "expected"),
    [
        (singles(0, 16), "max", 14),  # a virtual machine that shows no hyper-threads
        (singles(0, 8), "max", 6),
        (singles(0, 6), "max", 5),
        (singles(0, 4), "max", 3),
        (singles(0, 2), "max", 2),
        (singles(0, 1), "max", 1),
        (pairs(0, 8), "max", 8),  # the others get the second hyper-threads
        (pairs(0, 8), "900000", 7),
        (pairs(0, 8), "50000", 1),
    ],
)
def test_threads_that_spin_beside_a_gpu_get_processors(
    tmp_path: Path, cores: Sequence[Sequence[int]], limit: str, expected: int
) -> None:
    usable = write_cores(tmp_path, cores)
    write(tmp_path / "sys/fs/cgroup/cpu.max", f"{limit} 100000")
    found = read_topology(usable, tmp_path)
    assert found.threads_beside(2) == expected
    assert found.threads_beside(0) == found.num_threads


def test_lists_of_processors() -> None:
    assert parse_processors("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_processors("") == set()
    with pytest.raises(ValueError, match="invalid literal"):
        parse_processors("some")


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
