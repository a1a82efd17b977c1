"""Tests of the GPU's lines in `tandem doctor`, on the CPU twin of CUDA."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tandem.devices.cuda.streams import Stream, Work
from tandem.experts.cache.sizing import DeviceMemory
from tandem.forecast.gpu_check import Driver, ask_nvidia_smi, check_gpu, parse_smi
from tandem.forecast.windows_check import Finding
from tests.experts.lazy_streams import LazyStreams
from tests.experts.test_cuda_checks import HOPPER, OLD, TURING, FakeProbe


class SlowStreams(LazyStreams):
    """A link that copies 256 MiB in a tenth of a second, and a GPU that is nearly full."""

    def seconds(self, stream: Stream, work: Work) -> float:
        super().seconds(stream, work)
        return 0.1

    def memory(self) -> DeviceMemory:
        return DeviceMemory(16 << 30, 1 << 30)


class Works:
    """A working way to signal between host and device."""

    name = "stream operations"


def by_name(
    probe: FakeProbe,
    streams: LazyStreams | None = None,
    driver: Driver | None = None,
    signals: Any = Works,
) -> dict[str, Finding]:
    findings = check_gpu(
        probe,
        lambda: streams or LazyStreams(),
        lambda: driver or parse_smi("580.65.06, 5, 16, 16"),
        lambda streams: signals,
    )
    return {finding.what: finding for finding in findings}


def test_a_good_gpu() -> None:
    found = by_name(FakeProbe([HOPPER]))
    assert list(found) == ["GPU", "driver", "link", "decode steps", "pinned memory"]
    assert {finding.state for finding in found.values()} == {"good"}
    assert found["GPU"].found.startswith("NVIDIA H200 (compute 9.0), 1 GiB free of 1 GiB")
    assert found["driver"].found == "580.65.06"
    assert found["link"].found == "268.4 GB/s to the GPU, PCIe 5 with 16 lanes"


def test_how_decode_steps_are_handed_over() -> None:
    good = by_name(FakeProbe([HOPPER]))["decode steps"]
    assert good.found == "one graph each, by stream operations"
    slow = by_name(FakeProbe([HOPPER]), signals=None)["decode steps"]
    assert slow.state == "slow"
    assert slow.found.startswith("a break at the experts of each layer")


def test_a_slow_link_and_a_full_gpu() -> None:
    found = by_name(FakeProbe([HOPPER]), SlowStreams())
    assert found["link"].state == "slow"
    assert found["link"].found.startswith("2.7 GB/s")
    assert found["GPU"].state == "slow"
    assert "nvidia-smi" in found["GPU"].remedy


def test_a_slot_with_fewer_lanes() -> None:
    link = by_name(FakeProbe([HOPPER]), driver=parse_smi("580.65.06, 4, 4, 16"))["link"]
    assert link.state == "slow"
    assert link.remedy.startswith("the card could use 16 lanes")


def test_a_gpu_without_room_for_the_copy() -> None:
    link = by_name(FakeProbe([HOPPER]), LazyStreams(total_bytes=1 << 20))["link"]
    assert (link.state, link.found) == ("slow", "not measured: no memory")


def test_a_gpu_without_bf16() -> None:
    assert "dtype='float16'" in by_name(FakeProbe([TURING]))["GPU"].remedy


@pytest.mark.parametrize(
    ("line", "driver"),
    [
        ("580.65.06, 5, 16, 16", Driver("580.65.06", 5, 16, 16)),
        ("550.1, [N/A], [N/A], [N/A]", Driver("550.1")),
        ("No devices were found", Driver()),
        ("", Driver()),
    ],
)
def test_what_nvidia_smi_prints(line: str, driver: Driver) -> None:
    assert parse_smi(line) == driver


@pytest.mark.parametrize("uuid", ["ab-cd", "GPU-ab-cd"])
def test_nvidia_smi_reports_on_one_gpu(
    uuid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1 $2" = "-i GPU-ab-cd" ] && echo "580.65.06, 5, 8, 16"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert ask_nvidia_smi(uuid) == Driver("580.65.06", 5, 8, 16)
    assert ask_nvidia_smi("another") == Driver()


def test_a_driver_that_says_nothing_leaves_the_speed() -> None:
    found = by_name(FakeProbe([HOPPER]), driver=Driver())
    assert list(found) == ["GPU", "link", "decode steps", "pinned memory"]
    assert found["link"].found == "268.4 GB/s to the GPU"


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (FakeProbe(built=False), "without CUDA"),
        (FakeProbe([OLD]), "compute capability 6.1"),
        (FakeProbe(error="The NVIDIA driver on your system is too old"), "update the driver"),
    ],
)
def test_why_a_driver_shows_no_gpu(
    probe: FakeProbe, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    (finding,) = by_name(probe).values()
    assert finding.state == "slow"
    assert reason in finding.found
    monkeypatch.setattr(shutil, "which", lambda _: None)
    (finding,) = by_name(probe).values()
    assert (finding.state, finding.found) == ("good", "none: every expert runs on the CPU")
