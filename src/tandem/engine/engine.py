"""The engine process: loads the model, steps the batch, reports the results.

The engine has a process of its own, so that HTTP and the decode loop share no interpreter lock, and
a crash of either leaves the other alive. Between two steps it reads messages of the HTTP side; a
cancelled request frees its slot before the next step.
"""

import contextlib
import dataclasses
import gc
import logging
import os
import pickle
import select
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from tandem.core.errors import ConfigError, TandemError, capacity_errors
from tandem.decode.images import why_no_images
from tandem.engine.constraint import Grammars
from tandem.engine.live import LiveSnapshots
from tandem.engine.messages import (
    EXIT_CANNOT_LOAD,
    EXIT_DEVICE_LOST,
    Alive,
    Cancel,
    EngineSettings,
    EngineStatistics,
    Failed,
    Live,
    ModelInfo,
    ModelLoader,
    Progressed,
    Ready,
    Report,
    Stop,
    Submit,
    Watch,
)
from tandem.experts.cache.host_slots import SlotStatistics
from tandem.experts.execution.device import DeviceLostError
from tandem.experts.store.host_memory import process_bytes
from tandem.experts.tracing.cache_statistics import CacheStatistics
from tandem.experts.tracing.events import ExpertStatistics, LayerExecuted
from tandem.generate.generator import Generator
from tandem.generate.next_token_models import context_tokens, end_of_sequence_ids, vocabulary_size
from tandem.generate.pace import Pace
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions
from tandem.generate.speculation.draft_counts import DraftCounts
from tandem.generate.token_output import BatchCounts, StepFailedError
from tandem.hf.dense import pack_as_loaded
from tandem.hf.runtime import require_runtime

_log = logging.getLogger("tandem.engine")
_REPORT_SECONDS = 0.5
# How often a long step reports that it is alive.
_ALIVE_SECONDS = 1.0
# How long to wait for one thread that writes to disk, and for all at the end.
_WRITER_SECONDS = 0.02
_WRITING_SECONDS = 5.0
# In this many steps a decode step of one token is recorded and compared.
_WARM_UP_TOKENS = 8


def run_engine(load: ModelLoader, settings: EngineSettings, connection: Connection) -> None:
    """Run as the engine process until `Stop` arrives or the HTTP process ends."""
    try:
        with capacity_errors():
            engine = Engine(load, settings, connection)
    except TandemError as error:
        connection.send(Failed([], str(error)))
        sys.exit(EXIT_CANNOT_LOAD)
    # The loaded objects stay. A collection over them takes a third of a second in which no token
    # comes.
    gc.freeze()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        engine.run()


class Engine:
    """Holds the model and its batch, and answers requests from the pipe to the HTTP side."""

    def __init__(self, load: ModelLoader, settings: EngineSettings, connection: Connection) -> None:
        """Load the model, answer a short prompt to warm up, and send `Ready`."""
        model, tokenizer = load()
        runtime = require_runtime(model)
        if runtime.options.dense_dtype == "auto":
            # Answers that do not depend on the batch matter more here than a few per cent of speed.
            pack_as_loaded(model, runtime.threads)
        self._model = model
        self._connection = connection
        generator = Generator(
            model, tokenizer, has_replay=settings.has_replay, speculate=settings.speculate,
            shares_answers=not settings.is_isolated,
            **settings.load_drafting(tokenizer),
        )  # fmt: skip
        self._speculation = generator.speculation
        vocabulary = vocabulary_size(model)
        self._end_ids = tuple(sorted(end_of_sequence_ids(model)))
        self._scheduler = generator.scheduler(
            settings.max_running,
            chunk_tokens=settings.part_tokens,
            kept=settings.kept_prefixes,
            pace=None if settings.max_gap is None else Pace(settings.max_gap),
            follow_grammar=Grammars(tokenizer, vocabulary, self._end_ids).constraint,
        )
        executor = runtime.executor
        self._executor, self._host_slots = executor, runtime.host_slots
        self._experts, self._cache = ExpertStatistics(), CacheStatistics()
        self._live = LiveSnapshots(executor)
        self._is_stopped = False
        self._last_report = self._last_alive = 0.0
        self._warm_up()
        # These listeners get an event per layer and step. Without slots there is nothing to count.
        executor.listeners += [self._experts, self._layer_done]
        if self._speculation is not None:
            self._speculation.experts = self._experts
        if executor.cache is not None:
            executor.listeners.append(self._cache)
        connection.send(Ready(self._info(generator, vocabulary)))

    def _warm_up(self) -> None:
        """Answer a short prompt, so that the first request need not wait for step recording."""
        options = SamplingOptions(max_new_tokens=_WARM_UP_TOKENS, temperature=0.0)
        self._scheduler.add(Request(prompt=(0,), options=options))
        while self._scheduler.has_work:
            self._scheduler.step()
        self._scheduler.counts = BatchCounts()

    def _info(self, generator: Generator, vocabulary: int) -> ModelInfo:
        executor, cache = self._executor, self._executor.cache
        return ModelInfo(
            model_type=str(self._model.config.model_type),
            vocabulary=vocabulary,
            end_ids=self._end_ids,
            context=context_tokens(self._model),
            max_running=self._scheduler.max_running,
            num_layers=len(executor.store),
            num_experts=max((x.arrivals.num_experts for x in executor.store), default=0),
            device=str(self._model.device) if cache is None else cache.device.name,
            why_padded=generator.why_padded,
            why_no_images=why_no_images(self._model, is_padded=generator.why_padded is not None),
        )

    def run(self) -> None:
        """Run steps while there are requests, else wait for messages; return after `Stop`."""
        prefixes = self._scheduler.prefixes
        while not self._is_stopped:
            if not self._scheduler.has_work:
                self._send_report()
                self._send_snapshot()
                while not self._has_message() and prefixes.write_some():
                    pass
                self._wait()
            while not self._is_stopped and self._has_message():
                self._take(self._connection.recv())
            if self._scheduler.has_work and not self._is_stopped:
                self._step()
                prefixes.write_some()
        prefixes.close(_WRITING_SECONDS)

    def _has_message(self) -> bool:
        """Check for a message without waiting; `Connection.poll` costs ten times as much."""
        return bool(select.select([self._connection], [], [], 0)[0])

    def _wait(self) -> None:
        """Wait for a message, with a timeout while a page is open or prefixes await writing."""
        seconds = _REPORT_SECONDS if self._live.is_watched else None
        is_writing = self._scheduler.prefixes.has_unwritten
        self._connection.poll(_WRITER_SECONDS if is_writing else seconds)

    def _take(self, message: object) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            self._scheduler.cancel(message.request_id)
        elif isinstance(message, Watch):
            self._live.watch(message.is_on)
        elif isinstance(message, Stop):
            self._is_stopped = True

    def _submit(self, message: Submit) -> None:
        request = message.request
        try:
            if message.images is not None:
                request = dataclasses.replace(request, images=pickle.loads(message.images))
            options = self._resolved(request.options)
            self._scheduler.add(dataclasses.replace(request, options=options))
        except Exception as error:
            self._tell_failed((request.request_id,), error)

    def _tell_failed(self, numbers: Sequence[int], error: Exception) -> None:
        """Send `Failed` for the requests `numbers`; an unexpected error's text is only logged."""
        message = str(error)
        if not isinstance(error, TandemError):
            _log.error("a request failed inside the engine process", exc_info=error)
            message = "the request failed inside the server; see its log"
        self._connection.send(Failed(list(numbers), message, isinstance(error, ConfigError)))

    def _resolved(self, options: SamplingOptions) -> SamplingOptions:
        """Return the options; a seed without a temperature gets the model's temperature.

        A seed alone thus implies sampling, as in OpenAI's API. If the model does not sample by
        default, the options are returned unchanged.
        """
        config = self._model.generation_config
        if options.temperature is not None or options.seed is None or not config.do_sample:
            return options
        return dataclasses.replace(options, temperature=config.temperature or 1.0)

    def _step(self) -> None:
        start = time.perf_counter()
        try:
            token_outputs = self._scheduler.step()
        except StepFailedError as failed:
            # The requests are lost, but not the model: report what failed and go on with the
            # others.
            for numbers, error in failed.failures:
                self._tell_failed(numbers, error)
            if any(isinstance(error, DeviceLostError) for _, error in failed.failures):
                # The HTTP side starts another process. A normal exit of this one would wait for the
                # GPU.
                os._exit(EXIT_DEVICE_LOST)
            token_outputs = failed.token_outputs
        if token_outputs:
            self._connection.send(Progressed(token_outputs))
        self._live.step_done(time.perf_counter() - start, len(token_outputs))
        self._send_snapshot()
        if time.perf_counter() - self._last_report > _REPORT_SECONDS:
            self._send_report()

    def _layer_done(self, event: LayerExecuted) -> None:
        """Send `Alive`, at most once a second.

        With experts on disk, a step with a prefill chunk may take minutes.
        """
        now = time.perf_counter()
        if now - self._last_alive > _ALIVE_SECONDS:
            self._last_alive = now
            self._connection.send(Alive())

    def _send_snapshot(self) -> None:
        snapshot = self._live.due()
        if snapshot is not None:
            self._connection.send(Live(snapshot))

    def _send_report(self) -> None:
        self._last_report = time.perf_counter()
        self._connection.send(Report(self._statistics()))

    def _statistics(self) -> EngineStatistics:
        cache, experts, expert_cache = self._cache, self._experts, self._executor.cache
        slot_bytes = 0 if expert_cache is None else expert_cache.slot_bytes
        disk = SlotStatistics() if self._host_slots is None else self._host_slots.statistics()
        drafts = DraftCounts() if self._speculation is None else self._speculation.counts
        return EngineStatistics(
            batch=self._scheduler.counts,
            active_experts=experts.active_experts,
            hits=cache.hits,
            fetched_bytes=cache.copies * slot_bytes,
            prefetch_issued=cache.prefetch_issued,
            prefetch_useful=cache.prefetch_useful,
            rows_on_device=cache.device_rows,
            rows_on_cpu=experts.expert_rows - cache.device_rows,
            expert_bytes_read=experts.touched_bytes,
            host_slot_hits=disk.hits,
            host_slot_misses=disk.misses,
            host_slot_device_hits=disk.device_hits,
            host_slot_device_misses=disk.device_misses,
            host_slot_likely_reads=disk.likely_reads,
            host_slot_likely_used=disk.likely_used,
            expert_disk_bytes=disk.read_bytes,
            expert_disk_seconds=disk.waited_seconds,
            drafting_steps=drafts.num_drafting,
            unpaid_draft_steps=drafts.num_unpaid,
            draft_saved_bytes=drafts.saved_bytes,
            slots=0 if expert_cache is None else expert_cache.num_slots,
            disk_bytes=self._scheduler.prefixes.num_bytes_on_disk,
            memory_bytes=self._memory(),
        )

    def _memory(self) -> dict[str, int]:
        device, kv_cache = self._model.device, self._scheduler.kv_cache_bytes
        return {
            "host": process_bytes(),
            "experts": (self._host_slots or self._executor.store).num_bytes,
            "gpu": torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
            **({} if kv_cache is None else {"kv_cache": kv_cache}),
        }
