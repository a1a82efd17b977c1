"""The result of a comparison, as text and JSON: speeds, and whether the first choices agree."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tandem.bench.peers.setting import Choice
from tandem.bench.peers.turns import Rounds, median, ratios, table
from tandem.core.units import format_bytes

MARGIN = 0.1
"""If a peer's two best logits differ by less, rounding decides which of them is the best."""
TANDEM = "tandem"


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often two systems have the same first choice after the tokens of one text."""

    num_tokens: int
    num_sure: int
    """Tokens after which the peer's two best logits differ by more than `MARGIN`."""
    num_agreed: int
    """Sure tokens after which both systems have the same first choice."""
    widest_margin: float
    """The peer's largest logit margin where the first choices differ; 0 if they never do."""

    @property
    def line(self) -> str:
        """The result as a sentence."""
        text = (
            f"First choices agree after {self.num_agreed} of {self.num_sure} tokens of a text "
            f"after which the other's two best logits differ by more than {MARGIN:g}"
        )
        if self.num_agreed == self.num_sure:
            return f"{text}."
        return f"{text}; where they do not, by at most {self.widest_margin:.2f}."


def agreement(ours: Sequence[Choice], theirs: Sequence[Choice]) -> Agreement:
    """Compare two systems' first choices after each token of the same text."""
    sure = [pair for pair in zip(ours, theirs, strict=True) if pair[1].margin > MARGIN]
    apart = [their.margin for our, their in sure if our.token != their.token]
    return Agreement(len(ours), len(sure), len(sure) - len(apart), max(apart, default=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The measurements of Tandem and another program on one file."""

    file: str
    machine: str
    """The processor, its number of threads and the instruction set."""
    versions: Mapping[str, str]
    """The version of each system by name, Tandem's first."""
    prompt: int
    steps: int
    rounds: int
    speeds: Mapping[str, Rounds]
    memory: Mapping[str, int]
    """Peak memory of each system in bytes, mapped parts of the file included; 0: unknown."""
    agreement: Agreement | None
    why_not_agreed: str = ""
    """The reason why first choices were not compared."""

    @property
    def rows(self) -> list[str]:
        """The table of median speeds, in Markdown."""
        return table(self.speeds, sorted(self.speeds[TANDEM]))

    @property
    def paragraph(self) -> str:
        """The result as a paragraph of prose, for use in other documents."""
        peer = next(name for name in self.speeds if name != TANDEM)
        depth = min(self.speeds[TANDEM])
        ours, theirs = (median(self.speeds[name][depth]) for name in (TANDEM, peer))
        prefill, decode = ratios(self.speeds[TANDEM][depth], self.speeds[peer][depth])
        agreed = self.why_not_agreed if self.agreement is None else self.agreement.line
        return (
            f"{self.file} on {self.machine}: {self.versions[TANDEM]} computes {ours.prefill:.1f} "
            f"tokens of a prompt and {ours.decode:.1f} of an answer a second, "
            f"{self.versions[peer]} {theirs.prefill:.1f} and {theirs.decode:.1f} "
            f"({prefill:.2f} and {decode:.2f} times as many). Medians of {self.rounds} rounds in "
            f"turns with the same file and threads, prompt {self.prompt}, answer {self.steps}"
            f"{f', behind {depth} tokens' if depth else ''}.{self._memory_line} {agreed}"
        ).rstrip()

    @property
    def _memory_line(self) -> str:
        if not all(self.memory.values()):
            return ""
        sizes = " and ".join(format_bytes(size) for size in self.memory.values())
        return f" They take {sizes} of memory at most."

    def json(self) -> dict[str, object]:
        """Return all results as a dictionary that can be written as JSON.

        Speeds are medians; ratios are Tandem's speed divided by that of the entry's system.
        """
        ours = self.speeds[TANDEM]
        cells = []
        for name, rounds in self.speeds.items():
            for depth, speeds in rounds.items():
                prefill, decode = ratios(ours[depth], speeds)
                over = {"prefill": prefill, "decode": decode}
                cell = {"system": name, "depth": depth, **asdict(median(speeds)), "ratios": over}
                cells.append(cell)
        return {
            "file": self.file, "machine": self.machine, "versions": dict(self.versions),
            "prompt": self.prompt, "steps": self.steps, "rounds": self.rounds, "speeds": cells,
            "memory_bytes": dict(self.memory),
            "agreement": None if self.agreement is None else asdict(self.agreement),
        }  # fmt: skip
