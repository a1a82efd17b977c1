"""Tests of residual streams in Triton, interpreted, against torch in double precision."""

from typing import Any

import pytest
import torch

from tandem.kernels.hyper_connections import HyperConnection
from tests.kernels.interpreter import interpreted_module
from tests.kernels.test_hyper_connections import (
    HEAD,
    SINKHORN,
    WITHOUT_MIXTURE,
    tensors_of,
    weights_of,
)

pytest.importorskip("triton")
# Streams and their width: one, no multiples, several parts and blocks of columns.
SIZES = [(1, 1), (3, 37), (4, 600), (16, 8)]


streams_module = interpreted_module("tandem.triton_kernels.hyper_connections")


@pytest.mark.parametrize("connection", [SINKHORN, WITHOUT_MIXTURE, HEAD])
@pytest.mark.parametrize(("n", "dim"), SIZES)
def test_inputs_and_weights(
    streams_module: Any, connection: HyperConnection, n: int, dim: int
) -> None:
    connection = connection._replace(num_rounds=min(3, connection.num_rounds))
    streams, matrix, *rest = tensors_of(connection, 2, n, dim, torch.float32)
    of_streams, *others = weights_of(connection, streams, matrix, *rest)
    kernels = streams_module.TritonStreams()
    out, weights = kernels.mix_in(connection, streams[None], matrix, *rest)
    expected = (of_streams[..., None] * streams).sum(1)
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-5)
    back = torch.cat([of_streams[:, :0], *(x.flatten(1) for x in others if x is not None)], -1)
    torch.testing.assert_close(weights[0].double(), back, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("n", "dim"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_streams_after_a_layer(streams_module: Any, n: int, dim: int, dtype: torch.dtype) -> None:
    """Weights are rounded first, then the sum of two rounded parts."""
    streams, *_ = tensors_of(SINKHORN, 3, n, dim, dtype)
    y, weights = streams.flip(0, 1).mean(1), torch.rand(3, n + n * n)
    of_output, mixture = weights[:, :n].to(dtype), weights[:, n:].unflatten(-1, (n, n)).to(dtype)
    mixed = torch.matmul(mixture.transpose(-1, -2).float(), streams.float()).to(dtype)
    expected = of_output[..., None] * y[:, None] + mixed
    found = streams_module.TritonStreams().mix_out(y, weights, streams)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_what_is_no_number_stays_none(streams_module: Any) -> None:
    connection = SINKHORN._replace(num_rounds=2)
    streams, *rest = tensors_of(connection, 2, 3, 24, torch.float32)
    streams[1, 2, 5] = torch.nan
    out, weights = streams_module.TritonStreams().mix_in(connection, streams, *rest)
    assert out.isnan().all(1).tolist() == weights.isnan().all(1).tolist() == [False, True]
