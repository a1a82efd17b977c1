"""Tests of the engine process with a dense model: it answers, and its page has no grid."""

import json
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import tandem
from tandem.engine.engine import Engine
from tandem.engine.messages import EngineSettings, Live, Progressed, Ready, Stop, Submit, Watch
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions
from tests.hf.tiny import byte_tokenizer, save_tiny_dense

NEW_TOKENS = 5


def test_a_dense_model_is_served(tmp_path: Path) -> None:
    model: Any = tandem.load(save_tiny_dense(tmp_path / "m"), dtype="bfloat16", dense_dtype="auto")
    model.generation_config.eos_token_id = None
    ours, theirs = multiprocessing.Pipe()
    settings = EngineSettings(max_running=2, part_tokens=16)
    engine = Engine(lambda: (model, byte_tokenizer()), settings, theirs)
    running = threading.Thread(target=engine.run, daemon=True)
    running.start()
    options = SamplingOptions(max_new_tokens=NEW_TOKENS, temperature=0.0)
    ours.send(Watch(True))
    for number, token in ((1, 40), (2, 41)):
        ours.send(Submit(Request(request_id=number, prompt=(token,), options=options)))
    info = None
    snapshots: list[dict[str, Any]] = []
    served: list[int] = []
    while len(served) < 2 * NEW_TOKENS or not snapshots:
        message = ours.recv()
        if isinstance(message, Ready):
            info = message.info
        elif isinstance(message, Live):
            snapshots.append(json.loads(message.snapshot))
        elif isinstance(message, Progressed):
            served += [token_output.request_id for token_output in message.token_outputs]
    ours.send(Stop())
    running.join(30)
    assert info is not None
    assert (info.num_layers, info.num_experts, info.why_padded) == (0, 0, None)
    assert (snapshots[0]["layers"], snapshots[0]["where"]) == (0, "")
    assert sorted(served) == [1] * NEW_TOKENS + [2] * NEW_TOKENS
