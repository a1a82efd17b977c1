"""Tests of predictors: each finds its kind of pattern, and probabilities are calibrated."""

import random

import pytest

from tandem.cli.parser import parse
from tandem.devices.options import OffloadOptions
from tandem.policy.plan import Geometry, Hint, LayerLoad
from tandem.policy.prediction import Prediction
from tandem.policy.prediction.policy import Forecast
from tandem.policy.settings import PlannerSettings
from tandem.sim.systems import POLICIES

GEOMETRY = Geometry(num_layers=4, num_experts=8, top_k=2)


def expected(forecast: Forecast | None) -> list[float]:
    assert forecast is not None
    return [(score - forecast.base) * forecast.scale for score in forecast.scores]


def best_two(forecast: Forecast | None) -> set[int]:
    values = expected(forecast)
    return set(sorted(range(len(values)), key=lambda e: -values[e])[:2])


def route(token: int, layer: int) -> tuple[int, ...]:
    first = (token * 3 + layer * 2) % 8
    return tuple(sorted((first, (first + 1) % 8)))


def train(policy: Prediction, steps: int) -> None:
    for step in range(steps):
        token = step * 5 % 4
        policy.begin_step((token,))
        for layer in range(4):
            experts = route(token, layer)
            policy.predict(layer)
            policy.observe(LayerLoad(layer, experts, (1, 1), (), (experts,)))


@pytest.mark.parametrize("name", ["regression", "token-memory"])
def test_a_known_token_foresees_every_layer_before_any_has_run(name: str) -> None:
    policy = POLICIES.predictions.factory(name)(GEOMETRY)
    train(policy, 400)
    policy.begin_step((3,))
    for layer in range(4):
        assert best_two(policy.predict(layer)) == set(route(3, layer))


def test_token_memory_forgets_the_tokens_that_are_longest_unused() -> None:
    policy = POLICIES.predictions.factory("token-memory")(GEOMETRY)
    train(policy, 400)
    for token in (2, *range(10, 1033)):
        policy.begin_step((token,))
    for token, is_known in ((2, True), (3, False)):
        policy.begin_step((token,))
        known = expected(policy.predict(0))
        policy.begin_step((5000 + token,))
        assert (known != expected(policy.predict(0))) == is_known


@pytest.mark.parametrize("name", ["regression", "transitions"])
def test_the_layer_above_foresees_the_next(name: str) -> None:
    policy = POLICIES.predictions.factory(name)(GEOMETRY)
    train(policy, 400)
    policy.begin_step(())
    policy.observe(LayerLoad(0, route(2, 0), (1, 1)))
    assert best_two(policy.predict(1)) == set(route(2, 1))


@pytest.mark.parametrize("name", ["gate", "residual"])
def test_hints_of_the_right_source_are_taken(name: str) -> None:
    policy = POLICIES.predictions.factory(name)(GEOMETRY)
    policy.begin_step(())
    policy.hint(Hint("other", LayerLoad(1, (5,), (1,))))
    assert policy.predict(1) is None
    policy.hint(Hint(name, LayerLoad(1, (2, 6), (3, 1))))
    assert expected(policy.predict(1)) == [0, 0, 3, 0, 0, 0, 1, 0]


def brier_score(accuracy: float | None, sources: tuple[str, ...] = ("residual",)) -> float:
    """Return the mean squared error of regression's probabilities, with hints of some accuracy.

    A token's expert is right with probability `accuracy`, otherwise random; None: no hints.
    """
    geometry = Geometry(num_layers=4, num_experts=16, top_k=2)
    draw = random.Random(0)
    policy = POLICIES.predictions.factory("regression")(geometry)
    total, count = 0.0, 0
    for step in range(1200):
        policy.begin_step(())
        # A third of the steps repeats: little can be predicted without hints.
        walk = step if step % 3 else 0
        for layer in range(4):
            route = random.Random(walk * 7 + layer)
            experts = tuple(sorted(route.sample(range(16), 2)))
            for source in sources if accuracy is not None else ():
                guess = {
                    e if draw.random() < (accuracy or 0) else draw.randrange(16) for e in experts
                }
                named = tuple(sorted(guess))
                policy.hint(Hint(source, LayerLoad(layer, named, (1,) * len(named))))
            forecast = policy.predict(layer)
            if step >= 600 and forecast is not None:
                for expert, score in enumerate(forecast.scores):
                    total += (forecast.chance(score) - (expert in experts)) ** 2
                    count += 1
            policy.observe(LayerLoad(layer, experts, (1, 1)))
    return total / count


def test_a_perfect_hint_is_believed_and_a_random_one_ignored() -> None:
    alone = brier_score(None)
    assert brier_score(1.0) < 0.02 * alone
    assert brier_score(0.0) < 1.02 * alone


def test_the_better_the_hint_the_better_the_forecast() -> None:
    errors = [brier_score(accuracy) for accuracy in (0.3, 0.6, 0.8, 0.95)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < brier_score(None)
    assert brier_score(0.6, ("gate", "residual")) < errors[1]  # two of them have more information


def test_a_hint_is_for_one_step_only() -> None:
    policy = POLICIES.predictions.factory("regression")(GEOMETRY)
    policy.begin_step((1,))
    before = expected(policy.predict(2))
    policy.hint(Hint("gate", LayerLoad(2, (5,), (1,))))
    policy.begin_step((1,))
    assert expected(policy.predict(2)) == before


@pytest.mark.parametrize("name", POLICIES.predictions.names())
def test_chances_are_probabilities(name: str) -> None:
    policy = POLICIES.predictions.factory(name)(GEOMETRY)
    train(policy, 60)
    policy.begin_step((1,))
    for layer in range(4):
        forecast = policy.predict(layer)
        if forecast is not None:
            assert all(0.0 <= forecast.chance(s) <= 1.0 for s in forecast.scores)
        policy.observe(LayerLoad(layer, route(1, layer), (1, 1), (), (route(1, layer),)))


def test_next_use_keeps_its_former_name() -> None:
    assert PlannerSettings(eviction="successor") == PlannerSettings(eviction="next-use")
    assert parse(["run", "--eviction", "successor"]).eviction == "next-use"
    assert OffloadOptions(eviction="successor", expert_memory="1GB").eviction == "next-use"


def test_regression_keeps_its_former_name() -> None:
    assert PlannerSettings(prediction="foresight") == PlannerSettings(prediction="regression")
    assert parse(["run", "--prediction", "foresight"]).prediction == "regression"
