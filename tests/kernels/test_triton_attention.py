"""Tests of decode attention in Triton: interpreted against torch, and compiled for real GPUs."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.kernels.attention import AttentionForm, Segment
from tandem.kv_cache.attention_call import AttentionCall
from tandem.kv_cache.cuda.cache import StaticKvCache
from tandem.kv_cache.cuda.layers import DecodeKernels
from tests.kernels.attention_cases import VARIANTS, attend_both, form_of
from tests.kernels.interpreter import interpreted_module
from tests.kernels.test_triton import SHARED_KIB, compiler_says

pytest.importorskip("triton")
CPU = torch.device("cpu")


triton_attention = interpreted_module("tandem.triton_kernels.decode_attention")


@pytest.fixture(scope="module")
def kernels(triton_attention: ModuleType) -> DecodeKernels:
    """Attention for a GPU with twelve multiprocessors."""
    found: DecodeKernels = triton_attention.DecodeAttention(12)
    return found


def require_same(*given: Any, **more: Any) -> None:
    expected, found = attend_both(*given, **more)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "form", [form_of(8, 2, 64, 64), form_of(4, 2, 288, 300)], ids=["64", "300"]
)
def test_small_tiles_give_what_torch_gives(
    triton_attention: ModuleType, form: AttentionForm
) -> None:
    """Cards before 8.0 have small tiles: with large dimensions, each program computes a part."""
    kernels = triton_attention.DecodeAttention(12, has_small_tiles=True)
    require_same(kernels, form, [70, 3])


@pytest.mark.parametrize(
    ("form", "lengths"),
    [
        (form_of(1, 1, 16, 16), [0]),
        (form_of(4, 4, 8, 8), [1, 0]),
        (form_of(8, 2, 64, 64), [255, 3, 70]),
        (form_of(6, 3, 80, 48), [130]),
        (form_of(20, 1, 96, 64), [33, 700]),
        (form_of(4, 2, 192, 128), [65, 64]),
    ],
    ids=lambda value: (
        str(value) if isinstance(value, list) else f"{value.num_heads}-{value.key_dim}"
    ),
)
def test_what_torch_gives_whatever_shapes_and_lengths(
    kernels: DecodeKernels, form: AttentionForm, lengths: list[int]
) -> None:
    require_same(kernels, form, lengths)


@pytest.mark.parametrize("more", VARIANTS, ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_softcaps_and_sinks(
    kernels: DecodeKernels, more: dict[str, Any], has_sinks: bool
) -> None:
    form = form_of(8, 2, 32, 32, **more)
    require_same(kernels, form, [150, 2, 63], has_sinks=has_sinks)


def test_windows_that_keep_prompts(kernels: DecodeKernels) -> None:
    """The first decoded tokens slide out of the window; a prompt may be empty or short."""
    form = form_of(4, 2, 16, window=4, keeps_prompt=True)
    require_same(kernels, form, [70, 0, 9], steps=9)


@pytest.mark.parametrize("window", [0, 40])
def test_a_bias_by_distance_and_sinks_of_each_token(kernels: DecodeKernels, window: int) -> None:
    require_same(kernels, form_of(8, 2, 32, window=window), [150, 2, 63], extent=50)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "tolerance"),
    [
        ("int8", torch.float32, 2e-3),  # ties may be rounded to the other side
        ("bf16", torch.float32, 4e-3),  # the interpreter cuts off where others round
        ("auto", torch.float16, 2e-3),
        ("int8", torch.float16, 4e-3),
    ],
)
def test_keys_and_values_of_other_dtypes(
    kernels: DecodeKernels, kv_dtype: str, dtype: torch.dtype, tolerance: float
) -> None:
    """The interpreter cannot multiply bf16 matrices; tests/gpu does."""
    form = form_of(8, 2, 64, 32)
    expected, found = attend_both(
        kernels, form, [90, 5], kv_dtype=kv_dtype, dtype=dtype, has_sinks=True
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert float((ours - theirs).norm() / theirs.norm()) < tolerance


def test_int8_keys_are_near_exact_ones(kernels: DecodeKernels) -> None:
    form = form_of(4, 2, 64, 64)
    (exact, _), _ = attend_both(kernels, form, [200])
    _, (rounded, _) = attend_both(kernels, form, [200], kv_dtype="int8")
    assert float((rounded - exact).norm() / exact.norm()) < 0.02


def test_a_latent_is_key_and_value_at_once(triton_attention: ModuleType) -> None:
    """A position has 576 numbers, of which the first 512 are its value; memory is read once."""
    random = torch.Generator().manual_seed(2)
    heads, length = 20, 150
    form = form_of(heads, 1, 576, 512)
    keys = torch.randn(1, 1, 256, 576, generator=random)
    where = torch.tensor([keys.data_ptr()] * 4 + [256])
    query = torch.randn(heads, 1, 576, generator=random)
    new = torch.randn(1, 1, 576, generator=random)
    kernels = triton_attention.DecodeAttention(4)
    places = torch.tensor([0]), torch.tensor([length])
    kernels.store(where, *places, new, new[..., :0], "fp32")
    torch.testing.assert_close(keys[0, 0, length], new[0, 0])
    out = kernels.attend(form, where, *places, query, None, "fp32", has_values=False)
    scores = (query[:, 0] @ keys[0, 0, : length + 1].T * form.scale).softmax(-1)
    torch.testing.assert_close(
        out[0], scores @ keys[0, 0, : length + 1, :512], rtol=1e-5, atol=1e-5
    )


def test_nothing_is_captured_again_when_a_text_or_the_cache_grows(
    triton_attention: ModuleType,
) -> None:
    """A step's launches are equal at 3 and at 700 tokens, and after the cache has moved."""
    form = form_of(4, 2, 16, 16)
    launches: list[tuple[Any, ...]] = []

    class Noting(triton_attention.DecodeAttention):  # type: ignore[misc, name-defined]
        def __call__(self, form: AttentionForm, where: Tensor, *args: Any) -> Tensor:
            launches.append((form, where.data_ptr(), args[0].data_ptr(), args[0].shape))
            result: Tensor = super().__call__(form, where, *args)
            return result

    cache = StaticKvCache(1, 1, CPU, kernels=Noting(4))
    for length in (3, 300, 600):
        more = length - cache.lengths[0]
        cache.begin(Segment(0, cache.lengths[0], more))
        cache.expect(0)
        key, value = torch.ones(2, 2, more, 16)
        cache.attend(AttentionCall(form, torch.ones(4, more, 16), key, value))
        cache.commit()
        memory = cache.num_bytes
        cache.begin_decode({0: 1}, 1)
        cache.expect(0)
        cache.attend(AttentionCall(form, torch.ones(4, 1, 16), key[:, :1], value[:, :1]))
    assert len(set(launches)) == 1
    assert memory > 2 * 256 * 2 * 16 * 4
    assert (cache.generation, cache.attended_length) == (0, 0)


def require_ordered(code: dict[str, list[str]]) -> None:
    """Assert release order before the doorbell, uncached reads of host results, unfused sums."""
    *_, last_write, barrier, fence, doorbell = code["publish"]
    assert "st.global" in last_write
    assert "bar.sync" in barrier
    assert "fence.acq_rel.sys" in fence
    assert "st.global" in doorbell
    *_, barrier, fence, guessed = code["publish_guess"]
    assert "bar" in barrier
    assert "fence.acq_rel.sys" in fence
    assert "st.global" in guessed
    taken = code["take_fetched"]
    answers = [n for n, line in enumerate(taken) if "ld.volatile.global" in line and "b64" in line]
    assert answers[0] > max(n for n, line in enumerate(taken) if "fence.acq_rel.sys" in line)
    fences = [n for n, line in enumerate(code["combine"]) if "fence.acq_rel.sys" in line]
    assert len(fences) == 2  # of the program that asks the host, and of the others
    for waiting in (code["combine"][: fences[0]], code["combine"][fences[0] : fences[1]]):
        assert sum("globaltimer" in line for line in waiting) == 2
        assert any("nanosleep" in line for line in waiting)
        assert sum("ld.volatile.global.b32" in line for line in waiting) >= 2
    first_sum = next(n for n, line in enumerate(code["combine"]) if "add.rn.f32" in line)
    rows = [n for n, line in enumerate(code["combine"]) if "ld.volatile.global.v4" in line]
    assert len(rows) == 8  # of the host, all asked for before the first is added
    assert fences[-1] < rows[0] < rows[-1] < first_sum
    assert not any("fma" in line for line in code["combine"])
    assert any("add.rn.f32" in line for line in code["combine"])


def test_a_layer_is_handed_over_in_order() -> None:
    (by_hand,) = compiler_says("tests.kernels.compile_triton_steps", "--code", "89")
    require_ordered(by_hand["code"])


@pytest.mark.slow
def test_the_compiler_takes_the_kernels_for_every_supported_gpu() -> None:
    gpus = ["80", "86", "89", "90", "75", "120"]  # so latents come to 7.5
    results = compiler_says("tests.kernels.compile_triton_steps", *gpus)
    assert {str(result["sm"]) for result in results} == set(gpus)
    for result in results:
        assert result["shared_bytes"] <= SHARED_KIB[result["sm"]] * 1024, result
        assert result["spilled_bytes"] == 0, result
        assert (result["matrix_units"] > 0) == (
            result["kernel"]
            in ("attend_parts", "attend_tokens", "attend_window_parts", "many_rows")
            and "float32" not in result["case"]
            and result["sm"] >= 80
        ), result
