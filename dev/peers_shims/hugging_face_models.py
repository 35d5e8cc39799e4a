"""The tests of every causal LM, for each architecture that seqtile knows, at a size of our own.

A batch has 55 tokens and a tile four. In the mode "untiled" nothing is applied.
"""

import unittest
from typing import Any

import torch
from peers_shims import hugging_face
from peers_shims.modes import MODES, architectures
from tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin, ids_tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

import seqtile
from seqtile.arch import ARCHS

SHAPE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXTRA = {
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {"head_dim": 8},
    "mixtral": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


class ModelTester:
    """What the tests ask for a model and its inputs."""

    batch_size, seq_length, is_training, num_labels = 5, 11, True, 3

    def __init__(self, model_type: str):
        self.causal_lm_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
        self.settings: dict[str, Any] = SHAPE | EXTRA.get(model_type, {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["settings"][name]
        except KeyError:
            raise AttributeError(name) from None

    def get_config(self) -> Any:
        return self.causal_lm_class.config_class(**self.settings)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


class Common:
    """Keeps `Tiled` from being collected by itself."""

    class Tiled(ModelTesterMixin, GenerationTesterMixin):
        model_type: str

        @classmethod
        def setUpClass(cls) -> None:
            super().setUpClass()
            options = MODES[hugging_face.mode]
            if options is not None:
                getattr(seqtile, f"apply_seqtile_to_{cls.model_type}")(chunk_tokens=4, **options)

        @classmethod
        def tearDownClass(cls) -> None:
            seqtile.restore(cls.model_type)
            super().tearDownClass()

        def setUp(self) -> None:
            self.model_tester = ModelTester(self.model_type)
            causal_lm = self.model_tester.causal_lm_class
            self.all_model_classes = (MODEL_MAPPING[causal_lm.config_class], causal_lm)


for name in architectures(hugging_face.mode):
    members = {"model_type": name, "test_all_params_have_gradient": not ARCHS[name].routed}
    globals()[f"Test_{name}"] = type(f"Test_{name}", (Common.Tiled, unittest.TestCase), members)
