"""Applies sequence parallelism to a model, and removes it.

`apply_ulysses` registers an attention with Hugging Face and selects it in the model. It gives recurrent layers the
forward of recurrence.py, and adds hooks that pass on the batch's layout, see sharding_hooks.py.

Source: Arctic Long Sequence Training, 3.2.
"""

import inspect
from dis import get_instructions

from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from seqtile.attention.backends import check_has_masks
from seqtile.protocols import SHARDED
from seqtile.sdpa import watch_sdpa
from seqtile.sp.attention import NAME, ulysses_attention
from seqtile.sp.cut import CutBatches
from seqtile.sp.groups import ALONE, SequenceParallel
from seqtile.sp.recurrence import BY_TOKEN, is_known, is_recurrence, mixers, names_in_forward
from seqtile.sp.sharding_hooks import ShardingHooks
from seqtile.sp.whole_batches import WholeBatches, text_model_of
from seqtile.unwrapped import unwrapped

_ATTENTIONS = {"full_attention", "sliding_attention"}  # types of layers that mix tokens only in attention
_RECURRENCES = {"linear_attention", "hybrid", "conv"}  # also in a recurrence or a convolution
_OTHERS = {"cross_attention_layers": "cross-attention", "keep_window_size": "masks that its layers make"}
"""Fields of configs, and what else mixes tokens in a model with them."""


def apply_ulysses(model: PreTrainedModel, ctx: SequenceParallel, *, batches: str = "cut") -> None:
    """Shards this model's sequences over the ranks of `ctx`. The model may be in PEFT's wrapper. A second call changes
    nothing.

    With batches="whole" every rank of a group gets the same whole batch, as without `ctx`. The inner text model
    computes the rank's part of it, see whole_batches.py. Losses, log-probabilities and logits are those of the whole
    batch. Their gradients are right under a reducer that averages over all ranks.

    With "cut" every forward takes shards as `DataShardingCollator` cuts them: `input_ids` [B, S / size], `position_ids`
    and, for padded rows, `attention_mask`. It raises ValueError on every rank if the ranks of a group get different
    samples or whole sequences. The loss that it returns is this rank's part; its backward raises RuntimeError unless
    `reduce_loss` was called on the loss.

    Raises ValueError, and changes nothing, for a model that mixes tokens outside of Hugging Face's attention interface
    and the layers of recurrence.py; TypeError if it is no Hugging Face model.
    """
    if batches not in (kinds := {"cut": CutBatches, "whole": WholeBatches}):
        raise ValueError(f"batches is {batches!r}, expected one of {', '.join(map(repr, kinds))}")
    model = _without_adapter(model)
    applied = getattr(model, SHARDED, None)
    if applied is not None and applied.sp_group is not ALONE:
        if applied.sp_group is not ctx or type(applied.batches) is not kinds[batches]:
            raise ValueError(
                "this model is sharded over other ranks already, or for other batches: sp.restore(model) first"
            )
        return
    if applied is not None and batches == "cut":
        raise ValueError('this model shares prefixes of rows, which needs whole batches: pass batches="whole"')
    min_tokens = None if applied is None else applied.min_tokens
    if applied is not None:
        applied.stop_sharing_prefixes()
    _apply(model, ctx, kinds[batches])
    getattr(model, SHARDED).min_tokens = min_tokens


def share_prefixes(model: PreTrainedModel, min_tokens: int = 256) -> None:
    """Makes a model compute a prefix that several rows of a batch share only once, such as the prompt of several
    completions. Losses, logits and gradients stay the same. The model may be in PEFT's wrapper.

    Rows share a prefix of at least `min_tokens` tokens if these tokens have the same ids or embeddings at the same
    positions. Every forward of more than one row looks for prefixes, with one wait for the device. A forward with a
    cache, with a mask over two dimensions of tokens, or with holes in its mask runs row by row. Random numbers, such as
    dropout's, are drawn once for shared tokens.

    `seqtile.restore(model)` undoes it. It works with `apply_seqtile` and with `sp.apply_ulysses(batches="whole")`, in
    any order. Raises ValueError, and changes nothing, for a model that `sp.apply_ulysses` refuses or whose attention
    has no mask function; TypeError if it is no Hugging Face model.
    """
    if not isinstance(min_tokens, int) or isinstance(min_tokens, bool) or min_tokens < 1:
        raise ValueError(f"min_tokens is {min_tokens!r}, expected a number of tokens, at least 1")
    model = _without_adapter(model)
    applied = getattr(model, SHARDED, None)
    if applied is not None and not applied.takes_whole:
        raise ValueError(
            "this model gets batches that are cut, so no rank has whole rows; "
            'expected sp.apply_ulysses(model, ctx, batches="whole")'
        )
    if applied is not None:
        applied.take_chosen_attention()
    check_has_masks(text_model_of(model).config._attn_implementation if applied is None else applied.implementation)
    if applied is None:
        _apply(model, ALONE, WholeBatches)
    getattr(model, SHARDED).min_tokens = min_tokens


def _apply(model: PreTrainedModel, ctx: SequenceParallel, kind: type[CutBatches | WholeBatches]) -> None:
    cut_at = text_model_of(model) if kind.takes_whole else model
    recurrent = mixers(cut_at) if is_recurrent(cut_at) else []
    _check(cut_at, recurrent, is_masked_outside=cut_at not in (model, model.base_model))
    AttentionInterface.register(NAME, ulysses_attention)
    watch_sdpa()
    layers = len(recurrent) or cut_at.config.get_text_config().num_hidden_layers
    ShardingHooks(model, cut_at, ctx, layers, kind)


def restore(model: PreTrainedModel) -> None:
    """Undoes `apply_ulysses` on the model that it was applied to, and leaves any other model unchanged. `apply_seqtile`
    and `share_prefixes` stay in effect, see `seqtile.restore`. Raises TypeError if `model` is no Hugging Face model."""
    model = _without_adapter(model)
    applied = vars(model).get(SHARDED)
    if applied is None or applied.sp_group is ALONE:
        return
    applied.remove()
    if applied.min_tokens is not None:
        share_prefixes(model, applied.min_tokens)


def _without_adapter(model: nn.Module) -> nn.Module:
    """Returns the model inside PEFT's wrapper. Raises ValueError for an adapter that adds tokens, TypeError if it is no
    Hugging Face model."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("an adapter that puts tokens before a sequence would put them before every shard")
    return unwrapped(model)


def is_recurrent(model: PreTrainedModel) -> bool:
    """Returns whether modules other than attention mix tokens."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    stateful = bool(kinds & _RECURRENCES) or getattr(model, "_is_stateful", False)
    return stateful or any(map(is_recurrence, model.modules()))


def _keeps_arguments_from_attention(module: nn.Module) -> bool:
    """Returns whether a module calls attention, but nothing with `**kwargs`, in which attention would be told documents
    and positions."""
    names = names_in_forward(module)
    called = [child for name, child in module.named_children() if name in names]
    if not any("ALL_ATTENTION_FUNCTIONS" in names_in_forward(child) for child in called):
        return False
    return all(each.opname != "CALL_FUNCTION_EX" for each in get_instructions(inspect.unwrap(type(module).forward)))


def _check(model: PreTrainedModel, recurrent: list[nn.Module], is_masked_outside: bool) -> None:
    """Raises ValueError for a model that cannot be sharded over ranks. `recurrent` are the modules that mix tokens in a
    model with recurrences. `is_masked_outside`: the masks of an outer model decide whether attention is causal."""
    name, config, modules = type(model).__name__, model.config.get_text_config(), list(model.modules())
    known = ("eager", *(name for name in ALL_ATTENTION_FUNCTIONS if not name.startswith("paged|")))
    if (implementation := model.config._attn_implementation) not in known:
        expected = f"expected one of {', '.join(known)}; model.set_attn_implementation(...) first"
        raise ValueError(f"the model's attention is {implementation!r}, {expected}")
    if implementation == NAME:
        raise ValueError("a model that is sharded has the same config object; give this one a config of its own")
    unknown = sorted({type(module).__name__ for module in recurrent if not is_known(module)})
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTIONS - _RECURRENCES - BY_TOKEN)
    others += [what for field, what in _OTHERS.items() if getattr(config, field, None)]
    others += ["an encoder"] if config.is_encoder_decoder else []
    others += [f"{', '.join(unknown)}, whose recurrence is not known"] if unknown else []
    takes_positions = "position_ids" in inspect.signature(type(model.base_model).forward).parameters
    causal = {getattr(x, "is_causal", None) for x in modules} - {None}
    layers = getattr(model.base_model, "layers", ())
    refused = {
        f"{name} has {', '.join(others)}": others,
        f"{name} makes its own position_ids": any(hasattr(x, "create_position_ids_from_input_ids") for x in modules)
        or not (takes_positions or recurrent),
        f"the attention of {name} is not causal": causal == {False} and not is_masked_outside,
        f"{name} does not take its attention from AttentionInterface": not model._can_set_attn_implementation(),
        f"{name} passes no keyword arguments on to its attention": any(map(_keeps_arguments_from_attention, layers)),
    }
    if found := [what for what, is_so in refused.items() if is_so]:
        expected = "expected causal attention, full or with a window, or a known recurrence; leave this model whole"
        raise ValueError(f"{found[0]}, {expected}")
