"""llama.cpp: its graph of an expert layer, through the ggml libraries of llama-cpp-python.

Gate, up and down are `mul_mat_id`s, as in llama.cpp's own models. Q4_0 has the buffer type that
llama.cpp chooses for it, which interleaves rows for vector instructions.
"""

import ctypes
import importlib.util
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from benchmarks.kernels.peers.peer import Prepared, why_not_installed

from tandem.bench.kernels import Work

_F32, _I32 = 0, 26
_CPU_DEVICE = 0


@dataclass(frozen=True, slots=True)
class _Type:
    """A ggml tensor type: 32 weights are `scale` followed by `code_bytes`."""

    name: str
    number: int
    scale: bytes
    code_bytes: int
    is_repacked: bool = False

    @property
    def bits_per_weight(self) -> float:
        return (len(self.scale) + self.code_bytes) / 4

    def random_row(self, cols: int) -> bytes:
        if not self.scale:  # bf16
            row = (torch.randn(cols) * 0.01).bfloat16()
            return row.view(torch.uint8).numpy().tobytes()
        blocks = cols // 32
        codes = np.random.default_rng(0).integers(0, 256, (blocks, self.code_bytes), dtype=np.uint8)
        scales = np.tile(np.frombuffer(self.scale, dtype=np.uint8), (blocks, 1))
        return np.concatenate([scales, codes], axis=1).tobytes()


_HALF_SCALE = np.float16(0.01).tobytes()
_TYPES = {
    "bf16": _Type("BF16", 30, b"", 64),
    "int8-g32": _Type("Q8_0", 8, _HALF_SCALE, 32),
    "int8-g128": _Type("Q8_0", 8, _HALF_SCALE, 32),
    "int4-g32": _Type("Q4_0", 2, _HALF_SCALE, 16, is_repacked=True),
    "int4-g128": _Type("Q4_0", 2, _HALF_SCALE, 16, is_repacked=True),
    "mxfp4": _Type("MXFP4", 39, bytes([120]), 16),
}


class LlamaCpp:
    """llama-cpp-python's library, with the instruction sets that it was built for."""

    name = "llama.cpp"

    def why_missing(self) -> str | None:
        """Return why it cannot run here; None: it can."""
        missing = why_not_installed("llama_cpp", "llama-cpp-python")
        if missing is None and not (_library_folder() / "libggml-cpu.so").exists():
            return "its package has no libggml-cpu.so"
        return missing

    def supports(self, format_name: str) -> bool:
        """Tell whether it supports a format."""
        return format_name in _TYPES

    def prepare(self, work: Work) -> Prepared:
        """Fill the store with random blocks."""
        kind = _TYPES[work.format]
        count = work.num_experts(kind.bits_per_weight)
        layer = _Layer(_Ggml(), work, kind, count)
        weights = 3 * work.hidden_size * work.intermediate_size * work.num_active
        name = kind.name + (" repacked" if layer.is_repacked else "")
        return Prepared(layer.run, int(weights * kind.bits_per_weight / 8), name)


def _library_folder() -> Path:
    found = importlib.util.find_spec("llama_cpp")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "lib"


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _Ggml:
    """The functions of ggml that are needed; handles are addresses."""

    def __init__(self) -> None:
        folder = _library_folder()
        self._libraries = [
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
            for name in ("libggml-base.so", "libggml-cpu.so", "libggml.so")
        ]
        pointer = c_void_p
        self.init = self._function("ggml_init", pointer, _InitParams)
        self.new_tensor = self._function(
            "ggml_new_tensor_3d", pointer, pointer, c_int, c_int64, c_int64, c_int64
        )
        self.mul_mat_id = self._function("ggml_mul_mat_id", pointer, *[pointer] * 4)
        self.swiglu = self._function("ggml_swiglu_split", pointer, *[pointer] * 3)
        self.new_graph = self._function("ggml_new_graph", pointer, pointer)
        self.expand = self._function("ggml_build_forward_expand", None, pointer, pointer)
        self.num_bytes = self._function("ggml_nbytes", c_size_t, pointer)
        self.set_tensor = self._function(
            "ggml_backend_tensor_set", None, pointer, c_char_p, c_size_t, c_size_t
        )
        self.allocate = self._function(
            "ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer
        )
        self.compute = self._function("ggml_backend_graph_compute", c_int, pointer, pointer)
        self.plain_buffers: int = self._function("ggml_backend_cpu_buffer_type", pointer)()
        self.backend: int = self._function("ggml_backend_cpu_init", pointer)()
        self.set_threads = self._function("ggml_backend_cpu_set_n_threads", None, pointer, c_int)

    def context(self) -> int:
        """Return a context for descriptions of tensors and graphs; their data is elsewhere."""
        address: int = self.init(_InitParams(1 << 22, None, True))
        return address

    def repacking_buffers(self) -> int | None:
        """Return the buffer type that interleaves rows, if this build has it."""
        pointer = c_void_p
        device = self._function("ggml_backend_dev_by_type", pointer, c_int)(_CPU_DEVICE)
        registry = self._function("ggml_backend_dev_backend_reg", pointer, pointer)(device)
        find = self._function("ggml_backend_reg_get_proc_address", pointer, pointer, c_char_p)
        address = find(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return None
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(address)(device)
        name_of = self._function("ggml_backend_buft_name", c_char_p, pointer)
        for kind in listed:
            if kind is None:
                return None
            if b"REPACK" in name_of(kind):
                return int(kind)
        return None

    def _function(
        self, name: str, result: object, *arguments: object
    ) -> "ctypes._NamedFuncPointer":
        for library in self._libraries:
            if hasattr(library, name):
                function = getattr(library, name)
                function.restype, function.argtypes = result, list(arguments)
                return function  # type: ignore[no-any-return]
        raise OSError(f"ggml of this llama-cpp-python has no {name}")


class _Layer:
    """All experts of the store, and one graph for each number of tokens."""

    def __init__(self, ggml: _Ggml, work: Work, kind: _Type, count: int) -> None:
        self._ggml, self._work, self._count = ggml, work, count
        ggml.set_threads(ggml.backend, work.num_threads)
        repacking = ggml.repacking_buffers() if kind.is_repacked else None
        self.is_repacked = repacking is not None
        context = ggml.context()
        hidden, inner = work.hidden_size, work.intermediate_size
        shapes = ((hidden, inner), (hidden, inner), (inner, hidden))
        self._gate, self._up, self._down = (
            ggml.new_tensor(context, kind.number, cols, rows, count) for cols, rows in shapes
        )
        self._require(ggml.allocate(context, repacking or ggml.plain_buffers), "memory")
        for tensor, (cols, rows) in zip((self._gate, self._up, self._down), shapes, strict=True):
            data = kind.random_row(cols) * (rows * count)
            assert len(data) == ggml.num_bytes(tensor)
            ggml.set_tensor(tensor, data, 0, len(data))
        self._graphs: dict[int, tuple[int, int]] = {}

    def run(self, tokens: int, call: int) -> None:
        """Compute one call."""
        if tokens not in self._graphs:
            self._graphs[tokens] = self._build(tokens)
        graph, ids = self._graphs[tokens]
        active = self._work.num_active
        chosen = (np.arange(active, dtype=np.int32) + call * active) % self._count
        data = np.tile(chosen.astype(np.int32), tokens).tobytes()
        self._ggml.set_tensor(ids, data, 0, len(data))
        status = self._ggml.compute(self._ggml.backend, graph)
        if status != 0:
            raise OSError(f"ggml's graph returned {status}")

    def _build(self, tokens: int) -> tuple[int, int]:
        """Return a graph of the layer for some tokens, and its tensor of expert ids."""
        ggml, context = self._ggml, self._ggml.context()
        rows = ggml.new_tensor(context, _F32, self._work.hidden_size, 1, tokens)
        ids = ggml.new_tensor(context, _I32, self._work.num_active, tokens, 1)
        gate = ggml.mul_mat_id(context, self._gate, rows, ids)
        up = ggml.mul_mat_id(context, self._up, rows, ids)
        down = ggml.mul_mat_id(context, self._down, ggml.swiglu(context, gate, up), ids)
        graph = ggml.new_graph(context)
        ggml.expand(graph, down)
        self._require(ggml.allocate(context, ggml.plain_buffers), "memory")
        values = torch.randn(tokens, self._work.hidden_size).numpy().tobytes()
        ggml.set_tensor(rows, values, 0, len(values))
        return graph, ids

    @staticmethod
    def _require(address: int | None, what: str) -> None:
        if not address:
            raise OSError(f"ggml has no {what} left")
