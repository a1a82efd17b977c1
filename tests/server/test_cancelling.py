"""Tests of the engine process by steps: cancelled requests free slots; its pipe."""

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.engine.engine import Engine
from tandem.engine.messages import Cancel, EngineSettings, Progressed, Stop, Submit
from tandem.engine.process import came
from tandem.generate.kept_prefixes import KeptPrefixes
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions
from tandem.kv_cache.prefix_files import SEGMENT_TOKENS
from tests.hf.tiny import byte_tokenizer

PROMPTS = {1: 40, 2: 41}
LEAVES_IN_STEP = 5


def test_who_leaves_during_a_step_gets_no_other(tiny_checkpoint: Path) -> None:
    """The first request is cancelled during its fifth token; the second gets the slot."""
    ours, theirs = multiprocessing.Pipe()
    model: Any = tandem.load(tiny_checkpoint)
    settings = EngineSettings(max_running=1, part_tokens=16, has_replay=False)
    engine = Engine(lambda: (model, byte_tokenizer()), settings, theirs)
    steps = 0

    def leave(module: Any, inputs: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == LEAVES_IN_STEP:
            ours.send(Cancel(1))
        elif steps == 2 * LEAVES_IN_STEP:
            ours.send(Stop())

    model.get_input_embeddings().register_forward_pre_hook(leave)
    options = SamplingOptions(max_new_tokens=400, temperature=0.0)
    for number, token in PROMPTS.items():
        ours.send(Submit(Request(request_id=number, prompt=(token,), options=options)))
    engine.run()
    assert steps == 2 * LEAVES_IN_STEP
    served = []
    while ours.poll():
        message = ours.recv()
        if isinstance(message, Progressed):
            served += [token_output.request_id for token_output in message.token_outputs]
    assert served == [1] * LEAVES_IN_STEP + [2] * LEAVES_IN_STEP


def test_a_beginning_outlives_the_process(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The second engine finds on disk what the first one computed."""
    model: Any = tandem.load(tiny_checkpoint)
    prompt = tuple(40 + i % 50 for i in range(SEGMENT_TOKENS + 20))
    options = SamplingOptions(max_new_tokens=3, temperature=0.0)
    reused = []
    for _ in range(2):
        ours, theirs = multiprocessing.Pipe()
        settings = EngineSettings(
            max_running=1,
            part_tokens=64,
            has_replay=False,
            kept_prefixes=KeptPrefixes(tmp_path, 1 << 24),
        )
        engine = Engine(lambda: (model, byte_tokenizer()), settings, theirs)
        ours.send(Submit(Request(prompt=prompt, options=options)))
        thread = threading.Thread(target=engine.run)
        thread.start()
        while not isinstance(message := ours.recv(), Progressed):
            pass
        reused.append(message.token_outputs[0].reused_tokens)
        ours.send(Stop())
        thread.join()
    assert reused == [0, SEGMENT_TOKENS]


def test_all_messages_that_have_come_are_read_at_once() -> None:
    ours, theirs = multiprocessing.Pipe()
    for number in range(3):
        theirs.send(number)
    assert list(came(ours)) == [0, 1, 2]


def test_messages_before_the_end_are_not_lost() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.send("last")
    theirs.close()
    reading = came(ours)
    assert next(reading) == "last"
    with pytest.raises(EOFError):
        next(reading)
