"""Tests that importing Tandem is light, and works before and after Transformers."""

import subprocess
import sys

import pytest

from tests.programs import TORCH_IMPORTS, python

REGISTERED = (
    "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as q\n"
    "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as e\n"
    "assert 'tandem' in q and 'tandem' in e.valid_keys(), (list(q), e.valid_keys())\n"
)


def run_python(code: str, imports: str = TORCH_IMPORTS) -> None:
    """Run code in a process that has already imported torch, which is slow and irrelevant here."""
    done = python(code, imports=imports)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("tandem, tandem.core.errors, tandem.cli.main", {"torch", "numpy", "transformers"}),
        ("tandem.apis.answering", {"torch"}),  # the process that turns bodies into prompts
        ("tandem.sim.simulation", {"torch", "transformers"}),
        ("tandem.policy.settings", {"torch", "numpy", "transformers"}),
    ],
)
def test_import_is_free_of(modules: str, heavy: set[str]) -> None:
    code = f"import sys, {modules}\nassert not {heavy!r} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.seam
@pytest.mark.parametrize(
    "imports",
    [
        "import tandem, transformers",
        "import transformers.quantizers.auto, tandem",
        "import tandem\nfrom transformers import AutoModelForCausalLM",
        "from tandem import OffloadConfig, load",
    ],
)
def test_registers_in_any_order(imports: str) -> None:
    run_python(f"{imports}\n{REGISTERED}")


def test_exported_names_exist() -> None:
    run_python("import tandem\nfor name in tandem.__all__: getattr(tandem, name)")


@pytest.mark.parametrize("module", ["config", "conversion", "experts", "quantizer", "load", "save"])
def test_every_module_can_be_imported_first(module: str) -> None:
    """Any Tandem module, with Transformers and torch installed."""
    transformers = (
        f"{TORCH_IMPORTS}\nimport transformers.quantizers.auto, transformers.modeling_utils"
    )
    run_python(f"import tandem.hf.{module}\n{REGISTERED}", transformers)
