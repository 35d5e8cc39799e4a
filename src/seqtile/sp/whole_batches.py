"""Cuts whole batches at the text model, so that code before and after it need not know of ranks.

    any trainer ── model(whole batch) ── embeddings, images merged ── WholeBatches ── head, any loss, on every rank
                                                                      │        ▲
                                               this rank's tokens ────┘        └──── `TokenShard` of hidden states
                                                               text model over ranks

A forward with a cache, as in `generate`, runs whole on every rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from seqtile.renamed import cache_in
from seqtile.sp.attention import NAME, UlyssesFunction
from seqtile.sp.backends import averages_padding, check_has_masks
from seqtile.sp.data import parts_of, sequence_dim
from seqtile.sp.groups import ALONE, SequenceParallel
from seqtile.sp.images import DealtImages
from seqtile.sp.layout import Layout, bits, hash_of
from seqtile.sp.outside_masks import OUTSIDE, MaskRecipe, mask_recipe, spans_of
from seqtile.sp.owners import Owners, depends_on_all_ranks, with_whole_gradient
from seqtile.sp.prefixes import PrefixTree, prefix_tree
from seqtile.sp.sharding_hooks import ShardingHooks
from seqtile.sp.token_shard import shared

_OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")  # some models pass them on to their text model
_TOKENS = ("input_ids", "inputs_embeds")
_KINDS = ("full_attention", "sliding_attention")
"""Hugging Face's names for layers without and with a window."""


def text_model_of(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the part of a model that computes its tokens' hidden states. Raises ValueError if none is found."""
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} has an encoder, expected only a decoder; leave this model whole")
    found = model.get_decoder()
    if not isinstance(found, PreTrainedModel) or all(found is not module for module in model.modules()):
        raise ValueError(f"the text model of {type(model).__name__} is not found; expected one as its get_decoder()")
    return found


class WholeBatches(ShardingHooks):
    """The hooks that cut a batch before the text model and return the hidden states of all its tokens."""

    takes_whole = True
    of_forward = "layout last_position batch_hash position_ids has_gradient calls owners tree is_compared last_of_batch"
    expected = (
        "the same whole batch on every rank of a group: draw samples by ctx.data_parallel_rank of "
        "ctx.data_parallel_size; for other batches on every rank sp.restore(model) first"
    )

    def __init__(self, given: PreTrainedModel, model: PreTrainedModel, sp_group: SequenceParallel, layers: int):
        self.is_alone = sp_group is ALONE
        super().__init__(given, model, sp_group, layers)
        self.tree: PrefixTree | None = None
        """The prefix tree of the batch in the text model."""
        self.has_gradient = False
        """True if the given model's forward got tensors that require a gradient: no prefix is shared."""
        self.batch_hash: Tensor | None = None
        """The hash of all tensors that the given model's forward got."""
        self.position_ids: Tensor | None = None
        """Those that the given model's forward got; not every model passes them on."""
        self.calls = 0
        """How often the running forward of the given model has called the text model."""
        self.owners: Owners | None = None
        """The owners of the tokens of the batch in the text model."""
        self.is_compared = False
        """True if the running forward has found that the ranks of the group have the same batch."""
        self.last_of_batch: int | Tensor = 0
        """The largest position of the batch in the text model."""
        self.images: DealtImages | None = None
        AttentionMaskInterface.register(OUTSIDE, mask_recipe)
        if model is not given:
            self.handles.append(given.register_forward_pre_hook(self.begin, with_kwargs=True))
            self.handles.append(given.register_forward_hook(self.end, always_call=True))
            self.images = None if self.is_alone else DealtImages(given, self)

    def remove(self) -> None:
        super().remove()
        if self.images is not None:
            self.images.remove()

    def stop_sharing_prefixes(self) -> None:
        self.min_tokens = None
        if self.is_alone:
            self.remove()

    def forget_batch(self) -> None:
        super().forget_batch()
        self.batch_hash, self.position_ids, self.is_compared, self.has_gradient = None, None, False, False
        self.tree = None

    def begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Hashes the given model's batch. From now on masks are recorded as recipes instead of made."""
        self.take_chosen_attention()
        tensors = [each for each in tree_flatten((args, sorted(kwargs.items())))[0] if isinstance(each, Tensor)]
        self.has_gradient = any(tensor.requires_grad for tensor in tensors)
        self.position_ids = kwargs.get("position_ids")
        if cache_in(kwargs) is not None:
            self._run_whole(True)
        elif not self.is_alone:
            self.batch_hash, self.calls = hash_of({str(i): bits(tensor) for i, tensor in enumerate(tensors)}), 0
            self.model.config._attn_implementation = OUTSIDE

    def end(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.forget_batch()
        self._rest()

    def check_batch(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Cuts the batch."""
        self.take_chosen_attention()
        if (why := _row_by_row(kwargs, self.is_alone)) is not None:
            tokens = next((each for each in (*args, *map(kwargs.get, _TOKENS)) if each is not None), None)
            self.last_batch = 0 if tokens is None else tokens.shape[:2].numel(), 0, why
            self._run_whole(True)
            return args, kwargs
        if self.calls and self.batch_hash is not None:
            raise ValueError(f"{type(module).__name__} is called twice in a forward, expected once; leave it whole")
        self.calls += 1
        recipes = self._take_recipes(kwargs)
        given = self._given(args, kwargs)
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if self.is_compared:
            self.last_of_batch = given["position_ids"].max() if "position_ids" in given else tokens.shape[1] - 1
        self.tree = self._tree(given, tokens, recipes)
        if self.is_alone and self.tree is None:
            self._run_whole(True)
            return args, kwargs
        self._run_whole(False)
        args, kwargs = super().check_batch(module, (), self._cut(given, tokens))
        layout, window = self.layout, getattr(self.model.config, "sliding_window", None)
        layout.is_masked_outside = any(recipes)
        layout.spans = tuple(spans_of(recipe, window) if recipe else () for recipe in recipes)
        if rows := max(map(len, layout.spans)):
            layout.documents *= rows if len(layout.documents) == 1 else 1
        return args, kwargs

    def _tree(self, given: dict[str, Any], tokens: Tensor, recipes: list[MaskRecipe | None]) -> PrefixTree | None:
        """Returns the prefix tree of a batch; None if each row is computed by itself."""
        if self.min_tokens is None:
            return None
        if any(recipe and recipe.spans is not None for recipe in recipes):
            tree = "the model makes masks before its text model"
        elif self.has_gradient or (tokens.grad_fn is None and tokens.requires_grad):
            tree = "inputs require a gradient, each row its own"
        else:
            check_has_masks(self.implementation)
            averages = averages_padding(self.model, self.implementation)
            tree = prefix_tree(given, *tokens.shape[:2], self.min_tokens, averages)
        saved, why = (0, tree) if isinstance(tree, str) else (tree.saved, None)
        self.last_batch = tokens.shape[:2].numel(), saved, why
        return None if isinstance(tree, str) else tree

    def _layout_of(self, local: int, positions: Tensor, mask: Tensor | None) -> Layout:
        if self.tree is None:
            return super()._layout_of(local, positions, mask)
        layout = Layout(self.sp_group, local, (self.tree.documents,), self.implementation)
        layout.parents = self.tree.parents
        return layout

    def compare_batch(self) -> None:
        """Raises ValueError on every rank if the ranks of the group have different batches. Called before the first
        collective of a forward, once: one small collective and one wait for the device."""
        if not self.is_compared:
            none = torch.zeros(1, 1, dtype=torch.int64, device=self.batch_hash.device)
            super()._same_batch(none, {"position_ids": none}, self.batch_hash)
            self.is_compared = True

    def _same_batch(self, tokens: Tensor, kwargs: dict[str, Any], batch_hash: Tensor | None) -> int:
        is_known = self.is_compared or self.is_alone
        last_position = self.last_of_batch if is_known else super()._same_batch(tokens, kwargs, batch_hash)
        return last_position if self.tree is None else self.tree.last_position

    def _take_recipes(self, kwargs: dict[str, Any]) -> list[MaskRecipe | None]:
        """Replaces masks that were made outside the text model by the padding mask. Returns their recipes, for layers
        without a window and with one."""
        mask = kwargs.get("attention_mask")
        of_kinds = mask if isinstance(mask, dict) else dict.fromkeys(_KINDS, mask)
        if of_kinds.keys() - set(_KINDS) or not any(isinstance(each, MaskRecipe) for each in of_kinds.values()):
            return [None, None]
        found = [of_kinds.get(kind) for kind in _KINDS]
        kwargs["attention_mask"] = next(recipe.padding for recipe in found if recipe is not None)
        return found

    def _use_attention(self) -> None:
        """Sets the model's attention to `NAME`. In a single process sets it to a name that uses `NAME` for calls with a
        layout and the original attention for others."""
        name = self.implementation
        if self.is_alone:
            self.at_rest = f"{NAME}_or_{name}"
            AttentionInterface.register(self.at_rest, UlyssesFunction(otherwise=name))
        if self.is_alone and name in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(self.at_rest, ALL_MASK_ATTENTION_FUNCTIONS[name])
        super()._use_attention()

    def _run_whole(self, is_whole: bool) -> None:
        self.is_whole = is_whole
        self.model.config._attn_implementation = self.implementation if is_whole else NAME
        for each in self.replaced:
            each.is_whole = is_whole

    def _given(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the text model's arguments by name."""
        if len(args) > 1:
            raise ValueError("over ranks: expected input_ids or inputs_embeds first, and the rest by keyword")
        kwargs = kwargs | ({"input_ids": args[0]} if args else {})
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = self.position_ids
        given = {name: value for name, value in kwargs.items() if value is not None and name not in _OF_THE_LOSS}
        if "input_ids" not in given and "inputs_embeds" not in given:
            raise ValueError(f"{type(self.model).__name__}: expected input_ids or inputs_embeds, got neither")
        return given

    def _cut(self, given: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
        """Returns this rank's part of the text model's arguments. Raises ValueError if one cannot be cut."""
        if tokens.requires_grad and (tokens.is_leaf or depends_on_all_ranks(tokens)):  # each rank needs its gradient
            given["inputs_embeds"] = with_whole_gradient(tokens, self.sp_group)
        rows, length = tokens.shape[:2]
        if self.tree is not None:
            given, (rows, length) = self.tree.flat(given), (1, len(self.tree.taken))
        local = -(-length // self.sp_group.size)
        ranks = torch.arange(length) // local  # each holds `local` consecutive tokens of a row
        self.owners = Owners.of_ranks(ranks.expand(rows, -1), self.sp_group)
        for name, value in given.items():
            if name != "input_ids" and (found := self._features(value, given)) is not None:
                given[name] = found
            elif _has_tokens(name, value, rows, length):
                shapes = [list(each.shape) for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
                raise ValueError(
                    f"{name} of {type(self.model).__name__} has its tokens in an unknown place: {shapes} for {rows} x "
                    f"{length} tokens; leave the model whole: sp.restore(model)"
                )
        if self.tree is not None:
            self.owners = Owners(self.tree.places, local, self.sp_group)
        return parts_of(given, [self.sp_group.rank], self.sp_group.size, self.batch_hash)[0]

    def _features(self, value: Any, given: dict[str, Any]) -> list[Tensor] | None:
        """Returns this rank's part of features of masked tokens, a list of [n, K] by layer; None for any other
        value."""
        are_tensors = isinstance(value, list | tuple) and all(isinstance(each, Tensor) for each in value)
        if not are_tensors or any(each.dim() != 2 for each in value):
            return None
        others = [mask for name, mask in given.items() if isinstance(mask, Tensor) and name != "attention_mask"]
        masks = [mask for mask in others if mask.dtype == torch.bool and mask.shape == self.owners.shape]
        if len(masks) != 1:
            return None
        masked, _ = self.owners.viewed(lambda tokens: tokens[masks[0]], masks[0].device)  # waits for the device
        return [masked.own(each) for each in value] if {*map(len, value)} == {*masked.shape} else None

    def finish(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Returns the output with hidden states of all tokens, of which each rank holds its own."""
        return tree_map_only(Tensor, self._of_all, output)

    def _of_all(self, value: Tensor) -> Tensor:
        """Returns a tensor of the text model's output; if it is of this rank's tokens, as one of all tokens."""
        (rows, length), local, owners = self.owners.shape, self.layout.local, self.owners
        if value.dim() < 2:
            return value
        if self.tree is not None:
            rows, length = 1, local * self.sp_group.size
        if value.shape[0] == rows * local and value.dim() == 2:  # a router's logits
            value, owners = value.view(rows, local, -1), owners.flat()
        if tuple(value.shape[:2]) != (rows, local):
            return value
        own = max(0, min(local, length - self.sp_group.rank * local))
        return shared(value[:, :own].flatten(0, 1), owners)

    def forget_layout(self, module: nn.Module, args: tuple, output: Any) -> None:
        super().forget_layout(module, args, output)
        self.owners = self.tree = None
        if self.is_alone or (self.is_whole and self.batch_hash is None):
            self._rest()

    def _rest(self) -> None:
        """Puts the model into the state between two forwards, which a checkpoint's recomputation needs."""
        self._run_whole(False)
        self.model.config._attn_implementation = self.at_rest


def _row_by_row(kwargs: dict[str, Any], is_alone: bool) -> str | None:
    """Returns the argument that makes a text model run as it is: a cache, and in a single process also a request for
    outputs that it has only row by row. None if there is no such argument."""
    if cache_in(kwargs) is not None:
        return "a cache was given"
    return next((f"{name}=True" for name in ("use_cache", "output_attentions") if is_alone and kwargs.get(name)), None)


def _has_tokens(name: str, value: Any, rows: int, length: int) -> bool:
    """Returns whether an argument has a dimension of tokens that is not known, and so cannot be cut."""
    tensors = [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
    unknown = [each for each in tensors if sequence_dim(name, each, rows, length) is None]
    return any(length in each.shape or name == "attention_mask" for each in unknown)
