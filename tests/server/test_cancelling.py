"""The engine process frees a cancelled request's row within one step: its steps are counted."""

import multiprocessing
from pathlib import Path
from typing import Any

import tandem
from tandem.generate.sampling import SamplingOptions
from tandem.server.engine import Engine
from tandem.server.messages import Cancel, EngineSettings, Progressed, Stop, Submit
from tests.hf.tiny import byte_tokenizer

PROMPTS = {1: 40, 2: 41}
LEAVES_IN_STEP = 5


def test_who_leaves_during_a_step_gets_no_other(tiny_checkpoint: Path) -> None:
    """The first leaves while its fifth token is computed; the second has the row from there on."""
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
        ours.send(Submit(request_id=number, prompt=(token,), options=options))
    engine.run()
    assert steps == 2 * LEAVES_IN_STEP
    served = []
    while ours.poll():
        message = ours.recv()
        if isinstance(message, Progressed):
            served += [token_output.request_id for token_output in message.token_outputs]
    assert served == [1] * LEAVES_IN_STEP + [2] * LEAVES_IN_STEP
