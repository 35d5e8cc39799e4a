"""The loss of a causal LM without its logits: the model's own forward runs, with a head that computes nothing yet.

    the model's forward   hidden ─ head ─ LogitsRecipe ─ (scale, soft cap) ─ loss_function ─ loss
                                   stands in for lm_head                    stands in for Hugging Face's

So all that a model does before its head and after its loss is done by its own code. Its caller finds logits that are
computed when they are read.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import nn
from transformers.loss import loss_utils
from transformers.utils import ModelOutput

from seqtile.models.chunked import InChunks, call_in_chunks
from seqtile.models.find import head_of, positional_of, takes_use_cache
from seqtile.models.functions import code_of, defining_path, named
from seqtile.models.known import unknown_in
from seqtile.models.logits.late import gathers, rows_of_chunk
from seqtile.models.logits.lazy import connected, lazy_logits
from seqtile.models.logits.recipe import LogitsRecipe
from seqtile.models.placement import Options
from seqtile.models.quantised import is_quantised
from seqtile.models.read import (
    LoraLinear,
    check_untransformed,
    is_transformed,
    process_unfused_reason,
    projection_unfused_reason,
)
from seqtile.models.sharded import gathered, in_own_call, is_sharded
from seqtile.models.stand_in import standing_in, without_stand_ins
from seqtile.models.verdict import Verdict, Verdicts, left_untiled
from seqtile.ops.head.cross_entropy import linear_cross_entropy
from seqtile.ops.head.reduction import divided
from seqtile.renamed import cache_in
from seqtile.tensor_like import CrossEntropy

_CROSS_ENTROPIES = (  # where one of these was written
    "torch.nn.functional.cross_entropy",
    "liger_kernel.transformers.functional.liger_cross_entropy",
)
# A compiler knows torch's own by identity alone.
_CROSS_ENTROPY = F.cross_entropy if defining_path(F.cross_entropy) in _CROSS_ENTROPIES else None


def tiled_loss_forward(options: Options, original: Callable) -> Callable:
    """Returns `original`, the forward (a plain function) of a model with a head over a vocabulary, with the loss tiled.

    Given `labels` or `shift_labels`, the loss is computed without logits. `logits` is a `LazyLogits`, computed when it
    is read; None with `skip_logits=True`, and in training in a replica of torch's DataParallel. Plain logits are
    computed, by `original`, with `skip_logits=False` and given `logits_to_keep`, both with an untiled loss; and without
    labels given a cache, or where the forward is compiled, traced or transformed by torch.func.
    """
    variadic = any(each.kind is each.VAR_POSITIONAL for each in inspect.signature(original).parameters.values())
    names = [each.name for each in positional_of(original)]
    takes_skip_logits = "skip_logits" in names
    makes_cache = takes_use_cache(original)
    heads = _Heads()
    calls_torch = "loss_function" not in getattr(code_of(inspect.unwrap(original)), "co_names", ())

    @without_stand_ins
    def forward(self, *args, skip_logits=None, **kwargs):
        passed_on = args if variadic else ()  # to whoever knows their names
        inputs = kwargs if variadic else dict(zip(names, args, strict=False)) | kwargs
        if len(inputs) < len(args) + len(kwargs) - len(passed_on):
            raise TypeError(
                f"expected at most {len(names)} positional arguments, none of them by name too, got {len(args)}"
            )
        has_labels = inputs.get("labels") is not None or inputs.get("shift_labels") is not None
        kept = inputs.get("logits_to_keep", 0)
        keeps_all = isinstance(kept, int) and kept == 0
        if skip_logits is None and has_labels and keeps_all and torch.is_grad_enabled():
            # In a replica torch's DataParallel would read all logits, to collect them on one GPU.
            skip_logits = getattr(self, "_is_replica", None) or None
        if skip_logits and not (has_labels and keeps_all):
            raise ValueError(
                "skip_logits=True asks for a loss alone: pass labels or shift_labels, and no logits_to_keep"
            )
        if takes_skip_logits:  # Liger's forward, whose own loss is not asked for
            inputs["skip_logits"] = False
        given_cache = cache_in(inputs) is not None
        # What transforms, compiles or traces a forward without a loss gets logits that it can follow.
        followed = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed()
        is_patched = calls_torch and F.cross_entropy is not _CROSS_ENTROPY
        needs_logits = is_patched if has_labels else given_cache or followed
        if skip_logits is False or not keeps_all or needs_logits:
            return original(self, *passed_on, **inputs)
        if has_labels:
            if inputs.get("labels") is None:  # which Hugging Face's forward wants, to compute any loss
                inputs["labels"] = inputs["shift_labels"]
            if makes_cache and not given_cache:  # keys and values of all tokens, which nobody reads after a loss
                inputs.setdefault("use_cache", False)
        owner, name, verdict = heads.of(self)
        if verdict.error is not None and has_labels:
            raise ValueError(verdict.error)
        if verdict.how == "untiled" or verdict.error is not None:
            output = original(self, *passed_on, **inputs)
            if skip_logits and isinstance(output, ModelOutput):
                output = type(output)(**dict(output) | {"logits": None})
            return output
        with _lazy_head(self, owner, name, options, verdict, with_logits=not skip_logits):
            output = original(self, *passed_on, **inputs)
        return _with_tensors(output, None if skip_logits else lazy_logits)

    return forward


class LazyHead:
    """Stands in for a head while a forward runs; called with hidden states [..., D] it returns a LogitsRecipe."""

    def __init__(self, head: nn.Module, verdict: Verdict, cross_entropy: Callable):
        self._head, self._verdict, self._cross_entropy = head, verdict, cross_entropy

    def __call__(self, hidden: torch.Tensor) -> LogitsRecipe:
        return LogitsRecipe(hidden, self._head, self._verdict, self._cross_entropy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


def place_of_head(model: nn.Module) -> tuple[nn.Module, str]:
    """Returns the module that holds a model's head, and the head's name there. Raises ValueError if it has none."""
    head = head_of(model)
    for owner in () if head is None else model.modules():
        for name, child in owner._modules.items():
            if child is head:
                return owner, name
    raise ValueError(
        f"{type(model).__name__}: expected a model with a head over a vocabulary, got none; pass the causal LM itself, "
        "or apply with loss=False"
    )


class _Heads:
    """Where models have their heads, and how these are computed, each found once."""

    def __init__(self) -> None:
        self._places: WeakKeyDictionary[nn.Module, tuple[ref[nn.Module], str]] = WeakKeyDictionary()
        self._verdicts = Verdicts(head_verdict)

    def of(self, model: nn.Module) -> tuple[nn.Module | None, str, Verdict]:
        """Returns the module that holds the model's head, its name there, and how the loss is computed."""
        is_compiling = torch.compiler.is_compiling()  # which cannot trace weak references
        place = None if is_compiling else self._places.get(model)
        owner, name = (None, "") if place is None else (place[0](), place[1])
        if owner is None or owner._modules.get(name) is not head_of(model):
            try:
                owner, name = place_of_head(model)
            except ValueError:
                return None, "", loss_verdict(model)
            if not is_compiling:
                self._places[model] = ref(owner), name
        return owner, name, _with_loss(model, self._verdicts.of(owner._modules[name]))


def _lazy_head(
    model: nn.Module, owner: nn.Module, name: str, options: Options, verdict: Verdict, with_logits: bool
) -> AbstractContextManager[None]:
    """Lets a model's forward run with `LazyHead` and the tiled loss in place of its own."""
    check_untransformed()
    head = owner._modules[name]
    compute = partial(
        _cross_entropy,
        chunked=verdict.how == "chunked",
        chunk_tokens=options.chunk_tokens,
        sharded=verdict.sharded,
        with_logits=with_logits,
    )
    loss = partial(_loss, untiled=model.loss_function, compute=compute)
    return standing_in(model, loss, owner, name, LazyHead(head, verdict, compute))


def _with_tensors(output: Any, of_recipe: Callable[[LogitsRecipe], torch.Tensor] | None) -> Any:
    """Returns a forward's output with its recipes replaced by `of_recipe` of them; by None without it."""
    values = list(output) if isinstance(output, tuple) else list(output.values())
    found = [(of_recipe and of_recipe(value)) if isinstance(value, LogitsRecipe) else value for value in values]
    return tuple(found) if isinstance(output, tuple) else type(output)(**dict(zip(output, found, strict=True)))


def loss_verdict(model: nn.Module) -> Verdict:
    """Finds how lm_head and the loss are computed."""
    try:
        owner, name = place_of_head(model)
    except ValueError as error:
        return Verdict("untiled", "it has no head over a vocabulary", str(error))
    return _with_loss(model, head_verdict(owner._modules[name]))


def _with_loss(model: nn.Module, head: Verdict) -> Verdict:
    """Adds an error to a head's verdict if the model's loss function is not the one that is tiled."""
    if head.how == "untiled":
        return left_untiled(model, head.reason)
    if (unknown := _unknown_loss_reason(model.loss_function)) is None:
        return head
    expected = "expected Hugging Face's ForCausalLMLoss, the one loss that seqtile tiles"
    return head._replace(error=f"{unknown}; {expected}; apply with loss=False")


def head_verdict(head: nn.Module, dtype: torch.dtype | None = None) -> Verdict:
    """Finds how a head is computed; untiled if it holds something unknown."""
    reason, sharded = head_unfused_reason(head), is_sharded(head) or gathers(head)
    if reason is not None and (unknown := unknown_in(head, "head")) is not None:
        return Verdict("untiled", unknown)
    in_chunks = () if torch.compiler.is_compiling() else (InChunks(head=head),)
    # The head itself is not among what a verdict holds, since the verdict is kept as long as the head lives.
    return Verdict("fused" if reason is None else "chunked", reason, sharded=sharded, in_chunks=in_chunks)


def head_unfused_reason(head: nn.Module) -> str | None:
    """Says why lm_head is not fused."""
    reason = process_unfused_reason() or projection_unfused_reason("lm_head", head)
    if reason is None and is_quantised(head):
        return "lm_head is quantised"
    return "lm_head has an adapter" if reason is None and hasattr(head, "lora_A") else reason


def _unknown_loss_reason(function: Any) -> str | None:
    """Says why a model's loss is not the cross-entropy that is computed in its place."""
    if defining_path(function) != "transformers.loss.loss_utils.ForCausalLMLoss":
        return f"model.loss_function is {function!r}"
    inner = loss_utils.fixed_cross_entropy
    if defining_path(inner) != (name := "transformers.loss.loss_utils.fixed_cross_entropy"):
        return f"{name}, which model.loss_function calls, was replaced by {named(inner)}"
    if F.cross_entropy is not _CROSS_ENTROPY and defining_path(F.cross_entropy) not in _CROSS_ENTROPIES:
        return f"torch.nn.functional.cross_entropy was replaced by {named(F.cross_entropy)}"
    return None


def _loss(
    logits: LogitsRecipe | torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    *,
    untiled: Callable[..., torch.Tensor],
    compute: Callable[..., torch.Tensor],
    **kwargs: Any,
) -> torch.Tensor:
    """Computes what Hugging Face's ForCausalLMLoss, `untiled`, computes from logits [B, S, V]."""
    arguments = {"ignore_index": ignore_index, "num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
    if isinstance(logits, LogitsRecipe):  # the forward has not read them
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        rows = logits.shape[:-1]
        if shift_labels.numel() != rows.numel():
            raise ValueError(f"labels: expected one for each token, {list(rows)}, got {list(shift_labels.shape)}")
        targets = shift_labels.to(logits.device).reshape(rows)
        loss = compute(logits, targets, ignore_index=ignore_index, num_items=num_items_in_batch)
        if loss is not NotImplemented:
            return loss
        logits = logits.real("its loss")
    return untiled(logits, labels, vocab_size, **arguments, **kwargs)


def _cross_entropy(
    logits: LogitsRecipe,
    target: torch.Tensor,
    *args: Any,
    num_items: torch.Tensor | int | None = None,
    chunked: bool,
    sharded: bool,
    chunk_tokens: int | None,
    with_logits: bool,
    **kwargs: Any,
) -> torch.Tensor:
    """Computes what torch's cross_entropy computes from logits [..., V] and targets [...], divided by `num_items` where
    that is given; NotImplemented for what is not tiled. `with_logits`: where the head's weights are `sharded`, and so
    gathered, once, the logits are connected to them, too."""
    weight, _, ignore_index, _, reduction, label_smoothing = asked = CrossEntropy(*args, **kwargs)
    same_shape = target.shape == logits.shape[:-1] and not target.is_floating_point()
    if not same_shape or asked.is_deprecated or reduction not in ("mean", "sum"):
        return NotImplemented
    head, affine = logits.head, logits.affine
    if chunked or affine is None:
        if weight is not None or label_smoothing:
            return NotImplemented
        total = _chunked_losses(logits, target, ignore_index, chunk_tokens, connects=sharded and with_logits).sum()
        if reduction == "sum":
            return total
        return divided(total, (target != ignore_index).sum() if num_items is None else num_items)

    def of_weight(hidden: torch.Tensor) -> torch.Tensor:
        matrix, bias, *_ = LoraLinear(head, name="lm_head").read()
        biases = [] if bias is None else [bias if affine.scale == 1 else bias * affine.scale]
        biases += [tensor.to(matrix.dtype) for tensor in affine.added]
        options = {"logit_scale": affine.scale, "softcap": affine.softcap, "chunk_tokens": chunk_tokens}
        options |= {"ignore_index": ignore_index, "num_items": num_items, "reduction": reduction}
        options |= {"class_weight": weight, "label_smoothing": label_smoothing}
        return linear_cross_entropy(hidden, matrix, target, bias=sum(biases) if biases else None, **options)

    return _in_heads_call(in_own_call, of_weight, logits, with_logits) if sharded else of_weight(logits.hidden)


def _in_heads_call(call: Callable, compute: Callable, logits: LogitsRecipe, connects: bool) -> torch.Tensor:
    """Returns compute(hidden states), inside `call`, which gathers the head's weights. With `connects`, the logits are
    connected to these in the same call: one more could free the weights of a group while its backward needs them."""
    head, root = logits.head, logits.root
    if not connects:
        return call(head, compute, logits.hidden)
    # ZeRO-3 keeps the head whole until each tensor that its call was given has a gradient: logits may never get one
    given = [logits.hidden] if logits.hidden is root.hidden else [logits.hidden, root.hidden]
    loss, root.tensor = call(head, lambda *hidden: (compute(hidden[0]), connected(root, hidden[-1])), *given)
    return loss


def _chunked_losses(
    logits: LogitsRecipe, targets: torch.Tensor, ignore_index: int, chunk_tokens: int | None, connects: bool
) -> torch.Tensor:
    """Computes the loss of every token under a head that runs in chunks, ignored ones too: its logits once more in the
    backward. 4 u of all tokens."""

    def losses_of(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        real = logits.of(hidden).float().flatten(0, -2)
        losses = F.cross_entropy(real, targets.flatten(), ignore_index=ignore_index, reduction="none")
        return losses.view(targets.shape)

    def losses(hidden: torch.Tensor) -> torch.Tensor:
        rows = rows_of_chunk(hidden, chunk_tokens)
        parts = InChunks(head=logits.head)  # of weights that are gathered by now
        return call_in_chunks(losses_of, parts, hidden, targets.unsqueeze(-1), chunk_tokens=rows)

    return _in_heads_call(partial(gathered, inside_call=False), losses, logits, connects)
