"""Shards layers that mix tokens by a recurrence or a convolution over ranks by heads, as attention is.

Hugging Face's linear attentions and state-space layers call two functions of their modeling file: a causal convolution
of channels, then a rule (gated delta rule, Kimi's delta attention, Mamba-2's scan) whose operands, head by head, are
these channels. Everything else in such a layer computes each token by itself. So the layer's own forward runs on this
rank's tokens, with these functions replaced:

    convolution   returns its input
    rule          all-to-all: gets the operands of this rank's heads, for the whole sequence
                  the convolution of their channels, and the rule, document by document
                  all-to-all: gets the results of all heads, for this rank's tokens

Channels and heads are independent, so no rank needs its neighbours' tokens. If a layer has only the convolution
(LFM2's), the replaced convolution does all of this, with channels instead of heads.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqtile.attention.heads import RankHeads
from seqtile.attention.local import in_parts, joined
from seqtile.attention.segments import segments
from seqtile.renamed import CACHE_NAMES
from seqtile.sp.all_to_all import exchanged
from seqtile.sp.layout import LAYOUT, ShardedLayout, layout_in

_CONVOLUTION = "causal_conv1d_fn"
_FUSED = "mamba2_split_conv1d_scan_combined"  # one kernel for all of it, for whole sequences; None: there is no kernel
_WITHOUT_RULE = ("Lfm2ShortConv", "Lfm2MoeShortConv")


class Rule(NamedTuple):
    """The operands of a rule, by parameter name."""

    convolved: tuple[str, ...]
    """Operands that are channels of the convolution, in its order."""
    own: tuple[str, ...]
    """Operands with all heads: [B, S, H, K] or [B, S, H]. The result has the first one's shape."""
    shared: tuple[str, ...]
    """Operands that head chunks share: [B, S, G, K], G a divisor of H."""
    of_heads: tuple[str, ...] = ()
    """Parameters [H]."""
    state: str | None = None
    """The initial state."""
    wants_state: str | None = None
    """The parameter that requests the final state."""


_DELTA = Rule(
    ("query", "key", "value"), ("value", "g", "beta"), ("query", "key"), (), "initial_state", "output_final_state"
)
RULES = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": Rule(
        ("hidden_states", "B", "C"),
        ("hidden_states", "dt"),
        ("B", "C"),
        ("A", "D", "dt_bias"),
        "initial_states",
        "return_final_states",
    ),
}
_CONV_ONLY = Rule(("x",), ("x",), ())  # a convolution without a rule: its channels count as heads
Operands = dict[str, Tensor]
Convolve = Callable[..., Operands]
"""Convolves a document's operands, tensors [B, h, S, K], and names them."""
Compute = Callable[..., tuple[Tensor, list[Any]]]
"""Computes a rule, or a convolution without one. Returns its output and, if requested, the final state of each group of
heads."""
BY_TOKEN = {"mlp", "moe"}  # types of layers that do not mix tokens
_EMPTY = ("initial_state", "initial_states", "z", "seq_idx", "cu_seqlens", "cu_seq_lens_q")


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Returns the globals and attributes that the forward of a module's class names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def is_recurrence(module: nn.Module) -> bool:
    """Returns whether a module is a Hugging Face layer that can be sharded as above."""
    names, kind = names_in_forward(module), type(module)
    if not kind.__module__.startswith("transformers.models.") or _CONVOLUTION not in names:
        return False
    function = inspect.unwrap(kind.forward)
    if function.__module__ != kind.__module__ or "forward" in vars(module):
        return False
    if not function.__code__.co_flags & inspect.CO_VARKEYWORDS:  # it does not get the layout
        return False
    return len(RULES.keys() & set(names)) == 1 or kind.__name__ in _WITHOUT_RULE


def mixers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model that mix tokens: the innermost modules that get a cache."""
    given = []
    for module in model.modules():
        if getattr(module, "block_type", None) in BY_TOKEN:  # gets a cache but does not use it
            continue
        parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
        if parameters.keys() & {*CACHE_NAMES}:
            given.append(module)
    chosen = set(map(id, given))
    return [module for module in given if sum(id(part) in chosen for part in module.modules()) == 1]


def is_known(mixer: nn.Module) -> bool:
    """Returns whether a module that mixes tokens can be sharded over ranks: by `Recurrence` or attention's
    interface."""
    return is_recurrence(mixer) or "ALL_ATTENTION_FUNCTIONS" in names_in_forward(mixer)


class Recurrence:
    """The forward of a layer over ranks: its class's forward, with some of the functions that it calls replaced."""

    def __init__(self, module: nn.Module, is_alone: bool = False):
        self.module, self.is_alone = module, is_alone
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
        self.is_bypassed = False
        """True while every rank computes all tokens of whole sequences."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        is_bypassed = self.is_bypassed or (self.is_alone and LAYOUT not in kwargs)
        forward = type(self.module).forward if is_bypassed else self._forward
        return forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> "Recurrence":
        return Recurrence(copy.deepcopy(self.module, memo), self.is_alone)  # the module's copy receives this object

    def _convolution(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **kwargs: Any
    ) -> Tensor:
        """Replaces the convolution of [B, C, S]."""
        layout = layout_in(kwargs, self.module)
        layout.convolution = Convolution(self.convolve, hidden_states, weight, bias, activation)
        if self.name is not None:
            return hidden_states
        operands = {"x": hidden_states.transpose(1, 2)[..., None]}
        return self._spread(layout, _CONV_ONLY, operands, _as_it_is, False)[..., 0].transpose(1, 2)

    def _rule(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the rule. Positional arguments stay positional, because kernels use other parameter names."""
        layout, rule, signature = layout_in(kwargs, self.module), RULES[self.name], inspect.signature(self.rule)
        options = signature.bind(*args, **kwargs).arguments
        options |= options.pop("kwargs", {})
        if wrong := [name for name in _EMPTY if options.get(name) is not None]:
            raise ValueError(f"{self.name} with {', '.join(wrong)} is not spread over ranks; leave this model whole")
        operands = {name: options.pop(name) for name in dict.fromkeys((*rule.own, *rule.shared))}
        vectors = {name: options.pop(name) for name in rule.of_heads if options.get(name) is not None}

        def compute(
            own: RankHeads, operands: Operands, states: Sequence[Any] = (), wants_state: bool = False, **more: Any
        ) -> tuple[Tensor, list[Any]]:
            found, ends = [], []
            if wants_state:
                more[rule.wants_state] = True
            for i, (heads, groups) in enumerate(own.groups):  # one call per group if groups have different sizes
                if states:
                    more[rule.state] = states[i]
                chosen = {name: x[:, :, groups if name in rule.shared else heads] for name, x in operands.items()}
                values = options | more | chosen | {name: x[own.q][heads] for name, x in vectors.items()}
                out = self.rule(*[values.pop(name) for name in list(signature.parameters)[: len(args)]], **values)
                found.append(out[0] if isinstance(out, tuple) else out)
                ends.append(out[1] if isinstance(out, tuple) else None)
            return joined(found, 2), ends

        is_one = layout.documents == (((0, layout.length),),)
        in_one_call = not (layout.parents or is_one) and _takes_cu_seqlens(self.rule)
        out = self._spread(layout, rule, operands, compute, in_one_call)
        return (out, None) if rule is _DELTA else out

    def _spread(
        self, layout: ShardedLayout, rule: Rule, operands: Operands, compute: Compute, in_one_call: bool
    ) -> Tensor:
        """Returns the rule's output for this rank's tokens, [B, S, H, K]."""
        convolution, layout.convolution = layout.convolution, None
        heads = operands[rule.own[0]].shape[2]
        groups = operands[rule.shared[0]].shape[2] if rule.shared else heads
        if (size := layout.sp_group.size) > heads:
            raise ValueError(
                f"{type(self.module).__name__} has {heads} heads, expected at least one for each of {size} ranks; use "
                "fewer ranks to a sequence"
            )
        all_to_all = layout.all_to_all(heads, groups, tuple(name in rule.shared for name in operands))
        own = all_to_all.heads
        here = {name: own.kv if name in rule.shared else own.q for name in rule.convolved}
        channels = convolution.channels_of([(operands[name], here[name]) for name in rule.convolved])
        if channels is None:
            raise ValueError(
                f"{type(self.module).__name__} changes its convolution's output before its recurrence, which is not "
                "spread over ranks; leave this model whole"
            )

        def convolved(*parts: Tensor) -> Operands:
            found = {name: part.transpose(1, 2) for name, part in zip(operands, parts, strict=True)}
            made = convolution([found[name] for name in rule.convolved], channels)
            found |= dict(zip(rule.convolved, made, strict=True))
            return {name: x if operands[name].dim() == 4 else x[..., 0] for name, x in found.items()}

        sent = ((x if x.dim() == 4 else x[..., None]).transpose(1, 2) for x in operands.values())
        arrived = exchanged(all_to_all, True, *sent)
        before = convolution.weight.shape[-1] - 1
        out = by_documents(layout, convolved, partial(compute, own), in_one_call, before, arrived)
        (back,) = exchanged(layout.all_to_all(heads, groups, (False,)), False, out.transpose(1, 2))
        return back.transpose(1, 2)


def _as_it_is(own: RankHeads, operands: Operands, *states: Any, **options: Any) -> tuple[Tensor, list[Any]]:
    return operands["x"], []


def _takes_cu_seqlens(rule: Callable[..., Any]) -> bool:
    """Returns whether a kernel of flash-linear-attention, which takes the starts of documents, replaces Hugging Face's
    code."""
    known = inspect.getclosurevars(rule).nonlocals
    return bool(known.get("is_new_implementation")) and "cu_seqlens" in known.get("applicable_params", ())


class Convolution(NamedTuple):
    """A causal convolution of independent channels, with the arguments of the layer's call."""

    function: Callable[..., Tensor]
    hidden_states: Tensor
    """[B, C, S]"""
    weight: Tensor
    """[C, width]"""
    bias: Tensor | None
    """[C]"""
    activation: Any

    def __call__(self, operands: Sequence[Tensor], channels: Sequence[slice]) -> list[Tensor]:
        """Convolves operands [B, S, h, K], whose heads are these channels, and returns the same shapes."""
        x = torch.cat([operand.flatten(2) for operand in operands], 2).transpose(1, 2)
        weight = torch.cat([self.weight[chosen] for chosen in channels])
        bias = None if self.bias is None else torch.cat([self.bias[chosen] for chosen in channels])
        out = self.function(x, weight, bias, activation=self.activation).transpose(1, 2)
        parts = out.split([operand.shape[2] * operand.shape[3] for operand in operands], 2)
        return [part.unflatten(2, operand.shape[2:]) for part, operand in zip(parts, operands, strict=True)]

    def channels_of(self, operands: Sequence[tuple[Tensor, slice]]) -> list[slice] | None:
        """Returns the channels of the given heads of each operand [B, S, H, K]; None unless the operands are views of
        all channels, in order."""
        found, x, start = [], self.hidden_states, 0
        if sum(operand.shape[2:].numel() for operand, _ in operands) != x.shape[1]:
            return None
        for operand, heads in operands:
            stop, width = start + operand.shape[2:].numel(), operand.shape[3]
            if not _is_same_view(operand, x[:, start:stop].transpose(1, 2).unflatten(2, operand.shape[2:])):
                return None
            found.append(slice(start + heads.start * width, start + heads.stop * width))
            start = stop
        return found


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    strides = (strides for size, *strides in zip(one.shape, one.stride(), other.stride(), strict=True) if size > 1)
    return one.data_ptr() == other.data_ptr() and all(here == there for here, there in strides)


def by_documents(
    layout: ShardedLayout,
    convolve: Convolve,
    compute: Compute,
    in_one_call: bool,
    before: int,
    arrived: Sequence[Tensor],
) -> Tensor:
    """Computes [B, S, h, K] from tensors [B, h, S, K] of whole sequences, document by document, with zeros for padding.
    Rows with the same documents are computed together. With `in_one_call`, the documents of all rows are concatenated,
    and `compute` is told where each starts. `before`: as in `_one_by_one`."""
    spans = segments(layout, ((0, layout.length),), layout.length)
    spans = spans * (len(arrived[0]) // len(spans)) if in_one_call else spans
    rows = in_parts(arrived, [len(arrived[0]) // len(spans)] * len(spans), 0)
    parts = [
        (span, tensors)
        for of_row, row in zip(spans, rows, strict=True)
        for span, tensors in zip(of_row, in_parts(row, [s.q1 - s.q0 for s in of_row], 2), strict=True)
    ]
    documents = [tensors for span, tensors in parts if span.keys]
    if in_one_call and documents:
        found, sizes = [convolve(*document) for document in documents], [document[0].shape[2] for document in documents]
        device = arrived[0].device
        starts = layout.once(("starts", len(spans)), lambda: torch.tensor([0, *accumulate(sizes)], device=device))
        together = {name: torch.cat([document[name] for document in found], 1) for name in found[0]}
        outs = iter(compute(together, cu_seqlens=starts)[0].split(sizes, 1))
    else:
        outs = _one_by_one(documents, layout.parents, convolve, compute, before)
    done = (next(outs) if span.keys else torch.zeros_like(x[0].transpose(1, 2)) for span, x in parts)
    return joined([joined([next(done) for _ in of_row], 1) for of_row in spans], 0)


def _one_by_one(
    documents: list[Sequence[Tensor]], parents: Sequence[int | None], convolve: Convolve, compute: Compute, before: int
) -> Iterator[Tensor]:
    """Yields each document's output. A document that continues another, its parent, starts with that one's final state,
    and its convolution with that one's last `before` tokens."""
    ends: list[tuple[Sequence[Tensor], list[Any]]] = []  # each document's last tokens and state
    for i, (own, parent) in enumerate(zip(documents, parents or [None] * len(documents), strict=True)):
        tail, states = ([], []) if parent is None else ends[parent]
        path = [torch.cat(each, 2) for each in zip(tail, own, strict=True)] if tail else own
        operands = convolve(*path)
        if tail:
            operands = {name: x[:, tail[0].shape[2] :] for name, x in operands.items()}
        out, after = compute(operands, states, wants_state=i in parents)
        yield out
        ends.append(([x[:, :, max(0, x.shape[2] - before) :] for x in path], after) if i in parents else ([], []))
