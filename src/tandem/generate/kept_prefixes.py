"""The directory for prefixes of prompts on disk. Loads torch only in `open`."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.decode.slots import SlotPool
    from tandem.foreign_types import PreTrainedModel
    from tandem.kv_cache.prefix_files import PrefixFiles

_log = logging.getLogger("tandem.kv_cache")
_PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class KeptPrefixes:
    """A directory in which prefixes of prompts are kept, and its size limit."""

    directory: Path
    limit_bytes: int

    def open(self, model: "PreTrainedModel", pool: "SlotPool") -> "PrefixFiles | None":
        """Return the prefix files that match a model in its present form.

        The keys and values of some tokens, bit by bit, identify the model: they change with its
        weights, its formats, the instruction set and Tandem's code. The pool must be empty, and is
        empty afterwards. If the pool's slots cannot be written to disk, logs a warning and returns
        None.
        """

        from tandem.hf.identity import model_identity
        from tandem.hf.lookahead.warm_up import warm_up_ids
        from tandem.kv_cache.prefix_files import (
            SEGMENT_TOKENS,
            SEGMENTS_BETWEEN_STATES,
            PrefixFiles,
        )

        tokens = warm_up_ids(model, _PROBE_TOKENS).tolist()
        pool.prefill({0: tokens})
        moving = pool.moving
        if moving is None:
            pool.keep(0, 0)
            _log.warning(
                "beginnings of prompts are not kept on disk: this model keeps its keys and values "
                "on a GPU, in Transformers' own caches or in other blocks"
            )
            return None
        probe = moving.take_out(0, 0, _PROBE_TOKENS)
        assert probe is not None
        pool.keep(0, 0)
        moving.states.keep_every(SEGMENT_TOKENS * SEGMENTS_BETWEEN_STATES)
        return PrefixFiles(self.directory, self.limit_bytes, model_identity(model).encode() + probe)
