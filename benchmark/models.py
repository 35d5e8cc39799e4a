"""Models of Hugging Face's, of a shape and randomly initialised, and what is done to them."""

import torch
from benchmark.device import DEVICE
from benchmark.shapes import Shape
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from seqtile import offload
from seqtile.offload.checkpointing import Checkpoints, install
from seqtile.offload.store import Copies, Pool, Store
from seqtile.renamed import enable_checkpointing


def build(
    shape: Shape, dtype: torch.dtype, layers: int, vocab: int | None = None, positions: int = 2**22
) -> PreTrainedModel:
    """In training mode, with sdpa; of another number of layers and, if given, of another vocabulary."""
    config = AutoConfig.for_model(
        shape.model_type,
        vocab_size=vocab or shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
        use_cache=False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **({"sliding_window": None} if shape.model_type == "mistral" else {}),  # as from its version 0.3 on
    )
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def offloaded(model: PreTrainedModel) -> None:
    """Checkpointed, with the layers' inputs in host memory."""
    if DEVICE == "cuda":
        offload.enable(model)
    else:  # what the store costs: there is no other memory
        enable_checkpointing(model)
        install(Checkpoints(Store(Pool(), Copies(torch.device(DEVICE)))), model, keep_last=1)
