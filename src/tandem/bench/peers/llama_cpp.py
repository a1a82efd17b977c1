"""Runs llama.cpp's library in this process."""

import ctypes
import statistics
import time
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.bench.peers.setting import Choice, Setting, Speeds


class _SignalStack(ctypes.Structure):
    """The C struct `stack_t` of sigaltstack(2)."""

    _fields_ = (("memory", c_void_p), ("flags", c_int), ("size", c_size_t))


_SIGNAL_STACK = ctypes.create_string_buffer(8192)  # room for all registers except AMX's


def _refuse_amx() -> None:
    """Make Linux refuse AMX to this process, so that llama.cpp rearranges weights for AVX.

    llama.cpp prefers its AMX layouts, which crash with experts. Linux permits AMX only to processes
    whose signal stacks have room for AMX's registers, which need 8 KiB more.
    """
    stack = _SignalStack(ctypes.addressof(_SIGNAL_STACK), 0, len(_SIGNAL_STACK))
    if ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) != 0:
        raise OSError("this process uses AMX, for which llama.cpp's layouts crash: --no-repacking")


class LlamaCpp:
    """llama.cpp, called through the library in the package llama-cpp-python."""

    _BATCH = 512
    _PART = 512  # tokens of history that are computed once and copied

    def __init__(self, setting: Setting, gpu_layers: int | None = None) -> None:
        """Map the file; `gpu_layers` of its layers run on a GPU, None for llama.cpp's default."""
        import llama_cpp

        self._lib: Any = llama_cpp.llama_cpp
        self._setting = setting
        if setting.may_repack:
            _refuse_amx()
        self._lib.llama_log_set(_SILENT, None)
        self._lib.llama_backend_init()
        params = self._lib.llama_model_default_params()
        if gpu_layers is not None:
            params.n_gpu_layers = gpu_layers
        params.use_extra_bufts = setting.may_repack
        path = str(setting.gguf).encode()
        self._model = self._lib.llama_model_load_from_file(path, params)
        if not self._model:
            raise OSError(f"llama.cpp cannot load {setting.gguf}")
        vocabulary = self._lib.llama_model_get_vocab(self._model)
        self._vocabulary = int(self._lib.llama_vocab_n_tokens(vocabulary))
        self._next_token = 0

    def answers(self, ids: list[int]) -> NDArray[np.float32]:
        """Return the logits after every token of a text: (n_tokens, vocabulary)."""
        lib, count = self._lib, len(ids)
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = -(-count // 256) * 256
        params.n_threads = params.n_threads_batch = self._setting.threads
        context, batch = lib.llama_init_from_model(self._model, params), None
        try:
            batch = lib.llama_batch_init(count, 0, 1)
            batch.n_tokens = count
            for i, token in enumerate(ids):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, True
            if lib.llama_decode(context, batch) != 0:
                raise OSError("llama_decode failed")
            logits = lib.llama_get_logits(context)
            shape = (count, self._vocabulary)
            return np.ctypeslib.as_array(logits, shape=shape).copy()
        finally:
            if batch is not None:
                lib.llama_batch_free(batch)
            lib.llama_free(context)

    def choices(self, ids: Sequence[int]) -> list[Choice]:
        """Return, for each token of a text, the token that the model would choose next."""
        logits = self.answers(list(ids))
        first = logits.argmax(-1)
        best = np.partition(logits, -2, axis=-1)[:, -2:]
        return [*map(Choice, first.tolist(), (best[:, 1] - best[:, 0]).tolist())]

    def measure(self, depth: int) -> Speeds:
        """Measure the speeds after `depth` tokens, rounded up to a multiple of `_PART`."""
        setting, parts = self._setting, -(-depth // self._PART)
        room = depth + setting.prompt + setting.steps + 64
        params = self._lib.llama_context_default_params()
        params.n_ctx = -(-room // 256) * 256 + self._PART
        params.n_batch = params.n_ubatch = self._BATCH
        params.n_seq_max = parts + 1
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = setting.threads
        params.flash_attn_type = int(setting.has_flash_attention)
        context = self._lib.llama_init_from_model(self._model, params)
        if not context:
            raise OSError("llama.cpp has no memory for a context")
        try:
            return self._run(context, depth, parts)
        finally:
            self._lib.llama_free(context)

    def _run(self, context: Any, depth: int, parts: int) -> Speeds:
        setting = self._setting
        self._decode(context, min(32, setting.prompt), 0)  # warm-up
        memory = self._lib.llama_get_memory(context)
        self._lib.llama_memory_seq_rm(memory, 0, -1, -1)
        self._fill(context, memory, parts)
        at = parts * self._PART
        start = time.perf_counter()
        self._decode(context, setting.prompt, at)
        prefill = time.perf_counter() - start
        at += setting.prompt
        seconds = []
        for step in range(setting.steps):
            start = time.perf_counter()
            self._decode(context, 1, at + step)
            seconds.append(time.perf_counter() - start)
        return Speeds(setting.prompt / prefill, 1 / statistics.median(seconds[2:]), 0.0, 0.0)

    def _fill(self, context: Any, memory: Any, parts: int) -> None:
        """Fill sequence 0 with `parts` equal chunks: compute one, and append moved copies of it.

        States and windows cannot be moved, so a model with states or windows computes all chunks.
        """
        if parts == 0:
            return
        lib, size = self._lib, self._PART
        if lib.llama_model_is_hybrid(self._model) or lib.llama_model_n_swa(self._model) > 0:
            self._decode(context, parts * size, 0)
            return
        self._decode(context, size, 0)
        num_bytes = lib.llama_state_seq_get_size(context, 0)
        state = (ctypes.c_uint8 * num_bytes)()
        lib.llama_state_seq_get_data(context, state, num_bytes, 0)
        for part in range(1, parts):
            if lib.llama_state_seq_set_data(context, state, num_bytes, part) == 0:
                raise OSError("llama.cpp cannot restore a sequence")
            lib.llama_memory_seq_add(memory, part, 0, -1, part * size)
            lib.llama_memory_seq_cp(memory, part, 0, -1, -1)
        if parts * size != lib.llama_memory_seq_pos_max(memory, 0) + 1:
            raise OSError("llama.cpp's sequence does not have the requested length")
        self._decode(context, 1, parts * size)  # rotates the copied keys to their positions
        lib.llama_memory_seq_rm(memory, 0, parts * size, -1)

    def _decode(self, context: Any, count: int, position: int) -> None:
        """Append `count` random tokens, or, if `count` is 1, the token that the last call chose.

        Then choose the token with the greatest logit for the next call.
        """
        random = np.random.default_rng(position)
        for first in range(0, count, self._BATCH):
            n = min(self._BATCH, count - first)
            batch = self._lib.llama_batch_init(n, 0, 1)
            batch.n_tokens = n
            tokens = random.integers(300, self._vocabulary, n)
            for i in range(n):
                batch.token[i] = self._next_token if count == 1 else int(tokens[i])
                batch.pos[i] = position + first + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = i == n - 1
            status = self._lib.llama_decode(context, batch)
            if status != 0:
                raise OSError(f"llama_decode returned {status}")
            logits = self._lib.llama_get_logits_ith(context, n - 1)
            found = np.ctypeslib.as_array(logits, shape=(self._vocabulary,))
            self._next_token = int(found.argmax())
            self._lib.llama_batch_free(batch)


def llama_cpp_isa() -> str:
    """Return the widest instruction set that llama.cpp's library uses."""
    import llama_cpp

    llama_cpp.llama_cpp.llama_backend_init()
    system_info = llama_cpp.llama_cpp.llama_print_system_info().decode()
    return widest_isa(system_info)


def widest_isa(system_info: str) -> str:
    """Return the widest instruction set in llama.cpp's system information: `AVX2 = 1 | ...`.

    AMX is ignored, because `_refuse_amx` disables it.
    """
    flags = [flag.rpartition(":")[2].partition("=") for flag in system_info.split("|")]
    here = {name.strip() for name, _, value in flags if value.strip() == "1"}
    order = ("AVX512", "AVX_VNNI", "AVX2", "AVX")
    return next((name for name in order if name in here), "no vectors")


def _silent(level: int, text: bytes, data: object) -> None:
    """Ignore a message of llama.cpp, because it would be printed into the report."""


_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_silent)
