"""Tests of hyper-connections against torch: streams into a layer's input, and its output back."""

import pytest
import torch
from torch import Tensor

from tandem.kernels.dense import CpuThreads
from tandem.kernels.hyper_connections import HyperConnection, mix_in, mix_out
from tests.conftest import two_threads

pytestmark = pytest.mark.every_isa

DTYPES = [torch.float32, torch.bfloat16]
SINKHORN = HyperConnection(1e-6, 1e-5, 2.0, 0.0, num_rounds=20)
WITHOUT_MIXTURE = HyperConnection(1e-6, 1e-3, 1.5, 1e-3)
HEAD = HyperConnection(1e-6, 1e-5)
# Streams and their width: less than a register, no multiples, several parts, as released.
SIZES = [(1, 1), (2, 3), (4, 24), (3, 37), (16, 8), (4, 600), (4, 4096)]


@pytest.fixture(scope="module")
def threads(isa: str) -> CpuThreads:
    return two_threads()


def tensors_of(
    connection: HyperConnection, count: int, n: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return streams, and a matrix with its base and scales."""
    random = torch.Generator().manual_seed(7 * n + dim)

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=random) * size

    rows = n + n * (connection is not HEAD) + n * n * bool(connection.num_rounds)
    matrix = draw(rows, n * dim, size=(n * dim) ** -0.5)
    scales = draw(3).abs()[: 1 + (rows > n) + (connection.num_rounds > 0)]
    return 3 * draw(count, n, dim).to(dtype), matrix, draw(rows), scales


def weights_of(
    connection: HyperConnection, streams: Tensor, matrix: Tensor, base: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the weights of streams, output and mixture in double precision."""
    n, x = streams.shape[1], streams.flatten(1).double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + connection.norm_eps)
    sizes = [n, n, n * n][: len(scales)]
    kinds = zip((x @ matrix.double().T).split(sizes, -1), scales, base.split(sizes), strict=True)
    parts = [y * scale + own for y, scale, own in kinds]
    of_streams = parts[0].sigmoid() + connection.eps
    if len(parts) == 1:
        return of_streams, None, None
    of_output = connection.output_factor * parts[1].sigmoid() + connection.output_eps
    if len(parts) == 2:
        return of_streams, of_output, None
    mixture = parts[2].unflatten(-1, (n, n)).softmax(-1) + connection.eps
    mixture = mixture / (mixture.sum(-2, keepdim=True) + connection.eps)
    for _ in range(connection.num_rounds - 1):
        mixture = mixture / (mixture.sum(-1, keepdim=True) + connection.eps)
        mixture = mixture / (mixture.sum(-2, keepdim=True) + connection.eps)
    return of_streams, of_output, mixture


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("matrix_dtype", DTYPES)
@pytest.mark.parametrize("connection", [SINKHORN, WITHOUT_MIXTURE, HEAD])
@pytest.mark.parametrize(("n", "dim"), SIZES)
def test_inputs_and_weights_of_any_number_of_tokens(
    threads: CpuThreads,
    dtype: torch.dtype,
    matrix_dtype: torch.dtype,
    connection: HyperConnection,
    n: int,
    dim: int,
) -> None:
    streams, matrix, *rest = tensors_of(connection, 41, n, dim, dtype)
    matrix = matrix.to(matrix_dtype)
    of_streams, *others = weights_of(connection, streams, matrix, *rest)
    expected = (of_streams[..., None] * streams).sum(1)
    back = [x.flatten(1) for x in others if x is not None]
    expected_weights = torch.cat([of_streams[:, :0], *back], -1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for count in (41, 0, 1, 3):
        out, weights = mix_in(threads, connection, streams[:count], matrix, *rest)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected[:count], rtol=tolerance, atol=tolerance)
        own = expected_weights[:count]
        torch.testing.assert_close(weights.double(), own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "dim"), SIZES)
def test_streams_after_a_layer(threads: CpuThreads, dtype: torch.dtype, n: int, dim: int) -> None:
    """As in the models, weights are rounded first, then the sum of two rounded parts."""
    streams, *rest = tensors_of(SINKHORN, 41, n, dim, dtype)
    y = streams.flip(0, 1).mean(1)
    _, weights = mix_in(threads, SINKHORN, streams, *rest)
    of_output, mixture = weights[:, :n].to(dtype), weights[:, n:].unflatten(-1, (n, n)).to(dtype)
    mixed = torch.matmul(mixture.transpose(-1, -2), streams)
    expected = of_output[..., None] * y[:, None] + mixed
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for count in (41, 0, 1, 3):
        found = mix_out(threads, y[:count], weights[:count], streams[:count])
        torch.testing.assert_close(found, expected[:count], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_token_does_not_depend_on_the_others_nor_on_threads(
    threads: CpuThreads, dtype: torch.dtype, num_threads: int
) -> None:
    streams, *rest = tensors_of(SINKHORN, 70, 4, 600, dtype)
    out, weights = mix_in(threads, SINKHORN, streams, *rest)
    mixed = mix_out(threads, out, weights, streams)
    others = CpuThreads(num_threads=num_threads, isa=threads.isa)
    for first, end in ((0, 1), (1, 4), (4, 39), (69, 70)):
        part = slice(first, end)
        alone, own = mix_in(others, SINKHORN, streams[part], *rest)
        assert torch.equal(alone, out[part])
        assert torch.equal(own, weights[part])
        assert torch.equal(mix_out(others, alone, own, streams[part]), mixed[part])


def test_what_is_no_number_stays_none(threads: CpuThreads) -> None:
    streams, *rest = tensors_of(SINKHORN, 3, 4, 24, torch.float32)
    streams[1, 2, 5] = torch.nan
    out, weights = mix_in(threads, SINKHORN, streams, *rest)
    assert out[1].isnan().all()
    assert weights[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    assert weights[[0, 2]].isfinite().all()
