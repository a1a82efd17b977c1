"""Compiles decode attention for GPUs that are not here; prints what the compiler says, as JSON.

    python -m tests.kernels.compile_triton_attention 80 90    # capabilities

As `compile_triton`, of which it is a part: each case goes to one of the processors by turns.
"""

import json
import sys
from typing import Any

import torch

from tandem.kernels.attention import AttentionForm
from tandem.kernels.triton import attention
from tandem.kernels.triton.decode_attention import DecodeAttention
from tests.kernels.compile_triton import Launch, noted_launches_of, result_of

KERNELS = ((attention, ("store_token", "attend_parts", "join_parts")),)
# Heads, KV heads, key and value dimensions, what lies in memory, dtype, window, sinks: as models
# have them; of latents the values are a part of the keys.
CASES = (
    (32, 4, 128, 128, "bf16", torch.bfloat16, 0, False),
    (64, 8, 64, 64, "int8", torch.bfloat16, 128, True),
    (16, 2, 256, 256, "int8", torch.bfloat16, 0, False),
    (16, 2, 512, 512, "bf16", torch.bfloat16, 0, False),
    (128, 1, 576, 512, "bf16", torch.bfloat16, 0, False),
    (16, 16, 192, 128, "fp32", torch.float32, 0, False),
    (20, 20, 256, 256, "bf16", torch.bfloat16, 0, False),
    (32, 8, 64, 64, "fp16", torch.float16, 1024, False),
    (16, 2, 256, 256, "fp32", torch.float32, 0, True),
    (128, 1, 576, 512, "int8", torch.bfloat16, 0, False),
)


def launches_of(case: tuple[Any, ...]) -> list[Launch]:
    """Return what a decode step of two slots launches."""
    heads, kv_heads, key_dim, value_dim, kind, dtype, window, has_sinks = case
    launches = noted_launches_of(KERNELS)
    form = AttentionForm(
        num_heads=heads, num_kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim,
        scale=0.1, window=window,
    )  # fmt: skip
    is_latent = kv_heads == 1
    where, positions = torch.zeros(5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    query = torch.zeros(2, heads, key_dim, dtype=dtype).transpose(0, 1)
    key, value = (
        torch.zeros(2, kv_heads, dim, dtype=dtype).transpose(0, 1)
        for dim in (key_dim, 0 if is_latent else value_dim)
    )
    sinks = torch.zeros(heads, dtype=dtype) if has_sinks else None
    kernels = DecodeAttention(128)
    kernels.store(where, positions, key, value, kind)
    kernels.attend(form, where, positions, query, sinks, kind, has_values=not is_latent)
    return launches


def main() -> None:
    """Compile and print."""
    capabilities = [int(argument) for argument in sys.argv[1:]]
    print(
        json.dumps(
            [
                result_of(str(case), launch, capabilities[number % len(capabilities)])
                for number, case in enumerate(CASES)
                for launch in launches_of(case)
            ]
        )
    )


if __name__ == "__main__":
    main()
