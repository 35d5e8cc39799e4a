"""Three training steps of a Llama of two layers at 8B's width, tiled as whole as it can be, beside the untiled model.

    python3 -m benchmark.few_steps [FILE]

16K tokens in bfloat16, a quarter of them without a label; `apply_seqtile(model, layer=True, head_groups="auto")` with
the layers' inputs in host memory, on the same weights and data as Hugging Face's model under checkpointing. The truth
is the untiled model in float32. A step changes each weight by 2 % of its norm: plain SGD would change less than
bfloat16 can tell apart. So large a step makes much of a small difference: on an H200, the second loss of the untiled
model was 1.4 % from the truth, and the third 15 %. So the first losses are judged, and the others shown. Says what the
first step's comparison found, the losses, how far every gradient of the first step is from the truth, and the peak
beside the plan. Appends it to FILE, as lines of JSON. Ends with 1 if anything is wrong.
"""

import gc
import math
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from benchmark.checks import Check, Findings, file_argument, run_checks
from benchmark.device import DEVICE, DTYPE, Watch, free_memory, peak_bytes
from benchmark.errors import distance
from benchmark.models import build, offloaded
from benchmark.shapes import SHAPES, K, Shape
from transformers import PreTrainedModel

from seqtile import apply_seqtile, memory, status
from seqtile.memory import apply_options
from seqtile.memory.setup import TILES, Setup
from seqtile.models.status import outcome_of
from seqtile.renamed import enable_checkpointing

STEPS, LAYERS = 3, 2
RATE = 0.02
TRUTH = {torch.bfloat16: torch.float32, torch.float32: torch.float64}[DTYPE]
SETUP = {"tiles": TILES, "head_groups": "auto", "offload": ("activations",), "optimizer": "sgd", "zero_stage": 0}
CHUNK = None if DEVICE == "cuda" else 128  # tokens
# In float32 no kernel of torch's takes fewer kv heads than query heads: it would store scores of length x length.
REPEATED = patch("transformers.integrations.sdpa_attention.use_gqa_in_sdpa", lambda *_: False)
OF_LOSS = 2e-3  # relative; losses of bfloat16 logits differ by about 1e-4


class Trained(NamedTuple):
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    """Of the first step."""
    peak: int
    """Bytes, weights included; of the second step."""
    seconds: float
    """Of the last."""


def tiled(model: PreTrainedModel, groups: bool = True) -> None:
    options = apply_options(Setup(**SETUP)) | ({} if groups else {"head_groups": None})
    apply_seqtile(model, chunk_tokens=CHUNK, **options)
    offloaded(model)


def update(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight -= weight.grad * (RATE * weight.norm() / weight.grad.norm())
    model.zero_grad(set_to_none=True)


def batch(shape: Shape, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(shape.vocab, (1, tokens), device=DEVICE)
    labels = ids.clone()
    labels[:, : tokens // 4] = -100
    return {"input_ids": ids, "labels": labels}


def initial(shape: Shape, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights each time."""
    torch.manual_seed(0)
    return build(shape, DTYPE, LAYERS).to(dtype)


def train(model: PreTrainedModel, inputs: dict[str, torch.Tensor], steps: int = STEPS) -> Trained:
    """Peaks and times are of later steps: the first compares itself with the untiled model, and compiles."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    losses, gradients, peak, seconds = [], {}, 0, 0.0

    def backward() -> None:
        (loss := model(**inputs).loss).backward()
        losses.append(loss.item())

    for number in range(steps):
        watch = Watch()
        watch.mark()
        if number == 1:
            peak = weights + peak_bytes(backward)
        else:
            backward()
        watch.mark()
        seconds = watch.seconds()[0]
        if not number:
            gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        update(model)
    return Trained(losses, gradients, peak, seconds)


def train_new(
    shape: Shape, inputs: dict[str, torch.Tensor], apply: Callable, dtype: torch.dtype, steps: int
) -> Trained:
    model = initial(shape, dtype)
    apply(model)
    return train(model, inputs, steps)


def planned(shape: Shape, tokens: int) -> int:
    """Bytes of the tiled step's plan, without what it reserves for CUDA."""
    plan = memory.plan(shape, seq_len=tokens, chunk_tokens=CHUNK, dtype=str(DTYPE).removeprefix("torch."), **SETUP)
    return plan.gpu_bytes - plan.peak.parts["reserved"]


def steps(shape: Shape, tokens: int) -> Findings:
    inputs = batch(shape, tokens)
    about = {"layers": LAYERS, "width": shape.hidden, "tokens": tokens, "dtype": str(DTYPE).removeprefix("torch.")}
    theirs = train_new(shape, inputs, enable_checkpointing, DTYPE, STEPS)
    yield figures("untiled", theirs)
    free_memory()
    model = initial(shape, DTYPE)
    tiled(model)
    try:
        ours = train(model, inputs)
    except Exception as error:  # in head chunks, or tiled at all?
        yield {"what": "seqtile", "why": f"{type(error).__name__}: {error}"[:400]}
        traceback.clear_frames(error.__traceback__)  # which hold the model and what it keeps
        del model
        free_memory()
        yield figures(
            "seqtile, all heads at once", train_new(shape, inputs, partial(tiled, groups=False), DTYPE, STEPS)
        )
        raise
    yield {"what": "first step", "found": outcome_of(model), **about}
    yield {"what": "status", "says": str(status(model)).splitlines()}
    del model
    gc.collect()
    free_memory()
    yield figures("seqtile", ours)
    yield {"what": "plan", "planned_bytes": planned(shape, tokens), "of": ours.peak}
    yield Check("loss of step 1, from the untiled", abs(ours.losses[0] / theirs.losses[0] - 1), OF_LOSS)
    if theirs.losses[0] == theirs.losses[-1]:
        yield {"what": "the loss did not move"}
    try:
        with REPEATED:
            truth = train_new(shape, inputs, enable_checkpointing, TRUTH, STEPS)
    except torch.OutOfMemoryError as error:
        yield {"what": "truth", "skipped": f"{TRUTH} is too large, so gradients are not judged: {error}"[:200]}
        return
    yield Check("loss of step 1, from the truth", abs(ours.losses[0] / truth.losses[0] - 1), OF_LOSS)
    yield {"what": "truth", "losses": truth.losses}
    yield worst_gradient(ours, truth, theirs)


def figures(name: str, trained: Trained) -> dict[str, object]:
    return {"what": name, "losses": trained.losses, "peak_bytes": trained.peak, "seconds": trained.seconds}


def worst_gradient(ours: Trained, truth: Trained, theirs: Trained) -> Check:
    """The gradient of the first step that is furthest off, over what is allowed: twice what the untiled model is off in
    the same dtype."""
    found = []
    for parameter, right in truth.gradients.items():
        allowed = 2 * distance(theirs.gradients[parameter], right) + 1e-6
        error = distance(ours.gradients[parameter], right)
        ratio = error / allowed
        found.append((ratio if ratio == ratio else math.inf, error, allowed, parameter))  # NaN is the worst
    _, error, allowed, parameter = max(found)
    return Check(f"gradients of {len(found)} parameters, from the truth; worst: {parameter}", error, allowed)


def main() -> None:
    on_gpu = DEVICE == "cuda"
    shape = replace(SHAPES["llama3_8b" if on_gpu else "tiny"], layers=LAYERS)
    file = file_argument(__doc__)
    run_checks("few steps", {"steps": partial(steps, shape, 16 * K if on_gpu else 300)}, file)


if __name__ == "__main__":
    main()
