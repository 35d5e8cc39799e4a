"""Axolotl: seqtile as a plugin.

plugins: [seqtile.integrations.axolotl.SeqtilePlugin]
seqtile: true
"""

from collections.abc import Mapping
from typing import Any, Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, ConfigDict, model_validator
from torch import nn

from seqtile.fitting import fit
from seqtile.integrations.prefixes import share_prefixes_of
from seqtile.models.apply import apply_seqtile
from seqtile.models.status import status
from seqtile.offload import enable
from seqtile.sp import SequenceParallelTrainerMixin, initialize
from seqtile.unwrapped import unwrapped

_COLLIDING = ("tiled_mlp", "liger_glu_activation", "liger_fused_linear_cross_entropy", "cut_cross_entropy")
_OWN_LORA = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
"""Options of Axolotl's that replace the forwards of MLPs and of attention; on by default under LoRA."""
_SHARING = ("context_parallel_size", "sequence_parallel_degree")
"""Options that also spread sequences over GPUs."""
_TRAINERS = ("rl", "reward_model", "process_reward_model", "trainer_cls")
"""Options that choose another trainer."""
_NOT_CHOSEN = ("seqtile", "seqtile_fit", "seqtile_share_prefixes", "seqtile_sequence_parallel")
"""Options that seqtile_fit does not choose."""
_OPTIMIZERS = {"adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit", "sgd": "sgd"}
"""Axolotl's names to those of `memory.Setup`; any other optimizer is planned as adamw."""


class SeqtileArgs(BaseModel):
    """seqtile's options in a YAML of Axolotl's."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # as descriptions

    seqtile: bool | None = None
    """Compute the loss and the MLPs in chunks of the sequence."""
    seqtile_layer: bool | None = None
    """Also the rest of each layer except attention."""
    seqtile_head_groups: int | str | None = None
    """With seqtile_layer: the number of head chunks in attention, or auto."""
    seqtile_attention: Literal["varlen"] | None = None
    """Compute attention without masks of length x length."""
    seqtile_offload: bool | None = None
    """Keep the layers' inputs in host memory; needs gradient_checkpointing: false."""
    seqtile_fit: bool | None = None
    """Choose the cheapest of these with which sequence_len fits on one GPU."""
    seqtile_share_prefixes: bool | int | None = None
    """Compute prefixes that rows share once; a number: the shortest one, in tokens."""
    seqtile_sequence_parallel: int | None = None
    """Spread each sequence over this many GPUs; instead of context_parallel_size."""

    @model_validator(mode="after")
    def check_seqtile(self) -> "SeqtileArgs":
        """Raises ValueError for options that conflict."""
        asked = [name for name in SeqtileArgs.model_fields if getattr(self, name)]
        others = [name for name in (*_COLLIDING, *_taken(vars(self))) if getattr(self, name, None)]
        chosen = [name for name in asked if name not in _NOT_CHOSEN]
        if asked and not self.seqtile:
            raise ValueError(f"{asked[0]}: expected seqtile: true with it")
        if self.seqtile and others:
            raise ValueError(f"seqtile: true and {others[0]} tile the same part of a model; leave one out")
        if self.seqtile_fit and chosen:
            raise ValueError(f"seqtile_fit chooses {chosen[0]}; leave one out")
        taken = [name for name in (*_SHARING, *_TRAINERS) if getattr(self, name, None) not in (None, False, 1)]
        if self.seqtile_sequence_parallel and taken:
            raise ValueError(f"seqtile_sequence_parallel: expected Axolotl's own trainer, without {taken[0]}")
        if self.seqtile_head_groups and not self.seqtile_layer:
            raise ValueError("seqtile_head_groups: expected seqtile_layer: true with it")
        if (self.seqtile_offload or self.seqtile_fit) and getattr(self, "gradient_checkpointing", None):
            name = "seqtile_offload" if self.seqtile_offload else "seqtile_fit"
            raise ValueError(f"{name} checkpoints by itself: expected gradient_checkpointing: false with it")
        return self


def _taken(cfg: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns which of Axolotl's LoRA kernels replace what seqtile tiles."""
    return _OWN_LORA if cfg.get("seqtile_layer") or cfg.get("seqtile_fit") else _OWN_LORA[:1]


class SeqtilePlugin(BasePlugin):
    """Tiles the model once Axolotl has loaded it, with its adapters."""

    def register(self, cfg: dict[str, Any]) -> None:
        """Turns off those LoRA kernels of Axolotl's that replace tiled modules, unless the YAML asks for them."""
        for name in _taken(cfg) if cfg.get("seqtile") else ():
            if cfg.get(name) is None:
                cfg[name] = False

    def get_input_args(self) -> str:
        """Returns the path of the class that declares the options."""
        return "seqtile.integrations.axolotl.SeqtileArgs"

    def get_trainer_cls(self, cfg: Any) -> type | None:
        """Returns Axolotl's trainer over ranks that share sequences, if the YAML asks for it. Raises the
        errors of `sp.initialize`."""
        if not cfg.get("seqtile_sequence_parallel"):
            return None
        from axolotl.core.trainers import AxolotlTrainer

        class OverRanks(SequenceParallelTrainerMixin, AxolotlTrainer):
            def __init__(self, *args: Any, **kwargs: Any):
                super().__init__(*args, sequence_parallel=initialize(cfg.seqtile_sequence_parallel), **kwargs)

        return OverRanks

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Applies what the YAML asks for. Raises the errors of `apply_seqtile`, `fit` and `offload.enable`."""
        if not cfg.seqtile:
            return
        if cfg.seqtile_fit:
            optimizer = _OPTIMIZERS.get(str(cfg.optimizer), "adamw")
            setup: dict[str, Any] = {"dtype": "bfloat16"} if cfg.bf16 else {}
            setup["accumulate"] = (cfg.gradient_accumulation_steps or 1) > 1
            fit(model, seq_len=cfg.sequence_len, batch_size=cfg.micro_batch_size, optimizer=optimizer, **setup)
            return
        groups = cfg.seqtile_head_groups
        groups = int(groups) if str(groups).isdecimal() else groups
        apply_seqtile(model, layer=bool(cfg.seqtile_layer), head_groups=groups, attention=cfg.seqtile_attention)
        if cfg.seqtile_offload:
            enable(unwrapped(model))
        print(status(model))

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Calls `share_prefixes_of` if the YAML asks for it, and raises its errors."""
        if cfg.seqtile_share_prefixes:
            share_prefixes_of(trainer, cfg.seqtile_share_prefixes)
