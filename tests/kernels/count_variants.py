"""Counts the kernels that Triton compiles for a model, for a GPU that is not present; prints JSON.

    python -m tests.kernels.count_variants

It is a program of its own because tests interpret the kernels in their process. Triton's launcher
compiles a kernel for each key of its arguments: constants, dtypes, alignments.
"""

import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from tandem.devices.cuda.kernels import TritonKernels
from tandem.devices.cuda.linear import DeviceLinear, linear_compilations
from tandem.experts.execution.batch import CallSide
from tandem.experts.execution.layer_call import LayerCall
from tandem.experts.execution.routing import Routing, SumRows
from tandem.experts.store.host_store import HostStore
from tandem.policy.plan import Geometry
from tests.experts.machines import FUNCTIONS, HIDDEN, make_store, route
from tests.kernels.compile_triton import Launch, noted_launches

GEOMETRY = Geometry(1, 16, 2)
PROMPTS = (1, 3, 6, 9, 13, 17, 25, 33, 50, 65, 90, 129, 150, 200, 257, 400, 700, 1000, 1800, 2048)
SHAPES = ((2048, 4096), (2048, 512), (4096, 2048), (2048, 151936))  # of linear layers
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


def key(launch: Launch) -> str:
    """Return the key under which Triton stores a compiled kernel."""
    kernel = launch.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    _, specialization, options = binder(*launch.args, **launch.constants)
    return repr((kernel.__name__, specialization, options))


class _Slots(NamedTuple):
    """The slots of a batch's experts; their memory is not read."""

    number: int

    def addresses(self) -> list[int]:
        return [64 * place for place in range(1, self.number + 1)]

    def images(self) -> list[Tensor]:
        raise AssertionError("variants are counted without their experts' memory")


def linear_layers(formats: Sequence[str]) -> list[DeviceLinear]:
    """Return packed linear layers of some formats, each in several shapes."""
    from tandem.triton_kernels.dense import DeviceWeight

    image = torch.zeros(1, dtype=torch.uint8)
    return [
        DeviceLinear(DeviceWeight(image, name, *shape, has_bias=False), torch.bfloat16)
        for name in formats
        for shape in SHAPES
    ]


def on_device(table: Tensor) -> Tensor:
    """Return a copy with the alignment of torch's GPU memory."""
    return torch.empty_like(table).copy_(table)


def run_prompt(
    kernels: TritonKernels, store: HostStore, layers: list[DeviceLinear], num_tokens: int
) -> None:
    """Launch batches of a prompt and of small steps: all experts, each half, and one expert."""
    generator = torch.Generator().manual_seed(num_tokens)
    for count in (num_tokens, 1, 2, 3, 5, 8):
        for layer in layers:
            layer(torch.zeros(1, count, layer.in_features, dtype=torch.bfloat16))
        hidden, index, weights = route(count, generator, GEOMETRY)
        routing = Routing(index, GEOMETRY.num_experts)
        order = routing.experts
        call = LayerCall(store[0], FUNCTIONS, routing, order)
        side = CallSide(hidden.bfloat16(), torch.empty(routing.num_routed, HIDDEN))
        half = len(order) // 2
        for first, last in ((0, len(order)), (0, half), (half, len(order)), (half, half + 1)):
            if last > first:
                prepared = kernels.prepare(call.batch(first, last, side), _Slots(last - first))
                prepared.launch(on_device(prepared.table))
        call.prepare_result(side, weights, functools.partial(_prepare_sum, kernels))()


def _prepare_sum(kernels: TritonKernels, row_of: Tensor, weights: Tensor) -> SumRows:
    def sum_rows(rows: Tensor) -> Tensor:
        out = torch.empty(row_of.shape[0], rows.shape[1])
        kernels.add_rows(rows, on_device(row_of), weights, out)
        return out

    return sum_rows


def counts(launches: list[Launch], formats: Sequence[str]) -> dict[str, int]:
    """Return how many kernels a load compiles, and how many more the prompts need."""
    from tandem.triton_kernels.experts import TritonExperts

    kernels, store, cpu = TritonKernels(TritonExperts()), make_store(GEOMETRY), torch.device("cpu")
    layers = linear_layers(formats)
    at_load = kernels.compilations([(store[0], FUNCTIONS)] * 3, torch.bfloat16, GEOMETRY.top_k, cpu)
    launches.clear()
    for compile_one in (*at_load, *linear_compilations(nn.ModuleList(layers), cpu)):
        compile_one()
    loaded = {key(launch) for launch in launches}
    launches.clear()
    for num_tokens in PROMPTS:
        run_prompt(kernels, store, layers, num_tokens)
    met = {key(launch) for launch in launches}
    return {"loaded": len(loaded), "met": len(met), "later": len(met - loaded)}


def main() -> None:
    """Print the counts with no packed linear layers, with one format and with two."""
    launches = noted_launches()
    print(json.dumps([counts(launches, f) for f in ((), ("int4",), ("q4_k", "q6_k"))]))


if __name__ == "__main__":
    main()
