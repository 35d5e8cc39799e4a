"""The first training step compares itself with the untiled model, on a few tokens of the user's own batch.

    first forward in training ─ 28 tokens ─┬─ untiled ──────────────────────────────── loss, gradients
                                           ├─ untiled, embeddings changed by one bit ─ how far rounding goes
                                           └─ tiled, in chunks of 5 tokens a row ───── the same?

Each of the three passes begins with the random state that the user's forward finds, without dropout, and leaves it
unchanged, see run.py. Where the tiled loss or a gradient is farther from the untiled one than rounding explains, see
difference.py, nothing is trained: a ValueError names the part and the parameter. Compared are the loss and the
gradients of the small parameters and of the embeddings' output, with check="full" of every parameter. Where the model
below the head is called by itself, as TRL's trainers do, its last hidden states are compared in place of the loss.
"""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.utils import logging

from seqtile.declared import is_declared, tokenwise
from seqtile.models.find import positional_of
from seqtile.models.placement import Options, name_of
from seqtile.ops.chunks import is_trial
from seqtile.proof.batch import MADE_UP, TrialBatch, trial_batch
from seqtile.proof.difference import STATES_NAME, Difference, brief, difference, precision_of
from seqtile.proof.ranks import Ranks, run_together
from seqtile.proof.run import Pass, Placed, tiled_modules
from seqtile.proof.state import State
from seqtile.protocols import FIRST_STEP
from seqtile.renamed import cache_in

logger = logging.get_logger(__name__)
CHUNKS = (5, 11, 9, 13)  # tokens of a row in a chunk, the first that is no size of the model
_UNCOMPARED = "not compared"  # as an outcome begins where nothing could be compared
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters")  # what PEFT says of them, on a module


def checked_forward(options: Options, original: Callable, tiled: Callable) -> Callable:
    """Returns `tiled`, a model's forward (a plain function) in place of `original`, after the check."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not is_trial():
            forward.seqtile_placement.check()
            check_first_step(self, options, original, args, kwargs)
        return tiled(self, *args, **kwargs)

    return forward


def check_first_step(model: nn.Module, options: Options, original: Callable, args: tuple, kwargs: dict) -> None:
    """Compares the tiled model with the untiled one, unless that has been done since the model last changed.

    `original` is the model's untiled forward, a plain function; `args` and `kwargs` are what it is called with. Raises
    ValueError for a difference. Only in training, with gradients; not for a compiler, a simulation or a replica of
    torch's DataParallel.
    """
    if not (options.check and model.training and torch.is_grad_enabled()) or getattr(model, "_is_replica", False):
        return
    before = vars(model).get(FIRST_STEP)
    if before is not None and before.is_of(model):
        return
    kwargs = {name: value for name, value in kwargs.items() if name != "skip_logits"}  # ours, and Liger's
    if all(each.kind is not each.VAR_POSITIONAL for each in inspect.signature(original).parameters.values()):
        names = [each.name for each in positional_of(original)]
        args, kwargs = (), dict(zip(names, args, strict=False)) | kwargs
    # Ranks that run together ignore hooks: the first alone may get a logger's, compare again, and wait for ever.
    with_declared = not run_together(model)
    made_of = _MadeOf(model, with_declared)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    reason = _not_comparable(model, original, tensors, kwargs)
    if reason is None:
        try:
            outcome = _outcome(model, options, original, args, kwargs, Ranks(model, tensors))
        except Exception as error:
            vars(model)[FIRST_STEP] = _Outcome(None, f"stopped the training: {brief(error)}")  # the next compares again
            raise
    else:
        outcome = f"{_UNCOMPARED} with the untiled model: {reason}"
    vars(model)[FIRST_STEP] = _Outcome(made_of, outcome)
    for inside in tiled_modules(model) if reason is None else ():
        if isinstance(inside, PreTrainedModel) and inside is not model:  # the model below the head, compared with it
            vars(inside)[FIRST_STEP] = _Outcome(_MadeOf(inside, with_declared), outcome)
    logger.info(f"seqtile's first step: {outcome}")


class _MadeOf:
    """What a model is made of, as far as the comparison depends on it: modules, their classes and forwards, adapters,
    and if `with_declared` what users have declared (their other hooks are left out of it). Compared without a walk; the
    model itself is not held, which holds this."""

    def __init__(self, model: nn.Module, with_declared: bool):
        self._with_declared = with_declared
        self._inside = [module for module in model.modules() if module is not model]
        owned = [vars(model), *map(vars, self._inside)]
        children = [module._modules for module in (model, *self._inside)]
        self._children = [each for each in children if isinstance(each, dict)]  # not of what torch.jit makes
        self._hooks = [own[name] for own in owned for name in ("_forward_hooks", "_forward_pre_hooks")]
        self._seen = [list(each) if isinstance(each, list) else each for each in self._now(model)]

    def still_is(self, model: nn.Module) -> bool:
        return self._now(model) == self._seen

    def _now(self, model: nn.Module) -> list[Any]:
        owned = [vars(model), *map(vars, self._inside)]
        attributes = chain(*[map(dict.get, owned, repeat(name)) for name in ("forward", *_ADAPTERS)])
        children = chain(*map(dict.values, self._children))
        now = [type(model), *map(type, self._inside), *attributes, *children]
        if self._with_declared:
            hooks = chain(*map(dict.values, self._hooks))
            now += [tokenwise.__globals__["latest"], *filter(is_declared, hooks)]
        return now

    def __reduce__(self) -> tuple:
        return type(None), ()


class _Outcome(NamedTuple):
    """The protocol `Outcome`, with what the model was made of when it was compared; None if the comparison raised."""

    made_of: _MadeOf | None
    text: str

    @property
    def compared(self) -> bool:
        return not self.text.startswith(_UNCOMPARED)

    def is_of(self, model: nn.Module) -> bool:
        """Returns whether the model has not changed since."""
        return self.made_of is not None and self.made_of.still_is(model)

    def said(self, model: nn.Module) -> str:
        has_changed = self.made_of is not None and not self.is_of(model)
        return self.text + ("; the model has changed since, so the next step compares again" if has_changed else "")


@_disable_current_modes()  # such as one that counts operations
def _outcome(model: nn.Module, options: Options, original: Callable, args: tuple, kwargs: dict, ranks: Ranks) -> str:
    """Returns the result of the comparison as text. Raises ValueError for a difference."""
    full, placed, state = options.check == "full", tiled_modules(model), State(model)
    if ranks.any(bool(state.lost)):
        lost = "; ".join(state.lost) or "on another rank a module may keep state that seqtile cannot restore"
        remedy = "declare it with seqtile.tokenwise if it keeps nothing, or keep its state in buffers"
        return f"{_UNCOMPARED}: {lost}; {remedy}"
    try:
        with ranks.stop_together():
            batch = trial_batch(model, original, args, kwargs)
        run = Pass(model, original, batch.inputs, placed, _chunk_tokens(model, batch), full, ranks, state).run
        untiled = run(tiled={})
        dtypes = {getattr(module, "compute_dtype", None) for module in model.modules()}  # of quantised layers
        in_layers = [torch.empty(0, dtype=dtype) for dtype in dtypes if isinstance(dtype, torch.dtype)]
        eps = precision_of(*model.parameters(), *untiled.values(), *in_layers)
        nudged = run(tiled={}, nudge=eps)
    except Exception as error:  # whatever the model's own code raises for so short a batch
        return f"{_UNCOMPARED}: the untiled model fails on a few tokens of it ({brief(error)})"
    tokens = batch.shape.numel()
    try:
        tiled = run(tiled=placed)
    except (OSError, torch.OutOfMemoryError):  # no part's fault: Triton cannot launch here, or memory is full
        raise
    except Exception:
        logger.error(
            f"seqtile's first step: the tiled model fails on {tokens} tokens of this batch, on which the untiled "
            f"one runs. Nothing was trained in this step. {_remedy(None)}"
        )
        raise
    found = difference(untiled, tiled, nudged, eps)
    if ranks.any(found is not None):  # compare again with other bits changed: what vanishes was rounding
        run = partial(run, nudge=eps, seed=2)
        differs = partial(difference, run(tiled={}), nudged=untiled, eps=eps)
        found = differs(run(tiled=placed))
    if ranks.any(found is not None):
        part, option = _part_that_differs(ranks, placed, lambda **asked: differs(run(**asked)))
        where = "on another rank"
        if found is not None:
            bit = f"one bit of the embeddings changes it by {found.rounding:.1e}"
            where = f"{found.said}, where {bit}"
        raise ValueError(
            f"the tiled model computes something else than the untiled one on {tokens} tokens of this batch: "
            f"{where}{part}. Nothing was trained in this step. {_remedy(option)}"
        )
    gradients = "every gradient" if full else f"{len(untiled) - 1 or 'no'} gradients"
    gradients += " below the head" if STATES_NAME in untiled else ""
    left_out = f" (left out: {', '.join(batch.left_out)})" if batch.left_out else ""
    tried = f"{tokens} made-up tokens" if MADE_UP in batch.left_out else f"{tokens} tokens of the batch"
    return f"{next(iter(untiled))} and {gradients} equal the untiled model's up to rounding, on {tried}{left_out}"


def _chunk_tokens(model: nn.Module, batch: TrialBatch) -> int:
    """Returns the tokens of a chunk. Neither their number in a row nor the rest of a row is a size of the model, so no
    other dimension is mistaken for that of the tokens. If possible the last chunk has one token."""
    rows, length = batch.shape
    sizes = {value for value in vars(model.config.get_text_config()).values() if isinstance(value, int)}
    size = next((size for size in CHUNKS if not {size, length % size} & sizes), CHUNKS[0])
    whole = range(rows * size, rows * size + rows)  # all cut a row in the same chunks
    return next((tokens for tokens in whole if rows * length % tokens == 1), whole[0])


def _not_comparable(model: nn.Module, original: Callable, tensors: list[torch.Tensor], kwargs: dict) -> str | None:
    """Returns why the model cannot be compared in this forward; None if it can. Ranks must find the same."""
    if detect_fake_mode(tensors) is not None or any(x.is_meta for x in (*tensors, *model.parameters())):
        return "its tensors hold no values"
    if torch._C._are_functorch_transforms_active():
        return "it is inside a transform of torch.func"
    if cache_in(kwargs) is not None:
        return "it was given a cache"
    if isinstance(labels := kwargs.get("labels"), torch.Tensor) and labels.dim() < 2:
        return "its labels are not those of tokens"
    is_above = isinstance(model, PreTrainedModel) and model.base_model is not model
    if is_above and labels is None and model.get_output_embeddings() is None:
        if "labels" in inspect.signature(original).parameters:  # of which none can be made up
            return "it has no LM head"
    for module in model.modules():
        if module._compiled_call_impl is not None:
            return f"its {name_of(module)} is compiled"
        if isinstance(module, FullyShardedDataParallel):
            return "FullyShardedDataParallel moves its parameters; fully_shard can be compared"
    return None


def _part_that_differs(
    ranks: Ranks, placed: Placed, difference_of: Callable[..., Difference | None]
) -> tuple[str, str | None]:
    """Tiles one part at a time: returns the text for the error, and the option, of the first that differs; else "" and
    None."""
    kinds: dict[tuple[str, str], Placed] = {}
    for module, placement in placed.items():
        owner = "" if placement.part == "layer" else f" ({name_of(module)})"
        kinds.setdefault((placement.part, owner), {})[module] = placement
    kinds["attention", ""] = {}
    for (part, owner), alone in kinds.items():
        if not part:
            continue
        try:
            differs = difference_of(tiled=alone, varlen=part == "attention") is not None
        except Exception:  # a part that does not run alone is not the one that is looked for
            differs = True
        if ranks.any(differs):
            return f"; the part is {part}{owner}", part
    return "", None


def _remedy(part: str | None) -> str:
    off = "None" if part == "attention" else "False"
    without = f"{part}={off}" if part else "the part left out (mlp=False, layer=False or loss=False)"
    return (
        f"Pass {without} to SeqtileCallback, or to apply_seqtile after seqtile.restore(model), and please report it "
        "(docs/troubleshooting.md), unless you declared something in it with seqtile.tokenwise: then that may not "
        "treat each token by itself; check=False trains without this comparison"
    )
