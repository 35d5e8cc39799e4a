"""The public names of `seqtile` for type checkers and editors: its names are imported when they are first used.

`make models` writes the functions by model type; `test/test_public_face.py` holds them against the package.
"""

from torch import nn

from seqtile import integrations, memory, models, modules, offload, sp
from seqtile.fitting import fit
from seqtile.models import apply_seqtile, restore, status
from seqtile.ops.gated_mlp import gated_mlp
from seqtile.ops.linear import LowRank
from seqtile.ops.linear_cross_entropy import LossMetrics, linear_cross_entropy
from seqtile.ops.linear_divergence import linear_divergence
from seqtile.ops.linear_log_probs import TokenValues, linear_log_probs
from seqtile.ops.linear_topk_divergence import linear_topk_divergence
from seqtile.ops.tiled import tiled

__all__ = [
    "LossMetrics",
    "LowRank",
    "TokenValues",
    "apply_seqtile",
    "apply_seqtile_to_afmoe",
    "apply_seqtile_to_apertus",
    "apply_seqtile_to_arcee",
    "apply_seqtile_to_aria",
    "apply_seqtile_to_aria_text",
    "apply_seqtile_to_axk1",
    "apply_seqtile_to_axk2",
    "apply_seqtile_to_aya_vision",
    "apply_seqtile_to_bailing_hybrid",
    "apply_seqtile_to_bamba",
    "apply_seqtile_to_bart",
    "apply_seqtile_to_beam",
    "apply_seqtile_to_bert",
    "apply_seqtile_to_bert_generation",
    "apply_seqtile_to_big_bird",
    "apply_seqtile_to_bigbird_pegasus",
    "apply_seqtile_to_biogpt",
    "apply_seqtile_to_bitnet",
    "apply_seqtile_to_blenderbot",
    "apply_seqtile_to_blenderbot_small",
    "apply_seqtile_to_blip",
    "apply_seqtile_to_blip_2",
    "apply_seqtile_to_bloom",
    "apply_seqtile_to_blt",
    "apply_seqtile_to_camembert",
    "apply_seqtile_to_chameleon",
    "apply_seqtile_to_codegen",
    "apply_seqtile_to_cohere",
    "apply_seqtile_to_cohere2",
    "apply_seqtile_to_cohere2_moe",
    "apply_seqtile_to_cohere2_vision",
    "apply_seqtile_to_cohere_compass",
    "apply_seqtile_to_cohere_compass_text",
    "apply_seqtile_to_cosmos3_edge",
    "apply_seqtile_to_cosmos3_omni",
    "apply_seqtile_to_cpmant",
    "apply_seqtile_to_ctrl",
    "apply_seqtile_to_cwm",
    "apply_seqtile_to_data2vec_text",
    "apply_seqtile_to_dbrx",
    "apply_seqtile_to_deepseek_ocr2",
    "apply_seqtile_to_deepseek_v2",
    "apply_seqtile_to_deepseek_v3",
    "apply_seqtile_to_deepseek_v4",
    "apply_seqtile_to_deepseek_v32",
    "apply_seqtile_to_deepseek_vl",
    "apply_seqtile_to_deepseek_vl_hybrid",
    "apply_seqtile_to_diffllama",
    "apply_seqtile_to_diffusion_gemma",
    "apply_seqtile_to_doge",
    "apply_seqtile_to_dots1",
    "apply_seqtile_to_dots3_note",
    "apply_seqtile_to_dots3_note_text",
    "apply_seqtile_to_electra",
    "apply_seqtile_to_emu3",
    "apply_seqtile_to_ernie",
    "apply_seqtile_to_ernie4_5",
    "apply_seqtile_to_ernie4_5_moe",
    "apply_seqtile_to_ernie4_5_vl_moe",
    "apply_seqtile_to_evolla",
    "apply_seqtile_to_exaone4",
    "apply_seqtile_to_exaone4_5",
    "apply_seqtile_to_exaone_moe",
    "apply_seqtile_to_falcon",
    "apply_seqtile_to_falcon_h1",
    "apply_seqtile_to_falcon_mamba",
    "apply_seqtile_to_fast_vlm",
    "apply_seqtile_to_flex_olmo",
    "apply_seqtile_to_flint",
    "apply_seqtile_to_florence2",
    "apply_seqtile_to_fuyu",
    "apply_seqtile_to_gemma",
    "apply_seqtile_to_gemma2",
    "apply_seqtile_to_gemma3",
    "apply_seqtile_to_gemma3_text",
    "apply_seqtile_to_gemma3n",
    "apply_seqtile_to_gemma3n_text",
    "apply_seqtile_to_gemma4",
    "apply_seqtile_to_gemma4_assistant",
    "apply_seqtile_to_gemma4_text",
    "apply_seqtile_to_gemma4_unified",
    "apply_seqtile_to_gemma4_unified_assistant",
    "apply_seqtile_to_gemma4_unified_text",
    "apply_seqtile_to_git",
    "apply_seqtile_to_glm",
    "apply_seqtile_to_glm4",
    "apply_seqtile_to_glm4_moe",
    "apply_seqtile_to_glm4_moe_lite",
    "apply_seqtile_to_glm4v",
    "apply_seqtile_to_glm4v_moe",
    "apply_seqtile_to_glm5_next",
    "apply_seqtile_to_glm46v",
    "apply_seqtile_to_glm_moe_dsa",
    "apply_seqtile_to_glm_ocr",
    "apply_seqtile_to_glmga",
    "apply_seqtile_to_got_ocr2",
    "apply_seqtile_to_gpt2",
    "apply_seqtile_to_gpt_bigcode",
    "apply_seqtile_to_gpt_neo",
    "apply_seqtile_to_gpt_neox",
    "apply_seqtile_to_gpt_neox_japanese",
    "apply_seqtile_to_gpt_oss",
    "apply_seqtile_to_gpt_sw3",
    "apply_seqtile_to_gptj",
    "apply_seqtile_to_granite",
    "apply_seqtile_to_granite4_vision",
    "apply_seqtile_to_granite_docling",
    "apply_seqtile_to_granite_swa",
    "apply_seqtile_to_granitemoe",
    "apply_seqtile_to_granitemoe_swa",
    "apply_seqtile_to_granitemoehybrid",
    "apply_seqtile_to_granitemoeshared",
    "apply_seqtile_to_helium",
    "apply_seqtile_to_hrm_text",
    "apply_seqtile_to_hunyuan_v1_dense",
    "apply_seqtile_to_hunyuan_v1_moe",
    "apply_seqtile_to_hunyuan_vl",
    "apply_seqtile_to_hy_v3",
    "apply_seqtile_to_hy_v4",
    "apply_seqtile_to_hyperclovax",
    "apply_seqtile_to_hyperclovax_vision_v2",
    "apply_seqtile_to_idefics",
    "apply_seqtile_to_idefics2",
    "apply_seqtile_to_idefics3",
    "apply_seqtile_to_inkling2",
    "apply_seqtile_to_inkling2_text",
    "apply_seqtile_to_inkling_mm_model",
    "apply_seqtile_to_inkling_text",
    "apply_seqtile_to_instructblip",
    "apply_seqtile_to_instructblipvideo",
    "apply_seqtile_to_internlm3",
    "apply_seqtile_to_internvl",
    "apply_seqtile_to_iquestcoder",
    "apply_seqtile_to_jais2",
    "apply_seqtile_to_jamba",
    "apply_seqtile_to_janus",
    "apply_seqtile_to_jetmoe",
    "apply_seqtile_to_kimi_k25",
    "apply_seqtile_to_kimi_linear",
    "apply_seqtile_to_kolibri1",
    "apply_seqtile_to_kosmos_2",
    "apply_seqtile_to_kosmos_2_5",
    "apply_seqtile_to_laguna",
    "apply_seqtile_to_lfm2",
    "apply_seqtile_to_lfm2_moe",
    "apply_seqtile_to_lfm2_vl",
    "apply_seqtile_to_lfm3",
    "apply_seqtile_to_lfm3_vl",
    "apply_seqtile_to_lighton_ocr",
    "apply_seqtile_to_llama",
    "apply_seqtile_to_llama4",
    "apply_seqtile_to_llama4_text",
    "apply_seqtile_to_llava",
    "apply_seqtile_to_llava_next",
    "apply_seqtile_to_llava_next_video",
    "apply_seqtile_to_llava_onevision",
    "apply_seqtile_to_longcat_flash",
    "apply_seqtile_to_mamba",
    "apply_seqtile_to_mamba2",
    "apply_seqtile_to_marian",
    "apply_seqtile_to_mbart",
    "apply_seqtile_to_megatron_bert",
    "apply_seqtile_to_mellum",
    "apply_seqtile_to_mimo_v2_flash",
    "apply_seqtile_to_minicpm3",
    "apply_seqtile_to_minicpm_ocr",
    "apply_seqtile_to_minicpmv4_6",
    "apply_seqtile_to_minicpmv4_7",
    "apply_seqtile_to_minimax",
    "apply_seqtile_to_minimax_m2",
    "apply_seqtile_to_minimax_m3_vl",
    "apply_seqtile_to_minimax_m3_vl_text",
    "apply_seqtile_to_ministral",
    "apply_seqtile_to_ministral3",
    "apply_seqtile_to_mistral",
    "apply_seqtile_to_mistral3",
    "apply_seqtile_to_mistral4",
    "apply_seqtile_to_mistral_large4",
    "apply_seqtile_to_mixtral",
    "apply_seqtile_to_mllama",
    "apply_seqtile_to_modernbert_decoder",
    "apply_seqtile_to_molmo2",
    "apply_seqtile_to_moshi",
    "apply_seqtile_to_moss_transcribe_diarize",
    "apply_seqtile_to_mpt",
    "apply_seqtile_to_muse_glimmer",
    "apply_seqtile_to_muse_spark",
    "apply_seqtile_to_musicgen",
    "apply_seqtile_to_musicgen_melody",
    "apply_seqtile_to_mvp",
    "apply_seqtile_to_nanochat",
    "apply_seqtile_to_nemotron",
    "apply_seqtile_to_nemotron_h",
    "apply_seqtile_to_nemotron_h_omni",
    "apply_seqtile_to_olmo",
    "apply_seqtile_to_olmo2",
    "apply_seqtile_to_olmo3",
    "apply_seqtile_to_olmo_hybrid",
    "apply_seqtile_to_olmoe",
    "apply_seqtile_to_openai_gpt",
    "apply_seqtile_to_opt",
    "apply_seqtile_to_ovis2",
    "apply_seqtile_to_paddleocr_vl",
    "apply_seqtile_to_paligemma",
    "apply_seqtile_to_pegasus",
    "apply_seqtile_to_perception_lm",
    "apply_seqtile_to_persimmon",
    "apply_seqtile_to_phi",
    "apply_seqtile_to_phi3",
    "apply_seqtile_to_phi4_multimodal",
    "apply_seqtile_to_phimoe",
    "apply_seqtile_to_pi0",
    "apply_seqtile_to_pix2struct",
    "apply_seqtile_to_plbart",
    "apply_seqtile_to_pp_chart2table",
    "apply_seqtile_to_pp_formulanet",
    "apply_seqtile_to_prophetnet",
    "apply_seqtile_to_qianfan_ocr",
    "apply_seqtile_to_qwen2",
    "apply_seqtile_to_qwen2_5_omni_thinker",
    "apply_seqtile_to_qwen2_5_vl",
    "apply_seqtile_to_qwen2_moe",
    "apply_seqtile_to_qwen2_vl",
    "apply_seqtile_to_qwen3",
    "apply_seqtile_to_qwen3_5",
    "apply_seqtile_to_qwen3_5_moe",
    "apply_seqtile_to_qwen3_5_moe_text",
    "apply_seqtile_to_qwen3_5_text",
    "apply_seqtile_to_qwen3_moe",
    "apply_seqtile_to_qwen3_next",
    "apply_seqtile_to_qwen3_omni_moe_thinker",
    "apply_seqtile_to_qwen3_vl",
    "apply_seqtile_to_qwen3_vl_moe",
    "apply_seqtile_to_qwen4_exp",
    "apply_seqtile_to_qwen4_exp_text",
    "apply_seqtile_to_recurrent_gemma",
    "apply_seqtile_to_reformer",
    "apply_seqtile_to_rembert",
    "apply_seqtile_to_roberta",
    "apply_seqtile_to_roberta_prelayernorm",
    "apply_seqtile_to_roc_bert",
    "apply_seqtile_to_roformer",
    "apply_seqtile_to_rwkv",
    "apply_seqtile_to_seed_oss",
    "apply_seqtile_to_shieldgemma2",
    "apply_seqtile_to_smollm3",
    "apply_seqtile_to_smolvlm",
    "apply_seqtile_to_solar_open",
    "apply_seqtile_to_stablelm",
    "apply_seqtile_to_starcoder2",
    "apply_seqtile_to_step3p7",
    "apply_seqtile_to_t5gemma2",
    "apply_seqtile_to_trocr",
    "apply_seqtile_to_udop",
    "apply_seqtile_to_unlimited_ocr",
    "apply_seqtile_to_vaultgemma",
    "apply_seqtile_to_video_llama_3",
    "apply_seqtile_to_video_llava",
    "apply_seqtile_to_vipllava",
    "apply_seqtile_to_vision_encoder_decoder",
    "apply_seqtile_to_whisper",
    "apply_seqtile_to_xglm",
    "apply_seqtile_to_xlm",
    "apply_seqtile_to_xlm_roberta",
    "apply_seqtile_to_xlm_roberta_xl",
    "apply_seqtile_to_xlnet",
    "apply_seqtile_to_xlstm",
    "apply_seqtile_to_xmod",
    "apply_seqtile_to_youtu",
    "apply_seqtile_to_zamba",
    "apply_seqtile_to_zamba2",
    "apply_seqtile_to_zaya",
    "fit",
    "gated_mlp",
    "integrations",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "linear_topk_divergence",
    "memory",
    "models",
    "modules",
    "offload",
    "restore",
    "sp",
    "status",
    "tiled",
]

__version__: str

def apply_seqtile_to_llama(
    model: nn.Module | None = None,
    *,
    mlp: bool = True,
    loss: bool = True,
    layer: bool = False,
    head_groups: int | str | None = None,
    chunk_tokens: int | None = None,
    check: bool | str = True,
) -> None:
    """Tiles llama models: the loss and the MLP in memory that does not grow with length.

    Args:
        model: the model to tile, alone, also in PEFT's wrapper; None tiles Hugging Face's classes, for every
            model of this type with a head that is built from then on.
        mlp: tile the MLPs.
        loss: tile lm_head and loss: in training, with labels, no logits are computed and none are returned.
        layer: tile whole layers: everything of a layer but attention itself, and the norm behind the last layer. A
            layer then keeps its input, queries, keys, values and what attention returned. Of Liger's norms the weights
            are read; neither they nor its RoPE are called.
        head_groups: with `layer`, compute attention for so many groups of kv heads one after the other, so that
            queries, keys and values exist for one group at a time, and are not kept; "auto" makes as many groups as
            divide the kv heads, up to 8. An attention that keeps other large tensors is refused, or, given a number,
            computed once more. It must treat every head alike (no slopes or biases by head), since it is not told which
            heads it is given.
        chunk_tokens: tokens of a chunk; None for max(2048, hidden size), for the experts of a mixture more.
        check: the first training step compares the tiled model with the untiled one, on 23 tokens of its own batch, and
            raises ValueError if the loss or a gradient differs by more than rounding: that of the embeddings' output,
            and of every parameter of up to 4M numbers; "full" for every parameter's. False: it does not.

    Applying twice changes nothing. Apply after Liger, whose RMSNorm and RoPE stay. `seqtile.restore` undoes it,
    `seqtile.status` tells what is tiled.

    Plain nn.Linear layers and plain LoRA over them are read directly. What cannot be (experts, quantised layers, other
    adapters, dropout, unusual activations, hooks) is called as it is, chunk by chunk, which costs one product more of
    the loss; `seqtile.status` tells which.

    Raises ValueError, and changes nothing, for what it cannot honour, such as another loss function.
    """

apply_seqtile_to_afmoe = apply_seqtile_to_llama
apply_seqtile_to_apertus = apply_seqtile_to_llama
apply_seqtile_to_arcee = apply_seqtile_to_llama
apply_seqtile_to_aria = apply_seqtile_to_llama
apply_seqtile_to_aria_text = apply_seqtile_to_llama
apply_seqtile_to_axk1 = apply_seqtile_to_llama
apply_seqtile_to_axk2 = apply_seqtile_to_llama
apply_seqtile_to_aya_vision = apply_seqtile_to_llama
apply_seqtile_to_bailing_hybrid = apply_seqtile_to_llama
apply_seqtile_to_bamba = apply_seqtile_to_llama
apply_seqtile_to_bart = apply_seqtile_to_llama
apply_seqtile_to_beam = apply_seqtile_to_llama
apply_seqtile_to_bert = apply_seqtile_to_llama
apply_seqtile_to_bert_generation = apply_seqtile_to_llama
apply_seqtile_to_big_bird = apply_seqtile_to_llama
apply_seqtile_to_bigbird_pegasus = apply_seqtile_to_llama
apply_seqtile_to_biogpt = apply_seqtile_to_llama
apply_seqtile_to_bitnet = apply_seqtile_to_llama
apply_seqtile_to_blenderbot = apply_seqtile_to_llama
apply_seqtile_to_blenderbot_small = apply_seqtile_to_llama
apply_seqtile_to_blip = apply_seqtile_to_llama
apply_seqtile_to_blip_2 = apply_seqtile_to_llama
apply_seqtile_to_bloom = apply_seqtile_to_llama
apply_seqtile_to_blt = apply_seqtile_to_llama
apply_seqtile_to_camembert = apply_seqtile_to_llama
apply_seqtile_to_chameleon = apply_seqtile_to_llama
apply_seqtile_to_codegen = apply_seqtile_to_llama
apply_seqtile_to_cohere = apply_seqtile_to_llama
apply_seqtile_to_cohere2 = apply_seqtile_to_llama
apply_seqtile_to_cohere2_moe = apply_seqtile_to_llama
apply_seqtile_to_cohere2_vision = apply_seqtile_to_llama
apply_seqtile_to_cohere_compass = apply_seqtile_to_llama
apply_seqtile_to_cohere_compass_text = apply_seqtile_to_llama
apply_seqtile_to_cosmos3_edge = apply_seqtile_to_llama
apply_seqtile_to_cosmos3_omni = apply_seqtile_to_llama
apply_seqtile_to_cpmant = apply_seqtile_to_llama
apply_seqtile_to_ctrl = apply_seqtile_to_llama
apply_seqtile_to_cwm = apply_seqtile_to_llama
apply_seqtile_to_data2vec_text = apply_seqtile_to_llama
apply_seqtile_to_dbrx = apply_seqtile_to_llama
apply_seqtile_to_deepseek_ocr2 = apply_seqtile_to_llama
apply_seqtile_to_deepseek_v2 = apply_seqtile_to_llama
apply_seqtile_to_deepseek_v3 = apply_seqtile_to_llama
apply_seqtile_to_deepseek_v4 = apply_seqtile_to_llama
apply_seqtile_to_deepseek_v32 = apply_seqtile_to_llama
apply_seqtile_to_deepseek_vl = apply_seqtile_to_llama
apply_seqtile_to_deepseek_vl_hybrid = apply_seqtile_to_llama
apply_seqtile_to_diffllama = apply_seqtile_to_llama
apply_seqtile_to_diffusion_gemma = apply_seqtile_to_llama
apply_seqtile_to_doge = apply_seqtile_to_llama
apply_seqtile_to_dots1 = apply_seqtile_to_llama
apply_seqtile_to_dots3_note = apply_seqtile_to_llama
apply_seqtile_to_dots3_note_text = apply_seqtile_to_llama
apply_seqtile_to_electra = apply_seqtile_to_llama
apply_seqtile_to_emu3 = apply_seqtile_to_llama
apply_seqtile_to_ernie = apply_seqtile_to_llama
apply_seqtile_to_ernie4_5 = apply_seqtile_to_llama
apply_seqtile_to_ernie4_5_moe = apply_seqtile_to_llama
apply_seqtile_to_ernie4_5_vl_moe = apply_seqtile_to_llama
apply_seqtile_to_evolla = apply_seqtile_to_llama
apply_seqtile_to_exaone4 = apply_seqtile_to_llama
apply_seqtile_to_exaone4_5 = apply_seqtile_to_llama
apply_seqtile_to_exaone_moe = apply_seqtile_to_llama
apply_seqtile_to_falcon = apply_seqtile_to_llama
apply_seqtile_to_falcon_h1 = apply_seqtile_to_llama
apply_seqtile_to_falcon_mamba = apply_seqtile_to_llama
apply_seqtile_to_fast_vlm = apply_seqtile_to_llama
apply_seqtile_to_flex_olmo = apply_seqtile_to_llama
apply_seqtile_to_flint = apply_seqtile_to_llama
apply_seqtile_to_florence2 = apply_seqtile_to_llama
apply_seqtile_to_fuyu = apply_seqtile_to_llama
apply_seqtile_to_gemma = apply_seqtile_to_llama
apply_seqtile_to_gemma2 = apply_seqtile_to_llama
apply_seqtile_to_gemma3 = apply_seqtile_to_llama
apply_seqtile_to_gemma3_text = apply_seqtile_to_llama
apply_seqtile_to_gemma3n = apply_seqtile_to_llama
apply_seqtile_to_gemma3n_text = apply_seqtile_to_llama
apply_seqtile_to_gemma4 = apply_seqtile_to_llama
apply_seqtile_to_gemma4_assistant = apply_seqtile_to_llama
apply_seqtile_to_gemma4_text = apply_seqtile_to_llama
apply_seqtile_to_gemma4_unified = apply_seqtile_to_llama
apply_seqtile_to_gemma4_unified_assistant = apply_seqtile_to_llama
apply_seqtile_to_gemma4_unified_text = apply_seqtile_to_llama
apply_seqtile_to_git = apply_seqtile_to_llama
apply_seqtile_to_glm = apply_seqtile_to_llama
apply_seqtile_to_glm4 = apply_seqtile_to_llama
apply_seqtile_to_glm4_moe = apply_seqtile_to_llama
apply_seqtile_to_glm4_moe_lite = apply_seqtile_to_llama
apply_seqtile_to_glm4v = apply_seqtile_to_llama
apply_seqtile_to_glm4v_moe = apply_seqtile_to_llama
apply_seqtile_to_glm5_next = apply_seqtile_to_llama
apply_seqtile_to_glm46v = apply_seqtile_to_llama
apply_seqtile_to_glm_moe_dsa = apply_seqtile_to_llama
apply_seqtile_to_glm_ocr = apply_seqtile_to_llama
apply_seqtile_to_glmga = apply_seqtile_to_llama
apply_seqtile_to_got_ocr2 = apply_seqtile_to_llama
apply_seqtile_to_gpt2 = apply_seqtile_to_llama
apply_seqtile_to_gpt_bigcode = apply_seqtile_to_llama
apply_seqtile_to_gpt_neo = apply_seqtile_to_llama
apply_seqtile_to_gpt_neox = apply_seqtile_to_llama
apply_seqtile_to_gpt_neox_japanese = apply_seqtile_to_llama
apply_seqtile_to_gpt_oss = apply_seqtile_to_llama
apply_seqtile_to_gpt_sw3 = apply_seqtile_to_llama
apply_seqtile_to_gptj = apply_seqtile_to_llama
apply_seqtile_to_granite = apply_seqtile_to_llama
apply_seqtile_to_granite4_vision = apply_seqtile_to_llama
apply_seqtile_to_granite_docling = apply_seqtile_to_llama
apply_seqtile_to_granite_swa = apply_seqtile_to_llama
apply_seqtile_to_granitemoe = apply_seqtile_to_llama
apply_seqtile_to_granitemoe_swa = apply_seqtile_to_llama
apply_seqtile_to_granitemoehybrid = apply_seqtile_to_llama
apply_seqtile_to_granitemoeshared = apply_seqtile_to_llama
apply_seqtile_to_helium = apply_seqtile_to_llama
apply_seqtile_to_hrm_text = apply_seqtile_to_llama
apply_seqtile_to_hunyuan_v1_dense = apply_seqtile_to_llama
apply_seqtile_to_hunyuan_v1_moe = apply_seqtile_to_llama
apply_seqtile_to_hunyuan_vl = apply_seqtile_to_llama
apply_seqtile_to_hy_v3 = apply_seqtile_to_llama
apply_seqtile_to_hy_v4 = apply_seqtile_to_llama
apply_seqtile_to_hyperclovax = apply_seqtile_to_llama
apply_seqtile_to_hyperclovax_vision_v2 = apply_seqtile_to_llama
apply_seqtile_to_idefics = apply_seqtile_to_llama
apply_seqtile_to_idefics2 = apply_seqtile_to_llama
apply_seqtile_to_idefics3 = apply_seqtile_to_llama
apply_seqtile_to_inkling2 = apply_seqtile_to_llama
apply_seqtile_to_inkling2_text = apply_seqtile_to_llama
apply_seqtile_to_inkling_mm_model = apply_seqtile_to_llama
apply_seqtile_to_inkling_text = apply_seqtile_to_llama
apply_seqtile_to_instructblip = apply_seqtile_to_llama
apply_seqtile_to_instructblipvideo = apply_seqtile_to_llama
apply_seqtile_to_internlm3 = apply_seqtile_to_llama
apply_seqtile_to_internvl = apply_seqtile_to_llama
apply_seqtile_to_iquestcoder = apply_seqtile_to_llama
apply_seqtile_to_jais2 = apply_seqtile_to_llama
apply_seqtile_to_jamba = apply_seqtile_to_llama
apply_seqtile_to_janus = apply_seqtile_to_llama
apply_seqtile_to_jetmoe = apply_seqtile_to_llama
apply_seqtile_to_kimi_k25 = apply_seqtile_to_llama
apply_seqtile_to_kimi_linear = apply_seqtile_to_llama
apply_seqtile_to_kolibri1 = apply_seqtile_to_llama
apply_seqtile_to_kosmos_2 = apply_seqtile_to_llama
apply_seqtile_to_kosmos_2_5 = apply_seqtile_to_llama
apply_seqtile_to_laguna = apply_seqtile_to_llama
apply_seqtile_to_lfm2 = apply_seqtile_to_llama
apply_seqtile_to_lfm2_moe = apply_seqtile_to_llama
apply_seqtile_to_lfm2_vl = apply_seqtile_to_llama
apply_seqtile_to_lfm3 = apply_seqtile_to_llama
apply_seqtile_to_lfm3_vl = apply_seqtile_to_llama
apply_seqtile_to_lighton_ocr = apply_seqtile_to_llama
apply_seqtile_to_llama4 = apply_seqtile_to_llama
apply_seqtile_to_llama4_text = apply_seqtile_to_llama
apply_seqtile_to_llava = apply_seqtile_to_llama
apply_seqtile_to_llava_next = apply_seqtile_to_llama
apply_seqtile_to_llava_next_video = apply_seqtile_to_llama
apply_seqtile_to_llava_onevision = apply_seqtile_to_llama
apply_seqtile_to_longcat_flash = apply_seqtile_to_llama
apply_seqtile_to_mamba = apply_seqtile_to_llama
apply_seqtile_to_mamba2 = apply_seqtile_to_llama
apply_seqtile_to_marian = apply_seqtile_to_llama
apply_seqtile_to_mbart = apply_seqtile_to_llama
apply_seqtile_to_megatron_bert = apply_seqtile_to_llama
apply_seqtile_to_mellum = apply_seqtile_to_llama
apply_seqtile_to_mimo_v2_flash = apply_seqtile_to_llama
apply_seqtile_to_minicpm3 = apply_seqtile_to_llama
apply_seqtile_to_minicpm_ocr = apply_seqtile_to_llama
apply_seqtile_to_minicpmv4_6 = apply_seqtile_to_llama
apply_seqtile_to_minicpmv4_7 = apply_seqtile_to_llama
apply_seqtile_to_minimax = apply_seqtile_to_llama
apply_seqtile_to_minimax_m2 = apply_seqtile_to_llama
apply_seqtile_to_minimax_m3_vl = apply_seqtile_to_llama
apply_seqtile_to_minimax_m3_vl_text = apply_seqtile_to_llama
apply_seqtile_to_ministral = apply_seqtile_to_llama
apply_seqtile_to_ministral3 = apply_seqtile_to_llama
apply_seqtile_to_mistral = apply_seqtile_to_llama
apply_seqtile_to_mistral3 = apply_seqtile_to_llama
apply_seqtile_to_mistral4 = apply_seqtile_to_llama
apply_seqtile_to_mistral_large4 = apply_seqtile_to_llama
apply_seqtile_to_mixtral = apply_seqtile_to_llama
apply_seqtile_to_mllama = apply_seqtile_to_llama
apply_seqtile_to_modernbert_decoder = apply_seqtile_to_llama
apply_seqtile_to_molmo2 = apply_seqtile_to_llama
apply_seqtile_to_moshi = apply_seqtile_to_llama
apply_seqtile_to_moss_transcribe_diarize = apply_seqtile_to_llama
apply_seqtile_to_mpt = apply_seqtile_to_llama
apply_seqtile_to_muse_glimmer = apply_seqtile_to_llama
apply_seqtile_to_muse_spark = apply_seqtile_to_llama
apply_seqtile_to_musicgen = apply_seqtile_to_llama
apply_seqtile_to_musicgen_melody = apply_seqtile_to_llama
apply_seqtile_to_mvp = apply_seqtile_to_llama
apply_seqtile_to_nanochat = apply_seqtile_to_llama
apply_seqtile_to_nemotron = apply_seqtile_to_llama
apply_seqtile_to_nemotron_h = apply_seqtile_to_llama
apply_seqtile_to_nemotron_h_omni = apply_seqtile_to_llama
apply_seqtile_to_olmo = apply_seqtile_to_llama
apply_seqtile_to_olmo2 = apply_seqtile_to_llama
apply_seqtile_to_olmo3 = apply_seqtile_to_llama
apply_seqtile_to_olmo_hybrid = apply_seqtile_to_llama
apply_seqtile_to_olmoe = apply_seqtile_to_llama
apply_seqtile_to_openai_gpt = apply_seqtile_to_llama
apply_seqtile_to_opt = apply_seqtile_to_llama
apply_seqtile_to_ovis2 = apply_seqtile_to_llama
apply_seqtile_to_paddleocr_vl = apply_seqtile_to_llama
apply_seqtile_to_paligemma = apply_seqtile_to_llama
apply_seqtile_to_pegasus = apply_seqtile_to_llama
apply_seqtile_to_perception_lm = apply_seqtile_to_llama
apply_seqtile_to_persimmon = apply_seqtile_to_llama
apply_seqtile_to_phi = apply_seqtile_to_llama
apply_seqtile_to_phi3 = apply_seqtile_to_llama
apply_seqtile_to_phi4_multimodal = apply_seqtile_to_llama
apply_seqtile_to_phimoe = apply_seqtile_to_llama
apply_seqtile_to_pi0 = apply_seqtile_to_llama
apply_seqtile_to_pix2struct = apply_seqtile_to_llama
apply_seqtile_to_plbart = apply_seqtile_to_llama
apply_seqtile_to_pp_chart2table = apply_seqtile_to_llama
apply_seqtile_to_pp_formulanet = apply_seqtile_to_llama
apply_seqtile_to_prophetnet = apply_seqtile_to_llama
apply_seqtile_to_qianfan_ocr = apply_seqtile_to_llama
apply_seqtile_to_qwen2 = apply_seqtile_to_llama
apply_seqtile_to_qwen2_5_omni_thinker = apply_seqtile_to_llama
apply_seqtile_to_qwen2_5_vl = apply_seqtile_to_llama
apply_seqtile_to_qwen2_moe = apply_seqtile_to_llama
apply_seqtile_to_qwen2_vl = apply_seqtile_to_llama
apply_seqtile_to_qwen3 = apply_seqtile_to_llama
apply_seqtile_to_qwen3_5 = apply_seqtile_to_llama
apply_seqtile_to_qwen3_5_moe = apply_seqtile_to_llama
apply_seqtile_to_qwen3_5_moe_text = apply_seqtile_to_llama
apply_seqtile_to_qwen3_5_text = apply_seqtile_to_llama
apply_seqtile_to_qwen3_moe = apply_seqtile_to_llama
apply_seqtile_to_qwen3_next = apply_seqtile_to_llama
apply_seqtile_to_qwen3_omni_moe_thinker = apply_seqtile_to_llama
apply_seqtile_to_qwen3_vl = apply_seqtile_to_llama
apply_seqtile_to_qwen3_vl_moe = apply_seqtile_to_llama
apply_seqtile_to_qwen4_exp = apply_seqtile_to_llama
apply_seqtile_to_qwen4_exp_text = apply_seqtile_to_llama
apply_seqtile_to_recurrent_gemma = apply_seqtile_to_llama
apply_seqtile_to_reformer = apply_seqtile_to_llama
apply_seqtile_to_rembert = apply_seqtile_to_llama
apply_seqtile_to_roberta = apply_seqtile_to_llama
apply_seqtile_to_roberta_prelayernorm = apply_seqtile_to_llama
apply_seqtile_to_roc_bert = apply_seqtile_to_llama
apply_seqtile_to_roformer = apply_seqtile_to_llama
apply_seqtile_to_rwkv = apply_seqtile_to_llama
apply_seqtile_to_seed_oss = apply_seqtile_to_llama
apply_seqtile_to_shieldgemma2 = apply_seqtile_to_llama
apply_seqtile_to_smollm3 = apply_seqtile_to_llama
apply_seqtile_to_smolvlm = apply_seqtile_to_llama
apply_seqtile_to_solar_open = apply_seqtile_to_llama
apply_seqtile_to_stablelm = apply_seqtile_to_llama
apply_seqtile_to_starcoder2 = apply_seqtile_to_llama
apply_seqtile_to_step3p7 = apply_seqtile_to_llama
apply_seqtile_to_t5gemma2 = apply_seqtile_to_llama
apply_seqtile_to_trocr = apply_seqtile_to_llama
apply_seqtile_to_udop = apply_seqtile_to_llama
apply_seqtile_to_unlimited_ocr = apply_seqtile_to_llama
apply_seqtile_to_vaultgemma = apply_seqtile_to_llama
apply_seqtile_to_video_llama_3 = apply_seqtile_to_llama
apply_seqtile_to_video_llava = apply_seqtile_to_llama
apply_seqtile_to_vipllava = apply_seqtile_to_llama
apply_seqtile_to_vision_encoder_decoder = apply_seqtile_to_llama
apply_seqtile_to_whisper = apply_seqtile_to_llama
apply_seqtile_to_xglm = apply_seqtile_to_llama
apply_seqtile_to_xlm = apply_seqtile_to_llama
apply_seqtile_to_xlm_roberta = apply_seqtile_to_llama
apply_seqtile_to_xlm_roberta_xl = apply_seqtile_to_llama
apply_seqtile_to_xlnet = apply_seqtile_to_llama
apply_seqtile_to_xlstm = apply_seqtile_to_llama
apply_seqtile_to_xmod = apply_seqtile_to_llama
apply_seqtile_to_youtu = apply_seqtile_to_llama
apply_seqtile_to_zamba = apply_seqtile_to_llama
apply_seqtile_to_zamba2 = apply_seqtile_to_llama
apply_seqtile_to_zaya = apply_seqtile_to_llama
