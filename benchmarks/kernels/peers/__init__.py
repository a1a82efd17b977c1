"""Other systems' expert kernels on the same shapes: one module per system, each optional."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as tandem sets it: before torch is loaded

from benchmarks.kernels.peers.kt_kernel import KtKernel
from benchmarks.kernels.peers.llama_cpp import LlamaCpp
from benchmarks.kernels.peers.peer import Peer
from benchmarks.kernels.peers.torch_linear import TorchLinear

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        TorchLinear(),
        LlamaCpp(),
        KtKernel(),
        # Its threads spin: with one for every core they and their caller share a core.
        KtKernel(num_spared=1),
    )
}
