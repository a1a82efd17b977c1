"""The content of docs/models.md: parsing and writing. Knows no model; the tests fill it in."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import transformers

from tandem.hf.adapters.refused import why_no_adapter
from tests.architectures import adapted
from tests.conftest import REPOSITORY

PATH = REPOSITORY / "docs" / "models.md"


@dataclass
class ModelsDocument:
    """Table rows by architecture."""

    run: dict[str, str] = field(default_factory=dict)
    """The cells of each architecture that runs."""
    blind: dict[str, str] = field(default_factory=dict)
    """The reason why an architecture has no look-ahead."""
    refused: dict[str, str] = field(default_factory=dict)
    """The class of its experts and the reason why it has no adapter, as cells."""
    released: str = ""
    """The section of released shapes, written by `benchmarks.generation.released`."""

    def add(self, name: str, cells: str, why_blind: str | None) -> None:
        """Add an architecture's rows."""
        self.run[name] = cells
        if why_blind is not None:
            self.blind[name] = why_blind

    def check(self, name: str, cells: str, why_blind: str | None) -> None:
        """Assert that an architecture's rows are those that the tests found."""
        assert self.run.get(name) == cells, "run `make docs-models`"
        assert self.blind.get(name) == why_blind, "run `make docs-models`"

    def text(self) -> str:
        """Return the text of the whole file."""
        lines = [
            "# Models",
            "",
            "Written by `make docs-models`, which runs all of it. A tiny random model of each",
            "architecture is saved, loaded through Tandem, and its logits (fp32, a prompt and a",
            "decode step with KV cache) equal those of Transformers' own eager forward to 1e-5;",
            "packed and loaded again they are equal to the bit.",
            "",
            "In slots, requests of any lengths are decoded together, and a step that is recorded",
            "once is replayed with few calls (counted here: four layers, the experts and linear",
            "layers packed). The last column is what a GPU would do, found on its twin on the CPU:",
            "only Qwen3-MoE, Mixtral and the demo have run on a card.",
            "",
            f"## {len(self.run)} architectures run (Transformers {transformers.__version__})",
            "",
            "| architecture | class in the test | experts | tested | decode step (CPU) "
            "| decode step (GPU) |",
            "|---|---|---|---|---|---|",
            *_rows(self.run),
            "",
            "## Looking ahead",
            "",
            "The next layer's router can be run ahead of its turn ([runtime.md](runtime.md)), "
            f"but for {len(self.blind)}:",
            "",
            "| architecture | why not |",
            "|---|---|",
            *_rows(self.blind),
            "",
            *self.released.splitlines(),
            "",
            f"## {len(self.refused)} are refused",
            "",
            "Their experts do not go through Transformers' experts interface, and no adapter puts"
            " them there;",
            "`tandem.load` says so.",
            "",
            "| architecture | its own experts class | why |",
            "|---|---|---|",
            *_rows(self.refused),
            "",
            "## Dense models",
            "",
            "A model without experts runs too: its linear layers packed by `dense_dtype`, in"
            " sequence slots, its",
            "steps recorded, with drafts; on device `cuda` all of it lies on the GPU, its steps one"
            " graph each, or",
            "it is refused with what it takes and what there is. Options of experts, and the"
            " emulated device, are",
            "refused with a sentence ([decision 23](decisions/0023-dense-models.md)).",
            "Qwen3, Llama, Mistral and Gemma 3 are compared with Transformers as the models above"
            " are; GGUF files of",
            "them and others are listed in [loading.md](loading.md). Tandem's own purpose is models"
            " with experts: what a",
            "dense model gains here is the same packed weights, steps, server and files.",
            "",
        ]
        return "\n".join(lines)


def written() -> ModelsDocument | None:
    """Return the file's rows; None if it is about another version of Transformers."""
    text = PATH.read_text(encoding="utf-8")
    if f"(Transformers {transformers.__version__})" not in text:
        return None
    released = released_section(text)
    run, blind, refused = (
        dict(re.findall(r"^\| (?!architecture )(\w+) \| (.+) \|$", table, re.MULTILINE))
        for table in text.replace(released, "").split("\n|---|")[1:]
    )
    return ModelsDocument(run, blind, refused, released)


def released_section(text: str) -> str:
    """Return the section of released shapes, which is kept as it is."""
    found = re.search(r"^## Released shapes\n.*?(?=\n\n## )", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def models_outside_the_interface() -> dict[str, str]:
    """Return {model folder: cells} of MoE models with their own forward of experts."""
    models = Path(transformers.__file__).parent / "models"
    found = {}
    for path in sorted(models.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        experts = re.search(
            r"class (\w*(?:Experts?|ExpertGLU|MoE|Moe|SparseMLP))\(nn\.Module", source
        )
        is_run = "use_experts_implementation" in source or path.parent.name in adapted()
        if experts and not is_run:
            found[path.parent.name] = f"{experts[1]} | {why_no_adapter(path.parent.name)}"
    return found


def _rows(cells: dict[str, str]) -> list[str]:
    return [f"| {name} | {cells[name]} |" for name in sorted(cells)]
