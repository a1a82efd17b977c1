"""DALI's tables of predictors (2, 5 and 8), and of the GPU's memory (7).

Tables 5 and 8 need the routers' inputs, which traces do not have: `tandem calibrate` measures both
on a model, by default the demo model. Table 7 is `tandem plan`'s answer.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.papers.replays import BATCHES, Replays
from benchmarks.papers.table import NONE, Table
from benchmarks.policy.gpu_forecast import answer

from tandem.policy.plan import LayerLoad
from tandem.policy.prediction.policy import Forecast
from tandem.sim.steps import LoadReader, replay_steps
from tandem.sim.systems import POLICIES

COUNTS = (1, 2)  # of experts that are predicted
LEARNED_TOKENS, JUDGED_TOKENS = 2000, 6000
# Table 2, DeepSeek-V2-Lite: percent by batch 8, 16, 32 and 64, for each k.
STATED = {
    "EdgeMoE": ("35.3 24.5 14.6 11.8", "34.7 25.0 20.1 15.4"),
    "HybriMoE": ("36.7 32.7 35.8 40.6", "45.0 40.1 39.3 38.9"),
}
PREDICTORS = {"popularity": "counts, as EdgeMoE", "regression": "Tandem's"}
# Table 5, percent: mean of four tasks; table 8: mean cosine. HybriMoE's gate, DALI's residual.
PREDICTED = {"DeepSeek-V2-Lite": ("72.6", "79.5"), "Qwen3-30B-A3B": ("77.6", "93.3")}
COSINES = {"Qwen3-30B-A3B": (".79", ".93"), "Mixtral-8x7B": (".79", ".89")}
# Table 7, GB by batch. Mixtral has half of its experts there; of Qwen only a quarter fits into it.
MEMORY_BATCHES = (8, 16, 32, 64, 128)
MEMORY = {
    "mixtral-8x7b": (0.5, "13.4 13.7 14.1 15.3 17.8", "12.6 12.8 13.0 13.6 15.1"),
    "qwen3-30b-a3b": (0.25, "4.79 5.02 5.35 6.16 7.42", "4.79 4.98 5.28 5.85 7.02"),
}


def statistics(replays: Replays) -> Table:
    """Return table 2: the share of the k best predicted experts that have the most tokens."""
    batches = replays.batches()
    rows = []
    for system, stated in STATED.items():
        pairs = zip(*[each.split() for each in stated], strict=True)
        known = dict(zip(BATCHES, map(", ".join, pairs), strict=True))
        cells = [known.get(batch, NONE) for batch in batches]
        rows.append([f"DALI's paper, DeepSeek-V2-Lite: {system}", *cells])
    for name in replays.traces:
        for predictor, what in PREDICTORS.items():
            found = [accuracies(replays, name, predictor, batch) for batch in batches]
            cells = [", ".join(f"{r:.1f}" for r in each) if each else NONE for each in found]
            rows.append([f"here, {name}: `{predictor}` ({what})", *cells])
    return Table(["right, k = 1 and 2, percent", *[f"batch {b}" for b in batches]], rows)


def accuracies(replays: Replays, name: str, predictor: str, batch: int) -> list[float] | None:
    """Return for each k the percentage of the k predicted experts that are among the k heaviest."""
    trace = replays.traces[name]
    if trace.num_sequences < batch:
        return None
    print(f"{name}, batch {batch}: {predictor}", file=sys.stderr, flush=True)
    prediction = POLICIES.predictions.factory(predictor)(trace.meta.geometry)
    reader, right, num_forecasts = LoadReader(trace), [0] * len(COUNTS), 0
    learned = min(LEARNED_TOKENS, replays.tokens // 2)
    for number, step in enumerate(replay_steps(trace, batch, 0)):
        prediction.begin_step(reader.token_ids(step))
        for load in reader.loads(step):
            forecast = prediction.predict(load.layer) if load.layer else None
            if forecast is not None and number * batch >= learned:
                num_forecasts += 1
                for place, k in enumerate(COUNTS):
                    right[place] += num_right(forecast, load, k)
            prediction.observe(load)
        if number * batch >= learned + min(JUDGED_TOKENS, replays.tokens):
            break
    return (
        [100 * r / (num_forecasts * k) for r, k in zip(right, COUNTS, strict=True)]
        if num_forecasts
        else None
    )


def num_right(forecast: Forecast, load: LayerLoad, k: int) -> int:
    """Return how many of the k best have at least as many tokens as the layer's k-th."""
    scores, tokens = forecast.scores, dict(zip(load.experts, load.tokens, strict=True))
    best = sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[:k]
    least = sorted(load.tokens, reverse=True)[:k][-1]
    return sum(tokens.get(expert, 0) >= least for expert in best)


def look_ahead(replays: Replays) -> Table:
    """Return tables 5 and 8: accuracy of asking the next router, with and without the residual."""
    with tempfile.TemporaryDirectory() as folder:
        vectors = str(Path(folder, "vectors"))
        found = answer(["calibrate", "demo", "--output", vectors])
    return look_ahead_of(found)


def look_ahead_of(found: dict[str, Any]) -> Table:
    """Return tables 5 and 8 from `tandem calibrate`'s results for the demo model."""
    rows = [
        [f"DALI's paper, {model}", *accuracy, *COSINES.get(model, (NONE, NONE))]
        for model, accuracy in PREDICTED.items()
    ]
    rows.append(["DALI's paper, Mixtral-8x7B", NONE, NONE, *COSINES["Mixtral-8x7B"]])
    for batch in BATCHES:
        if batch in found["batches"]:
            place = found["batches"].index(batch)
            accuracy = [f"{100 * found['accuracy'][s][place]:.1f}" for s in ("gate", "residual")]
            cosines = [f"{found['cosine'][s]:.2f}".lstrip("0") for s in ("gate", "residual")]
            rows.append([f"here, demo model, batch {batch}", *accuracy, *cosines])
    head = ["", "right: the gate alone", "with the residual", "cosine: alone", "with the residual"]
    return Table(head, rows)


def memory(replays: Replays) -> Table:
    """Return table 7: GB on the GPU by batch, 128 tokens per sequence, by `tandem plan`."""
    rows = []
    for shape, (share, hybrimoe, dali) in MEMORY.items():
        rows.append([f"{shape}, {share:.0%}", "HybriMoE", *hybrimoe.split()])
        rows.append(["", "DALI", *dali.split()])
        cells = []
        for batch in MEMORY_BATCHES:
            print(f"{shape}, batch {batch}: memory", file=sys.stderr, flush=True)
            words = ["plan", "--shape", shape, "--expert-dtype", "int4", "--device", "cuda"]
            words += ["--profile", "dali-testbed", "--no-measure", "--context", str(128 * batch)]
            plan = answer(words)
            parts = plan["gpu_bytes"]
            held = parts["dense"] + parts["kv_cache"] + parts["workspace"]
            cells.append(f"{(held + share * plan['parts_bytes']['experts']) / 1e9:.1f}")
        rows.append(["", "Tandem, int4", *cells])
    return Table(["model, experts there", "", *[f"batch {b}" for b in MEMORY_BATCHES]], rows)
