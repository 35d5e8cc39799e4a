"""Fields of the configs of well-known checkpoints. `python -m dev.models` proves their models as it does those of the
default configs, so that no proof runs when users tile them. Sizes matter if they are 0, 1 or equal, see small.py.
"""

from typing import Any

Said = dict[str, Any]
_LLAMA: Said = {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 5e5, "num_key_value_heads": 8}
_LLAMA3: Said = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MISTRAL: Said = {"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 1e6, "head_dim": 128}
_QWEN2: Said = {"num_attention_heads": 32, "num_key_value_heads": 4, "use_sliding_window": False}
_QWEN3: Said = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "attention_bias": False,
    "sliding_window": None,
}
_PHI3: Said = {
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attention_bias": False,
}
_LONG: Said = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
_YARN: Said = {
    "rope_type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS: Said = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GEMMA3: Said = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "num_hidden_layers": 34,
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_LITE: Said = {
    "q_lora_rank": None,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rope_scaling": _YARN,
}
_TIED: Said = {"tie_word_embeddings": True}
_UNTIED: Said = {"tie_word_embeddings": False}
_BALANCED: Said = {"output_router_logits": True}

REAL_CONFIGS: tuple[tuple[str, str, Said], ...] = (
    ("Llama-2-7B", "llama", {}),
    ("Llama-3-8B", "llama", _LLAMA),
    ("Llama-3.1-8B", "llama", _LLAMA | {"rope_scaling": _LLAMA3}),
    ("Llama-3.2-1B", "llama", _LLAMA | _TIED | {"rope_scaling": _LLAMA3}),
    ("SmolLM2-135M", "llama", _LLAMA | _TIED),
    ("SmolLM2-1.7B", "llama", _TIED),
    ("SmolLM3-3B", "smollm3", {"num_attention_heads": 16, "num_key_value_heads": 4} | _TIED),
    ("Mistral-7B-v0.1", "mistral", _MISTRAL | {"sliding_window": 4096}),
    ("Mistral-7B-v0.3", "mistral", _MISTRAL | {"sliding_window": None}),
    ("Mixtral-8x7B", "mixtral", _MISTRAL | {"sliding_window": None}),
    ("Mixtral-8x7B, balanced", "mixtral", _MISTRAL | {"sliding_window": None} | _BALANCED),
    ("Qwen2.5-0.5B", "qwen2", _QWEN2 | _TIED),
    ("Qwen2.5-7B", "qwen2", _QWEN2 | _UNTIED),
    ("Qwen3-0.6B", "qwen3", _QWEN3 | _TIED),
    ("Qwen3-8B", "qwen3", _QWEN3 | _UNTIED),
    ("Qwen3-30B-A3B", "qwen3_moe", _QWEN3 | {"norm_topk_prob": True}),
    ("Qwen3-30B-A3B, balanced", "qwen3_moe", _QWEN3 | {"norm_topk_prob": True} | _BALANCED),
    ("Gemma-2-9B", "gemma2", {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 42}),
    ("Gemma-3-1B", "gemma3_text", {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512}),
    ("Gemma-3-4B, text", "gemma3_text", _GEMMA3),
    ("Gemma-3-4B", "gemma3", {"text_config": _GEMMA3}),
    ("Phi-3-mini-4K", "phi3", _PHI3 | {"num_key_value_heads": 24, "sliding_window": 2047}),
    ("Phi-4", "phi3", _PHI3 | {"sliding_window": None}),
    ("Phi-4-mini", "phi3", _PHI3 | _TIED | {"rope_scaling": _LONG, "partial_rotary_factor": 0.75}),
    ("gpt-oss-20B", "gpt_oss", {"num_local_experts": 32, "num_hidden_layers": 24, "rope_scaling": _GPT_OSS}),
    ("DeepSeek-V2-Lite", "deepseek_v2", _LITE),
    ("DeepSeek-V3", "deepseek_v3", {"rope_scaling": _YARN}),
    ("Moonlight-16B-A3B", "deepseek_v3", {"q_lora_rank": None, "num_attention_heads": 16, "num_key_value_heads": 16}),
    ("OLMo-2-7B", "olmo2", {"rope_theta": 5e5}),
    ("Granite-3.3-8B", "granite", {"num_key_value_heads": 8, "attention_multiplier": 0.0078125} | _TIED),
    ("GLM-4-9B", "glm4", {"attention_bias": True, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
)
"""Name, model type, and the fields that differ from the type's default config."""
