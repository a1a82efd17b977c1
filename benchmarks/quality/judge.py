"""The judge: a small MoE trained here in 16 bits: python -m benchmarks.quality.judge

A quantised checkpoint favours the format that it comes from, and so do models derived from it (the
demo model). The judge's weights have never been rounded to less than bf16. It has 15 M parameters,
8 experts of which two compute, and Qwen3-MoE's architecture; it is trained on free manuals in seven
languages and on Python's own library, some ten minutes on two cores. Text, seed and steps are
fixed; the weights' bits are not, since threads and instruction sets add in different orders.

Needs Debian's apt-get and dpkg-deb, which fetch the text. None of it is in the held-out text.
"""

import argparse
import gzip
import hashlib
import html
import json
import math
import re
import subprocess
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tandem.cli.keeping import cache_dir

# Debian 12's: (package and version, SHA-256). GFDL, GPL or CC BY-SA; the copyright files say which.
PACKAGES = {
    "debian-reference-de=2.100": "3b0ce65fd63e75ddf8eb07ca36293425135080e690a07e06a6ac8bc8040ef0aa",
    "debian-reference-en=2.100": "9f31d3a17df505de09689ca255512ea58c1fc47c59bb1b0c7bf1c23362e9743f",
    "debian-reference-es=2.100": "a59b68c96f83d3cf29a476c847aee38364764603ea62eee592791e0a843a269e",
    "debian-reference-fr=2.100": "01424cba9bfa2e13166da22d3d692d33a22ec7d8ef935ec81fd8802746087f65",
    "debian-reference-ja=2.100": "f67140e0b994409413bd5fcc8dfcce832445c99d724401f0275fa238daf30325",
    "debian-reference-zh-cn=2.100": (
        "6d2d8d9a646397e28b04cdff23d2e4374101ebf9be348e35961af62c8a2d0977"
    ),
    "developers-reference-ru=12.18": (
        "a618bfa826e2436fa73d5bf4eaac7170ff9d25a5d1bdd86b1c25a196a2b886c6"
    ),
    "gnome-user-docs=43.0-2": "0d635a840747958ca84da778b40d341f1155603851f922c9a171f5a181d6a39f",
    "installation-guide-amd64=20230508+deb12u1": (
        "812c43e1dc906daf671e3efe953dc023205c238e5bd5a3021ce4ca142793573a"
    ),
}
LANGUAGES = {  # a GNOME, an installer's and a Debian reference's name of each language
    "english": ("C", "en", "en"),
    "german": ("de", "de", "de"),
    "spanish": ("es", "es", "es"),
    "french": ("fr", "fr", "fr"),
    "russian": ("ru", "ru", None),
    "chinese": ("zh_CN", "zh_CN", "zh-cn"),
    "japanese": ("ja", "ja", "ja"),
}
BYTES_OF_DOMAIN = 1_200_000
VOCABULARY, WINDOW, BATCH, STEPS = 4096, 256, 8, 500
PEAK_RATE, WARM_UP = 2e-3, 40
END = "<|end|>"


def main() -> None:
    """Fetch the text, train, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=cache_dir() / "models" / "judge")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    folder = cache_dir() / "judge-text"
    texts = training_texts(fetch(folder))
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()
    print(f"{sum(map(len, texts.values()))} characters of text, sha256 {digest}")
    tokenizer = train_tokenizer(texts)
    ids = [torch.tensor(tokenizer(text + END)["input_ids"]) for text in texts.values()]
    print("tokens:", {name: len(found) for name, found in zip(texts, ids, strict=True)})
    model = train(ids, options.steps)
    model.to(torch.bfloat16).save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    sums = {f.name: _sha256(f) for f in sorted(options.output.iterdir()) if f.is_file()}
    print(json.dumps({"directory": str(options.output), "sha256": sums}))


def fetch(folder: Path) -> Path:
    """Return a directory with the packages' files; raises `SystemExit` for unexpected files."""
    root = folder / "root"
    if root.is_dir():
        return root
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    for package, sha256 in PACKAGES.items():
        (file,) = folder.glob(package.partition("=")[0] + "_*.deb")
        if _sha256(file) != sha256:
            raise SystemExit(f"{file} is not {package}, which the judge was trained on")
        subprocess.run(["dpkg-deb", "-x", file, root], check=True)
    return root


def training_texts(root: Path) -> dict[str, str]:
    """Return a text for each language, and code."""
    share = root / "usr/share"
    texts = {}
    for name, (gnome, installer, reference) in LANGUAGES.items():
        guide = share / f"doc/installation-guide-amd64/{installer}/install.{installer}.txt.gz"
        files = [guide, share / "developers-reference/ru/developers-reference.txt.gz"]
        if reference is not None:
            files[1] = share / f"debian-reference/debian-reference.{reference}.txt.gz"
        parts = [_cut(_decoded(file), BYTES_OF_DOMAIN // 3) for file in files]
        pages = sorted((share / f"help/{gnome}/gnome-help").glob("*.page"))
        parts += [_without_tags(page.read_text(encoding="utf-8")) for page in pages]
        texts[name] = _cut(_tidy("\n\n".join(parts)), BYTES_OF_DOMAIN)
    library = Path(sysconfig.get_paths()["stdlib"])
    code = "\n\n".join(f.read_text(encoding="utf-8") for f in sorted(library.glob("*.py")))
    return texts | {"code": _cut(code, BYTES_OF_DOMAIN)}


def _decoded(file: Path) -> str:
    found = gzip.decompress(file.read_bytes())
    is_russian_guide = file.name == "install.ru.txt.gz"
    return found.decode("koi8-r" if is_russian_guide else "utf-8")


def _cut(text: str, num_bytes: int) -> str:
    return text.encode()[:num_bytes].decode(errors="ignore")


def _without_tags(page: str) -> str:
    body = re.sub(r"<info>.*?</info>", "", page, flags=re.S)
    return html.unescape(re.sub(r"<[^>]+>", "", body))


def _tidy(text: str) -> str:
    text = re.sub(r"[ \t]+", " ", text)
    return re.sub(r"\n\s*\n+", "\n\n", re.sub(r"\n ", "\n", text))


def train_tokenizer(texts: dict[str, str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and of frequent pairs in the text."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    own.train_from_iterator(texts.values(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token=END, pad_token=END)


def judge_config() -> Qwen3MoeConfig:
    """Return the judge's sizes: multiples of 256, as K-quants and llama.cpp need."""
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=512, intermediate_size=512, norm_topk_prob=True,
        max_position_embeddings=2048, tie_word_embeddings=False, router_aux_loss_coef=0.01,
        output_router_logits=True, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip


def experts_forward(
    self: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts with one gradient per expert, instead of one of the size of all."""
    ups = self.get_parameter("gate_up_proj").unbind()
    downs = self.get_parameter("down_proj").unbind()
    out = torch.zeros_like(hidden)
    for expert, (up, down) in enumerate(zip(ups, downs, strict=True)):
        token, place = (top_k_index == expert).nonzero(as_tuple=True)
        gate, value = F.linear(hidden[token], up).chunk(2, -1)
        rows = F.linear(F.silu(gate) * value, down) * top_k_weights[token, place, None]
        out = out.index_add(0, token, rows.to(out.dtype))
    return out


def train(texts: list[Tensor], steps: int) -> Qwen3MoeForCausalLM:
    """Train on windows drawn uniformly from all texts."""
    torch.manual_seed(0)
    ALL_EXPERTS_FUNCTIONS.register("judge", experts_forward)
    config = judge_config()
    config._experts_implementation = "judge"
    model = Qwen3MoeForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
    draw = torch.Generator().manual_seed(0)
    begin, mean = time.perf_counter(), math.nan
    for step in range(steps):
        progress = max(0.0, step - WARM_UP) / (steps - WARM_UP)
        rate = min(1.0, (step + 1) / WARM_UP) * (
            0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2
        )
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * rate
        ids = _batch(texts, draw)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(input_ids=ids, labels=ids)
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = float(out.loss.detach())
        mean = loss if math.isnan(mean) else 0.95 * mean + 0.05 * loss
        if step % 20 == 19:
            seconds = time.perf_counter() - begin
            print(f"step {step + 1}/{steps}: loss {mean:.3f}, {seconds:.0f} s", flush=True)
    model.config.output_router_logits = False
    return model.eval()


def _batch(texts: list[Tensor], draw: torch.Generator) -> Tensor:
    rows = []
    for number in range(BATCH):
        text = texts[number % len(texts)]
        at = int(torch.randint(len(text) - WINDOW, (1,), generator=draw))
        rows.append(text[at : at + WINDOW])
    return torch.stack(rows)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
