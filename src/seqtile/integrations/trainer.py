"""Hugging Face's Trainer, and the trainers over it (TRL's, with PEFT or without): seqtile as one callback."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MethodType
from typing import Any

from accelerate.utils import convert_outputs_to_fp32, extract_model_from_parallel, get_mixed_precision_context_manager
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from seqtile.integrations.prefixes import share_prefixes_of, trainer_of
from seqtile.models.apply import apply_seqtile
from seqtile.models.functions import package_of
from seqtile.models.placement import inwards
from seqtile.models.status import IN_EVALUATION, status
from seqtile.offload import enable as enable_offload
from seqtile.unwrapped import unwrapped

logger = logging.get_logger(__name__)


class SeqtileCallback(TrainerCallback):
    """Tiles the model when training begins: `Trainer(..., callbacks=[SeqtileCallback()])`.

    By then Trainer has applied Liger and wrapped the model, so this works wherever Trainer does. The log says what is
    tiled (at level INFO), and what is not and why (at level WARNING).

    Args:
        share_prefixes: compute a prefix that rows of a batch share only once, such as the prompt of several
            completions, in the model and in the trainer's reference model, see `seqtile.share_prefixes`. A number is
            its `min_tokens`. TRL's shuffle then keeps the completions of one prompt together.
        offload: keep the inputs of checkpointed layers in host memory, see `seqtile.offload.enable`.
        options: those of `apply_seqtile`, such as layer=True. `loss` is False by default if the trainer computes the
            loss by a head of its own, as TRL's do; for these see `seqtile.integrations.trl`.

    Raises what `apply_seqtile` raises, and ValueError if `share_prefixes` is refused, before anything is tiled.
    """

    def __init__(self, share_prefixes: bool | int = False, offload: bool = False, **options: Any):
        self.share_prefixes, self.offload, self.options = share_prefixes, offload, options

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Tiles `model`."""
        if self.share_prefixes:
            share_prefixes_of(trainer_of(), self.share_prefixes)
        model = unwrapped(extract_model_from_parallel(model))
        own_head = any(package_of(forward) == "trl" for forward in inwards(model))
        options = {"loss": False} | self.options if own_head else self.options
        with nullcontext() if own_head else _below_autocast(model):
            apply_seqtile(model, **options)
        if self.offload:
            enable_offload(model)  # after the trainer's own checkpointing, which it replaces
        if state.is_world_process_zero:
            tiled = status(model)
            notes = tuple(note for note in tiled.notes if note != IN_EVALUATION)  # a step begins by model.train()
            tiled = replace(tiled, notes=notes)
            logger.info(f"seqtile: {tiled}")
            for part in (tiled.loss, tiled.mlp, tiled.layer):
                if part is not None and options.get(part.name, True) and part.tiled < part.total:
                    logger.warning(f"seqtile: {part.name}: {part}")


@contextmanager
def _below_autocast(model: nn.Module) -> Iterator[None]:
    """Takes Accelerate's mixed precision off the model's own forward, and puts it around what stands there afterwards.

    Accelerate wraps the forward when it prepares a model, and would otherwise go on calling the one that it found.
    """
    original = vars(model).get("_original_forward")
    if original is not None:
        del model.forward
        if original.__func__ is not type(model).forward:
            model.forward = original
    try:
        yield
    finally:
        if original is not None:
            model._original_forward = model.forward
            with_autocast = get_mixed_precision_context_manager(native_amp=True)(model.forward.__func__)
            model.forward = MethodType(convert_outputs_to_fp32(with_autocast), model)
