"""Tests of decode attention on a real GPU, against torch, also in bf16, at any length."""

import pytest
import torch

from tandem.decode.cuda.attention import decode_kernels
from tandem.kernels.attention import AttentionForm
from tests.gpu.models import DEVICE, IS_DRY
from tests.kernels.attention_cases import attend_both, form_of

pytestmark = pytest.mark.skipif(IS_DRY, reason="needs the Triton kernels")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    "form",
    [
        form_of(32, 4, 128, 128),
        form_of(64, 8, 64, 64, window=128),
        form_of(16, 2, 256, 256, softcap=50.0),
        form_of(16, 16, 192, 128),
    ],
    ids=str,
)
def test_kernels_give_what_torch_gives(form: AttentionForm, kv_dtype: str) -> None:
    kernels = decode_kernels(torch.device(DEVICE))
    assert kernels is not None
    expected, found = attend_both(
        kernels, form, [1, 5000, 333], kv_dtype=kv_dtype, dtype=torch.bfloat16, has_sinks=True,
        device=DEVICE,
    )  # fmt: skip
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.02
