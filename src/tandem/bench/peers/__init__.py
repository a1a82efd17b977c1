"""Other systems' expert kernels on the same shapes: one module per system, each optional."""

from tandem.bench.peers.kt_kernel import KtKernel
from tandem.bench.peers.llama_cpp import LlamaCpp
from tandem.bench.peers.peer import Peer, Prepared, Work
from tandem.bench.peers.torch_linear import TorchLinear

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        TorchLinear(),
        LlamaCpp(),
        KtKernel(),
        # Its threads spin: with one for every core they and their caller take turns.
        KtKernel(num_spared=1),
    )
}

__all__ = ["PEERS", "Peer", "Prepared", "Work"]
