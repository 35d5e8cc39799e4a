"""Layers whose tokens meet in a recurrence or a convolution, spread over ranks by heads, as attention is.

Hugging Face's linear attentions and state-space layers call two functions of their modeling file: a causal convolution
of channels, then a rule (gated delta rule, Kimi's delta attention, Mamba-2's scan) whose operands, head by head, are
these channels. All else in such a layer is token by token. So its own forward runs on this rank's tokens, with others
in these functions' place:

    convolution   nothing yet: it returns its input
    rule          all-to-all: of the whole sequence what this rank's heads read
                  the convolution of their channels and the rule, document by document
                  all-to-all: of this rank's tokens what all heads return

Channels and heads are computed by themselves, so no rank needs a neighbour's tokens besides. A layer that has only the
convolution (LFM2's) does all of it there, channels in the place of heads.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqtile.sp.all_to_all import AllToAllFunction, HeadShare, Rows, head_share, plan_heads
from seqtile.sp.layout import Layout

_CONVOLUTION = "causal_conv1d_fn"
_FUSED = "mamba2_split_conv1d_scan_combined"  # a kernel of all of it, for whole sequences; None: there is no kernel
_CONVOLUTION_ALONE = ("Lfm2ShortConv", "Lfm2MoeShortConv")


class Rule(NamedTuple):
    """The operands of a rule, by the names of its parameters."""

    convolved: tuple[str, ...]
    """Those that are channels of the convolution, in their order there."""
    own: tuple[str, ...]
    """Of every head: [B, S, H, K] or [B, S, H]. What is returned is like the first."""
    shared: tuple[str, ...]
    """Read by a group of heads: [B, S, G, K], G a divisor of H."""
    of_heads: tuple[str, ...] = ()
    """Parameters [H]."""


_DELTA = Rule(("query", "key", "value"), ("value", "g", "beta"), ("query", "key"))
RULES = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": Rule(("hidden_states", "B", "C"), ("hidden_states", "dt"), ("B", "C"), ("A", "D", "dt_bias")),
}
BY_TOKEN = {"mlp", "moe"}  # kinds of layers in which no tokens meet
_EMPTY = ("initial_state", "initial_states", "z", "seq_idx", "cu_seqlens", "cu_seq_lens_q")


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Returns the globals and attributes that the forward of a module's class names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def is_recurrence(module: nn.Module) -> bool:
    """Says if a module is a layer of Hugging Face's that is spread as above."""
    names, kind = names_in_forward(module), type(module)
    if not kind.__module__.startswith("transformers.models.") or _CONVOLUTION not in names:
        return False
    function = inspect.unwrap(kind.forward)
    if function.__module__ != kind.__module__ or "forward" in vars(module):
        return False
    return len(RULES.keys() & set(names)) == 1 or kind.__name__ in _CONVOLUTION_ALONE


def mixers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model in which tokens meet: the innermost of those that are given a cache."""
    given = []
    for module in model.modules():
        if (
            getattr(module, "block_type", None) in BY_TOKEN
        ):  # a layer without attention, which is given a cache all the same
            continue
        parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
        if parameters.keys() & {"past_key_values", "past_key_value", "cache_params"}:
            given.append(module)
    chosen = set(map(id, given))
    return [module for module in given if sum(id(part) in chosen for part in module.modules()) == 1]


def is_known(mixer: nn.Module) -> bool:
    """Says if a module in which tokens meet is spread over ranks: by `Recurrence`, or by its attention's interface."""
    return is_recurrence(mixer) or "ALL_ATTENTION_FUNCTIONS" in names_in_forward(mixer)


class Recurrence:
    """The forward of a layer over ranks: that of its class, with others in the place of the functions that it calls."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.convolution: Convolution | None = None
        """What the convolution was called with, until the rule is."""
        original = inspect.unwrap(type(module).forward)
        names = names_in_forward(module)
        named = {name: original.__globals__[name] for name in (_CONVOLUTION, *RULES) if name in names}
        self.convolve = named.pop(_CONVOLUTION)
        self.name, self.rule = next(iter(named.items()), (None, None))
        places = {_CONVOLUTION: self._convolution, _FUSED: lambda *args, **kwargs: None}
        if self.name is not None:
            places[self.name] = self._rule
        rest = original.__name__, original.__defaults__, original.__closure__
        self._forward = FunctionType(original.__code__, original.__globals__ | places, *rest)
        self._forward.__kwdefaults__ = original.__kwdefaults__

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> "Recurrence":
        return Recurrence(copy.deepcopy(self.module, memo))  # in whose copy it is just being put

    def _layout(self, kwargs: dict[str, Any]) -> Layout:
        if (layout := kwargs.pop("ulysses_layout", None)) is None:
            raise ValueError(
                f"no layout came with the tokens of {type(self.module).__name__}: call the model that sp.apply_ulysses "
                "was given, as a whole"
            )
        layout.attended.add(id(self.module))
        return layout

    def _convolution(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **kwargs: Any
    ) -> Tensor:
        """In the place of the convolution of [B, C, S]."""
        layout = self._layout(kwargs)
        self.convolution = Convolution(self.convolve, hidden_states, weight, bias, activation)
        if self.name is not None:
            return hidden_states
        return self._spread_channels(layout)

    def _spread_channels(self, layout: Layout) -> Tensor:
        """Returns the convolution of this rank's tokens, each rank having computed some of the channels."""
        convolution, self.convolution = self.convolution, None
        count, ranks = convolution.channels, layout.ctx.size
        key = ("channels", count)
        there = layout.once(key, lambda: plan_heads(count, count, (False,), layout.local, layout.ctx))
        share = head_share(layout.ctx.rank, ranks, count, count, layout.length)
        (x,) = AllToAllFunction.apply(there, convolution.hidden_states.transpose(1, 2)[..., None].transpose(1, 2))

        def of_document(x: Tensor) -> Tensor:
            return convolution([x.transpose(1, 2)], [share.q])[0]

        out = by_documents(layout, of_document, x)
        (back,) = AllToAllFunction.apply(there.reversed(), out.transpose(1, 2))
        return back[..., 0]

    def _rule(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the rule."""
        layout, convolution, rule = self._layout(kwargs), self.convolution, RULES[self.name]
        self.convolution = None
        call = Call.of(self.rule, args, kwargs)
        if wrong := [name for name in _EMPTY if call.options.get(name) is not None]:
            raise ValueError(f"{self.name} with {', '.join(wrong)} is not spread over ranks; leave this model whole")
        operands = {name: call.options.pop(name) for name in dict.fromkeys((*rule.own, *rule.shared))}
        convolution.check_channels([operands[name] for name in rule.convolved], type(self.module).__name__)
        out = self._spread_heads(layout, convolution, operands, call)
        return (out, None) if rule is _DELTA else out

    def _spread_heads(
        self, layout: Layout, convolution: "Convolution", operands: dict[str, Tensor], call: "Call"
    ) -> Tensor:
        """Returns what the rule does of this rank's tokens, [B, S, H, K]."""
        rule, ctx, names = RULES[self.name], layout.ctx, list(operands)
        heads, groups = operands[rule.own[0]].shape[2], operands[rule.shared[0]].shape[2]
        if ctx.size > heads:
            raise ValueError(
                f"{type(self.module).__name__} has {heads} heads, expected at least one for each of {ctx.size} ranks; "
                "use fewer ranks to a sequence"
            )
        share = head_share(ctx.rank, ctx.size, heads, groups, layout.length)
        is_shared = tuple(name in rule.shared for name in names)
        key = (heads, groups, is_shared)
        there = layout.once(key, lambda: plan_heads(heads, groups, is_shared, layout.local, ctx))
        arrived = AllToAllFunction.apply(there, *(_by_heads(operands[name]) for name in names))
        channels = self._channels(operands, share)

        def convolved(*parts: Tensor) -> dict[str, Tensor]:
            found = {name: part.transpose(1, 2) for name, part in zip(names, parts, strict=True)}
            made = convolution([found[name] for name in rule.convolved], channels)
            found |= dict(zip(rule.convolved, made, strict=True))
            return {name: x if operands[name].dim() == 4 else x[..., 0] for name, x in found.items()}

        def compute(found: dict[str, Tensor], **options: Any) -> Tensor:
            return call.of_share(rule, share, found, options)

        if layout.documents != (((0, layout.length),),) and call.takes_cu_seqlens:
            out = in_one_call(layout, convolved, compute, *arrived)
        else:
            out = by_documents(layout, lambda *parts: compute(convolved(*parts)), *arrived)
        (back,) = AllToAllFunction.apply(there.of_queries().reversed(), out.transpose(1, 2))
        return back.transpose(1, 2)

    def _channels(self, operands: dict[str, Tensor], share: HeadShare) -> list[slice]:
        """Returns the channels of the convolution that this rank's share of each convolved operand is."""
        rule, start, found = RULES[self.name], 0, []
        for name in rule.convolved:
            heads, size = operands[name].shape[2:]
            mine = share.kv if name in rule.shared else share.q
            found.append(slice(start + mine.start * size, start + mine.stop * size))
            start += heads * size
        return found


class Call(NamedTuple):
    """A call of a rule: kernels in its place name their parameters otherwise, so what came by place goes by place."""

    function: Callable[..., Any]
    positional: tuple[str, ...]
    options: dict[str, Any]
    """All arguments by the names of the rule's own parameters."""

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> "Call":
        signature = inspect.signature(function)
        given = signature.bind(*args, **kwargs).arguments
        return cls(function, tuple(signature.parameters)[: len(args)], given | given.pop("kwargs", {}))

    @property
    def takes_cu_seqlens(self) -> bool:
        """True if a kernel of flash-linear-attention's stands in the place of Hugging Face's code, which can be told
        where documents begin."""
        known = inspect.getclosurevars(self.function).nonlocals
        return bool(known.get("is_new_implementation")) and "cu_seqlens" in known.get("applicable_params", ())

    def of_share(self, rule: Rule, share: HeadShare, operands: dict[str, Tensor], more: dict[str, Any]) -> Tensor:
        """Calls it for the heads of a share, group by group where they read unequally many."""
        found = []
        for heads, groups in share.groups:
            chosen = {name: x[:, :, groups if name in rule.shared else heads] for name, x in operands.items()}
            vectors = {name: self.options[name] for name in rule.of_heads if self.options.get(name) is not None}
            values = self.options | more | chosen | {name: x[share.q][heads] for name, x in vectors.items()}
            out = self.function(*[values.pop(name) for name in self.positional], **values)
            found.append(out[0] if isinstance(out, tuple) else out)
        return found[0] if len(found) == 1 else torch.cat(found, 2)


class Convolution(NamedTuple):
    """A causal convolution of channels, each by itself, as a layer called it."""

    function: Callable[..., Tensor]
    hidden_states: Tensor
    """[B, C, S]"""
    weight: Tensor
    """[C, width]"""
    bias: Tensor | None
    """[C]"""
    activation: Any

    @property
    def channels(self) -> int:
        return self.hidden_states.shape[1]

    def __call__(self, operands: Sequence[Tensor], channels: Sequence[slice]) -> list[Tensor]:
        """Convolves operands [B, S, h, K], whose heads are these channels; returns them likewise."""
        x = torch.cat([operand.flatten(2) for operand in operands], 2).transpose(1, 2)
        weight = torch.cat([self.weight[chosen] for chosen in channels])
        bias = None if self.bias is None else torch.cat([self.bias[chosen] for chosen in channels])
        out = self.function(x, weight, bias, activation=self.activation).transpose(1, 2)
        parts = out.split([operand.shape[2] * operand.shape[3] for operand in operands], 2)
        return [part.unflatten(2, operand.shape[2:]) for part, operand in zip(parts, operands, strict=True)]

    def check_channels(self, operands: Sequence[Tensor], layer: str) -> None:
        """Raises ValueError unless the operands [B, S, h, K] are views of the input's channels, in their order."""
        x = self.hidden_states
        starts = [0, *accumulate(operand.shape[2] * operand.shape[3] for operand in operands)]
        same = starts[-1] == self.channels
        for operand, (start, stop) in zip(operands, pairwise(starts), strict=True):
            same = same and _is_same_view(operand, x[:, start:stop].transpose(1, 2).unflatten(2, operand.shape[2:]))
        if not same:
            raise ValueError(
                f"{layer} changes what it convolves before its recurrence, which is not spread over ranks; leave this "
                "model whole"
            )


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    strides = (strides for size, *strides in zip(one.shape, one.stride(), other.stride(), strict=True) if size > 1)
    return one.data_ptr() == other.data_ptr() and all(here == there for here, there in strides)


def _by_heads(operand: Tensor) -> Tensor:
    """Returns [B, H, S, K] of [B, S, H, K] or [B, S, H]."""
    return (operand if operand.dim() == 4 else operand[..., None]).transpose(1, 2)


def by_documents(layout: Layout, compute: Callable[..., Tensor], *arrived: Tensor) -> Tensor:
    """Returns [B, S, h, K] of tensors [B, h, S, K] of whole sequences, computed document by document; zeros where
    there is padding."""
    if layout.documents == (((0, layout.length),),):
        return compute(*arrived)
    rows = []
    for at, of_row in enumerate(layout.documents):
        chosen = [x if len(layout.documents) == 1 else x[at : at + 1] for x in arrived]
        parts = [compute(*(x[:, :, start:stop] for x in chosen)) for start, stop in of_row]
        rows.append(_placed(parts, of_row, chosen[0].transpose(1, 2)))
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def in_one_call(
    layout: Layout,
    convolved: Callable[..., dict[str, Tensor]],
    compute: Callable[..., Tensor],
    *arrived: Tensor,
) -> Tensor:
    """Returns the same, the documents of all rows behind each other in one call, which is told where each begins."""
    batch = len(arrived[0])
    pieces = [(row, start, stop) for row in range(batch) for start, stop in layout.of_row(row)]
    if not pieces:
        return by_documents(layout, lambda *parts: parts[0], *arrived)
    found = [convolved(*(x[row : row + 1, :, start:stop] for x in arrived)) for row, start, stop in pieces]
    sizes = [stop - start for _, start, stop in pieces]
    starts = torch.tensor([0, *accumulate(sizes)], device=arrived[0].device)
    joined = {name: torch.cat([operands[name] for operands in found], 1) for name in found[0]}
    parts = iter(compute(joined, cu_seqlens=starts).split(sizes, 1))
    like = arrived[0].transpose(1, 2)[:1]
    return torch.cat(
        [_placed([next(parts) for _ in of_row], of_row, like) for of_row in map(layout.of_row, range(batch))]
    )


def _placed(parts: list[Tensor], of_row: Rows, like: Tensor) -> Tensor:
    """Returns the outputs of a row's documents in their places, zeros like [B, S, h, K] elsewhere."""
    found, end = [], 0
    for part, (start, stop) in zip(parts, of_row, strict=True):
        found += [like.new_zeros(len(like), start - end, *like.shape[2:])] * (start > end) + [part]
        end = stop
    if end < like.shape[1]:
        found.append(like.new_zeros(len(like), like.shape[1] - end, *like.shape[2:]))
    return found[0] if len(found) == 1 else torch.cat(found, 1)
