"""The demo model: a real Mixture-of-Experts checkpoint, built here from a small dense model.

The modules of this package do not load torch until a model has to be built.
"""

from tandem.demo.recipe import DEMO_KINDS, RECIPE, Recipe
from tandem.demo.store import ensure_demo_model, is_demo_model, verify_demo_model

__all__ = [
    "DEMO_KINDS",
    "RECIPE",
    "Recipe",
    "ensure_demo_model",
    "is_demo_model",
    "verify_demo_model",
]
