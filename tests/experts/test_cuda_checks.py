"""Tests that a machine that cannot run device `cuda` gets a one-sentence error."""

from collections.abc import Sequence

import pytest
import torch

from tandem.core.errors import CapacityError, UnsupportedModelError
from tandem.devices.cuda.checks import Gpu, Probe, require_cuda, require_dtype
from tandem.devices.cuda.kernels import TritonKernels, best_kernels


class FakeProbe(Probe):
    """A machine that lacks something."""

    def __init__(
        self,
        gpus: Sequence[Gpu] = (),
        error: str = "",
        *,
        built: bool = True,
        built_for: Sequence[str] = (),
    ) -> None:
        self._gpus, self._error, self._built, self._built_for = gpus, error, built, built_for

    def built_for_cuda(self) -> bool:
        return self._built

    def count(self) -> int:
        if self._error:
            raise RuntimeError(self._error)
        return len(self._gpus)

    def gpu(self, index: int) -> Gpu:
        return self._gpus[index]

    def built_for(self) -> Sequence[str]:
        return self._built_for


OLD, TURING, HOPPER = (
    Gpu("Tesla P40", (6, 1), 24 << 30),
    Gpu("Tesla T4", (7, 5), 16 << 30),
    Gpu("NVIDIA H200", (9, 0), 141 << 30),
)


VOLTA = Gpu("Tesla V100", (7, 0), 16 << 30)
# Those of torch 2.11 for CUDA 12.8.
WHEELS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("probe", "sentence"),
    [
        (FakeProbe(built=False), "without CUDA.*device cpu"),
        (FakeProbe(error="Found no NVIDIA driver on your system."), "nvidia-smi"),
        (FakeProbe(error="The NVIDIA driver on your system is too old (found version 11040)."),
         "11040.*update the driver"),
        (FakeProbe(), "this machine has 0"),
        (FakeProbe([OLD]), r"Tesla P40 has compute capability 6\.1"),
        (FakeProbe([VOLTA], built_for=WHEELS), r"V100.* 7\.0, and this torch .*sm_75.*build of t"),
        (FakeProbe([TURING], built_for=["sm_80", "sm_90a"]), r"T4 has .* only for sm_80, sm_90a"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_sentence(probe: FakeProbe, sentence: str) -> None:
    with pytest.raises(CapacityError, match=sentence) as raised:
        require_cuda(probe)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (8, 9), (9, 0), (12, 1)])
def test_code_for_an_older_gpu_of_its_generation_runs(capability: tuple[int, int]) -> None:
    gpu = Gpu("a card", capability, 8 << 30)
    assert require_cuda(FakeProbe([gpu], built_for=WHEELS)) is gpu
    assert require_cuda(FakeProbe([gpu], built_for=["sm_50", "compute_70"])) is gpu


def test_a_gpu_without_bf16_takes_fp16() -> None:
    assert require_cuda(FakeProbe([HOPPER])) is HOPPER
    require_dtype(HOPPER, torch.bfloat16)
    require_dtype(TURING, torch.float16)
    with pytest.raises(UnsupportedModelError, match="dtype='float16'"):
        require_dtype(TURING, torch.bfloat16)


def test_before_ampere_tiles_are_those_of_ordinary_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # other tests run the kernels in this process
    for gpu, has_matrix_units in ((TURING, False), (HOPPER, True)):
        kernels = best_kernels(gpu)
        assert isinstance(kernels, TritonKernels)
        assert kernels._experts.has_matrix_units is has_matrix_units


def test_this_machine_says_why_it_has_no_gpu() -> None:
    if torch.cuda.is_available():
        require_cuda()
        return
    with pytest.raises(CapacityError):
        require_cuda()
