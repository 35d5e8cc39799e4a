"""Shared prefixes in trainers: a trainer's models compute the prefixes that rows share once.

TRL's GRPO and RLOO shuffle the completions that they sampled, and then cut them into micro-batches. This spreads the
completions of a prompt over many micro-batches, each of which computes the prompt. So they are put together again after
the shuffle:

    shuffled    B A A B | A B B A     two prompts in two micro-batches
    together    B B B B | A A A A
"""

import inspect
from collections.abc import Callable
from functools import wraps
from traceback import walk_stack
from typing import Any

from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers.utils import logging

from seqtile.ops.state import exchanged
from seqtile.sp.apply import share_prefixes
from seqtile.sp.trainer import MODELS
from seqtile.unwrapped import unwrapped

logger = logging.get_logger(__name__)
_SHUFFLE = "shuffle_sequence_dict"  # TRL's


def share_prefixes_of(trainer: Any, min_tokens: int | bool = True) -> None:
    """Makes a trainer's model, reference model and teacher compute prefixes that rows of a micro-batch share once, see
    `seqtile.share_prefixes`. If the trainer shuffles completions, those of one prompt stay together. A warning says if
    micro-batches split them.

    `min_tokens` is that of `share_prefixes`, or True for its default. Raises the errors of `share_prefixes`, and
    ValueError for a trainer that samples groups and cuts them into micro-batches in an unknown way.
    """
    group = getattr(trainer, "num_generations", None) or 1
    together = _kept_together(trainer) if group > 1 else {}
    options = {} if min_tokens is True else {"min_tokens": min_tokens}
    for model in (getattr(trainer, name, None) for name in MODELS):
        if isinstance(model, nn.Module):
            share_prefixes(unwrapped(extract_model_from_parallel(model)), **options)
    vars(trainer).update(together)
    if (rows := trainer.args.per_device_train_batch_size) % group:
        logger.warning(
            f"share_prefixes: groups of {group} completions are cut into micro-batches of {rows} rows, so prompts "
            f"are computed more than once; expected per_device_train_batch_size={-(-rows // group) * group}, and "
            "proportionally fewer gradient_accumulation_steps"
        )


def trainer_of() -> Any:
    """Returns the trainer that is calling a callback; it is no argument of theirs. Raises ValueError if none is."""
    for frame, _ in walk_stack(inspect.currentframe()):
        if hasattr(caller := frame.f_locals.get("self"), "callback_handler"):
            return caller
    raise ValueError("share_prefixes: expected a callback that Trainer calls; else call seqtile.share_prefixes(model)")


def _kept_together(trainer: Any) -> dict[str, Callable]:
    """Returns by name a method for this trainer, with which it puts completions of one prompt together again after it
    shuffled them. Raises ValueError if it is not known where it shuffles them."""
    prepare = trainer._prepare_inputs
    function = inspect.unwrap(getattr(prepare, "__func__", prepare))
    known = function.__globals__
    if _SHUFFLE not in function.__code__.co_names or _SHUFFLE not in known:
        raise ValueError(
            f"{type(trainer).__name__} cuts completions into micro-batches in an unknown way, expected a "
            f"_prepare_inputs that calls {_SHUFFLE}, as those of TRL's GRPOTrainer and RLOOTrainer do; leave "
            "share_prefixes out; seqtile.share_prefixes(model) then shares the prompts within each micro-batch"
        )

    @wraps(prepare)
    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        shuffle = known[_SHUFFLE]
        with exchanged([(known, _SHUFFLE, lambda rows: _together(shuffle(rows)))]):
            return prepare(*args, **kwargs)

    return {"_prepare_inputs": prepare_inputs}


def _together(rows: dict[str, Any]) -> dict[str, Any]:
    """Returns the rows of a batch with those of one prompt together, prompts in the order of their first rows. Waits
    for the device."""
    groups = rows["prompt_ids"].unique(dim=0, return_inverse=True)[1].tolist()
    order = sorted(range(len(groups)), key=lambda row: groups.index(groups[row]))

    def ordered(values: Any) -> Any:
        if isinstance(values, Tensor):
            return values[order] if values.dim() else values
        return [values[row] for row in order] if isinstance(values, list) else values

    return {name: ordered(values) for name, values in rows.items()}
