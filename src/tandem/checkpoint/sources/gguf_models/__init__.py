"""The architectures of GGUF files that are read, by `general.architecture`."""

from tandem.checkpoint.sources.gguf_models.architecture import Architecture, Recipe
from tandem.checkpoint.sources.gguf_models.full_attention import (
    HUNYUAN,
    dots1,
    ernie,
    glm4,
    gpt_oss,
    hunyuan,
    hy_v3,
    minimax_m2,
    mixtral,
    olmoe,
    paired,
    qwen2,
    qwen3,
)
from tandem.checkpoint.sources.gguf_models.latent_attention import (
    INDEXED,
    deepseek,
    deepseek_v32,
    glm_dsa,
)
from tandem.checkpoint.sources.gguf_models.linear_attention import (
    BAILING,
    KIMI,
    LFM2,
    QWEN3_5,
    QWEN3_NEXT,
    bailing,
    kimi,
    lfm2,
    qwen3_5,
    qwen3_next,
)
from tandem.checkpoint.sources.gguf_models.state_space import (
    GRANITE_HYBRID,
    JAMBA,
    NEMOTRON_H,
    granite,
    granite_hybrid,
    jamba,
    nemotron_h,
)
from tandem.checkpoint.sources.gguf_models.windows import (
    AFMOE,
    GEMMA4,
    LAGUNA,
    afmoe,
    exaone,
    gemma4,
    laguna,
    mimo2,
)

__all__ = ["ARCHITECTURES", "Architecture", "Recipe"]

ARCHITECTURES = {
    "qwen2moe": Architecture(qwen2),
    "qwen3moe": Architecture(qwen3),
    "minimax-m2": Architecture(minimax_m2),
    "llama": Architecture(mixtral, paired()),
    "olmoe": Architecture(olmoe),
    "gpt-oss": Architecture(gpt_oss, is_interleaved=True),
    "glm4moe": Architecture(glm4),
    "deepseek2": Architecture(deepseek),
    "deepseek32": Architecture(deepseek_v32, INDEXED),
    "glm-dsa": Architecture(glm_dsa, INDEXED),
    "qwen3next": Architecture(qwen3_next, QWEN3_NEXT),
    "qwen35moe": Architecture(qwen3_5, QWEN3_5),
    "lfm2moe": Architecture(lfm2, LFM2),
    "nemotron_h_moe": Architecture(nemotron_h, NEMOTRON_H),
    "jamba": Architecture(jamba, JAMBA),
    "granitehybrid": Architecture(granite_hybrid, GRANITE_HYBRID),
    "kimi-linear": Architecture(kimi, KIMI),
    "bailingmoe3": Architecture(bailing, BAILING),
    "ernie4_5-moe": Architecture(ernie),
    "hunyuan-moe": Architecture(hunyuan, HUNYUAN),
    "qwen3vlmoe": Architecture(qwen3),
    "dots1": Architecture(dots1),
    "hy_v3": Architecture(hy_v3),
    "exaone-moe": Architecture(exaone),
    "granitemoe": Architecture(granite, GRANITE_HYBRID),
    "mimo2": Architecture(mimo2),
    "gemma4": Architecture(gemma4, GEMMA4),
    "afmoe": Architecture(afmoe, AFMOE),
    "laguna": Architecture(laguna, LAGUNA),
}
