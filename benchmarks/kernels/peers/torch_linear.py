"""PyTorch: an expert as three bf16 `linear`s, as in Transformers' eager experts."""

import torch
from benchmarks.kernels.peers.peer import Prepared
from torch.nn.functional import linear, silu

from tandem.bench.kernels import Work


class TorchLinear:
    """bf16 only: torch has no expert kernels of fewer bits for the CPU."""

    name = "torch"

    def why_missing(self) -> str | None:
        """Return why it cannot run here; Tandem itself needs torch."""
        return None

    def supports(self, format_name: str) -> bool:
        """Tell whether it supports a format."""
        return format_name == "bf16"

    def prepare(self, work: Work) -> Prepared:
        """Fill the store with random weights."""
        torch.set_num_threads(work.num_threads)
        count, hidden, inner = work.num_experts(16), work.hidden_size, work.intermediate_size
        up = torch.empty(count, 2 * inner, hidden, dtype=torch.bfloat16)
        down = torch.empty(count, hidden, inner, dtype=torch.bfloat16)
        for weights in (up, down):
            weights[0].normal_(std=0.01)
            weights[1:] = weights[0]
        rows = torch.randn(work.max_tokens, hidden).bfloat16()

        @torch.inference_mode()
        def run(tokens: int, call: int) -> None:
            for i in range(work.num_active):
                expert = (call * work.num_active + i) % count
                gate, value = linear(rows[:tokens], up[expert]).chunk(2, dim=-1)
                linear(silu(gate) * value, down[expert])

        return Prepared(run, work.num_active * (up[0].nbytes + down[0].nbytes), "bf16")
