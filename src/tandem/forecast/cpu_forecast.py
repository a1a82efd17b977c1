"""Forecasts a model's speed on the CPU of another machine, from that machine's profile."""

from dataclasses import dataclass

from tandem.experts.measuring.profiler import EMULATED, experts_seconds
from tandem.forecast.gpu_forecast import costs_for
from tandem.forecast.sizes import ModelSizes
from tandem.forecast.speed_forecast import PROMPT_TOKENS, Forecast
from tandem.policy.cost import HardwareProfile, interpolate


@dataclass(frozen=True, slots=True)
class ProfileForecast(Forecast):
    """A model's speed, computed from the times in a profile, whose name is `profile`."""

    profile: str
    costs_of: str
    """The profile's model shape whose times were scaled to this model's bytes."""


def forecast_from_profile(sizes: ModelSizes, profile: HardwareProfile) -> ProfileForecast | str:
    """Return the speed on the profile's CPU, or a text that says why there is no forecast."""
    if sizes.is_dense:
        return "not forecast: profiles have no times of a dense model"
    if profile.gpu != EMULATED:
        return (
            f"not forecast: profile {profile.name!r} has times of dense parts only on its GPU; "
            "--device cuda plans for that"
        )
    costs = costs_for(sizes, profile)

    def seconds(tokens: int) -> float:
        rest = interpolate(costs.tokens, costs.dense_seconds, tokens)
        each_layer = rest + experts_seconds(costs, tokens)
        return each_layer * costs.num_moe_layers * sizes.num_layers / sizes.num_moe_layers

    return ProfileForecast(
        PROMPT_TOKENS, seconds(PROMPT_TOKENS), seconds(1), profile.name, costs.shape
    )
