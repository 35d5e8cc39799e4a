"""Each kernel once, at the size of a real tile, some of its rows against float64: the first thing to do on a GPU.

    python3 -m benchmark.kernel_checks [FILE]

Appends what each did to FILE, as lines of JSON. A kernel is right if it is at most twice as far
from the truth as torch in the same dtype. Ends with 1 if anything is wrong. First it says which attention torch's sdpa
chooses for the shapes that a model asks it for.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from benchmark.attention import backend
from benchmark.checks import Check, Findings, check_beside_torch, file_argument, run_checks
from benchmark.comparison import WRONG
from benchmark.device import DEVICE, DTYPE
from benchmark.errors import FLOOR, distance, relative_error
from benchmark.models import build, offloaded
from benchmark.one_tile import Tile, tile_at_hand

from seqtile import apply_seqtile
from seqtile.attention.torch_varlen import reason_against, torch_varlen
from seqtile.kernels import LossOptions
from seqtile.kernels.dispatch import (
    cross_entropy_,
    gated_activation_,
    gated_activation_backward_,
    rms_norm,
    rms_norm_backward,
    rotary_,
)
from seqtile.ops.weight_grads import WeightGrad
from seqtile.renamed import enable_checkpointing

ROWS = 32  # of a tile, spread over it, the last one among them
EPS = 1e-5
OF_SUM = 1e-4  # relative error of sums of products in float32; bfloat16 would have 2e-3


def some_rows(tokens: int) -> torch.Tensor:
    return torch.linspace(0, tokens - 1, ROWS).long().to(DEVICE)


def gradients(out: torch.Tensor, upstream: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out, leaves, upstream.to(out.dtype))


def all_written(what: str, *tensors: torch.Tensor) -> Check:
    """Everywhere, not in some rows alone."""
    return Check(f"{what}: not finite", float(sum((~x.isfinite()).sum().item() for x in tensors)), 0)


def cross_entropy(tile: Tile) -> Findings:
    logits = tile.random(tile.tokens, tile.shape.vocab)
    target = torch.randint(tile.shape.vocab, (tile.tokens,), device=DEVICE)
    rows = some_rows(tile.tokens)
    before, losses = logits[rows], torch.full((tile.tokens,), torch.nan, device=DEVICE)
    cross_entropy_(logits, target, losses, LossOptions(), write_grad=True)
    by_torch = []
    for dtype in (torch.float32, torch.float64):
        x = before.to(dtype).requires_grad_()
        loss = F.cross_entropy(x, target[rows], reduction="none")
        by_torch.append((loss.detach(), gradients(loss, torch.ones_like(loss), x)[0]))
    (loss, gradient), truth = by_torch
    yield check_beside_torch("cross-entropy, loss", losses[rows], loss, truth[0])
    yield check_beside_torch("cross-entropy, gradient", logits[rows], gradient.to(DTYPE), truth[1])
    yield all_written("cross-entropy", losses, logits)


def gated_activation(tile: Tile) -> Findings:
    gate, up, d_product = (tile.random(tile.tokens, tile.shape.mlp) for _ in range(3))
    rows = some_rows(tile.tokens)
    before = [x[rows] for x in (gate, up, d_product)]
    product = gated_activation_(gate.clone(), up, "silu")
    gated_activation_backward_(gate, up, d_product, "silu")
    by_torch = []
    for dtype in (DTYPE, torch.float64):
        g, u, d = (x.to(dtype).requires_grad_() for x in before)
        out = F.silu(g) * u
        by_torch.append([out.detach(), *gradients(out, d, g, u), out.detach()])
    names = ("product", "gradient of gate", "gradient of up", "product again")
    for name, ours, same, truth in zip(names, (product, gate, up, d_product), *by_torch, strict=True):
        yield check_beside_torch(f"gated activation, {name}", ours[rows], same, truth)
    yield all_written("gated activation", product, gate, up, d_product)


def norm(tile: Tile) -> Findings:
    width = tile.shape.hidden
    x, d_y, add = (tile.random(tile.tokens, width) for _ in range(3))
    weight, d_weight = tile.random(width), torch.zeros(width, device=DEVICE)
    y = rms_norm(x, weight, EPS, torch.full_like(x, torch.nan))
    d_x = rms_norm_backward(x, weight, EPS, d_y, torch.full_like(x, torch.nan), add=add, d_weight=d_weight)
    by_torch = []
    for dtype in (DTYPE, torch.float64):
        leaf, scale = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        out = F.rms_norm(leaf, (width,), scale, EPS)
        of_x, of_weight = gradients(out, d_y, leaf, scale)
        by_torch.append([out.detach(), of_x + add, of_weight])
    rows = some_rows(tile.tokens)
    for name, ours, same, truth in zip(("y", "gradient of x"), (y, d_x), *(of[:2] for of in by_torch), strict=True):
        yield check_beside_torch(f"rms norm, {name}", ours[rows], same[rows], truth[rows])
    yield check_beside_torch("rms norm, gradient of the weight", d_weight, by_torch[0][2], by_torch[1][2])
    yield all_written("rms norm", y, d_x)


def rotary(tile: Tile) -> Findings:
    heads, width = tile.shape.heads, tile.shape.head_dim
    x, angles = tile.random(tile.tokens, heads, width), tile.random(tile.tokens, width // 2, dtype=torch.float32)
    cos, sin = (torch.cat([f(angles)] * 2, 1).to(DTYPE) for f in (torch.cos, torch.sin))
    by_torch = []
    for dtype in (DTYPE, torch.float64):
        first, second = x.to(dtype).chunk(2, 2)
        turned = torch.cat([-second, first], 2)
        by_torch.append(x.to(dtype) * cos.to(dtype)[:, None] + turned * sin.to(dtype)[:, None])
    ours = rotary_(x.clone(), cos, sin)
    same_dtype, truth = by_torch
    yield Check("rotary", distance(ours, truth), 2 * distance(same_dtype, truth) + FLOOR)
    back = rotary_(ours, cos, sin, backward=True)
    length = (cos[:, : width // 2].double() ** 2 + sin[:, : width // 2].double() ** 2).repeat(1, 2)[:, None]
    yield Check("rotary, there and back", distance(back, x.double() * length), WRONG[DTYPE])


def weight_gradient(tile: Tile) -> Findings:
    """The float32 sum, begun (beta 0: what the buffer held is ignored) and added to (beta 1): of the head's weight, and
    of the two of a LoRA of rank 1, whose products cuBLAS may compute another way."""
    width = tile.shape.hidden
    for name, out, into in (("head", tile.shape.vocab, width), ("[1, D]", 1, width), ("[D, 1]", width, 1)):
        grad = WeightGrad(torch.empty(out, into, dtype=DTYPE, device=DEVICE))
        grad.buffer.fill_(torch.nan)
        rows = some_rows(out)
        truth = torch.zeros(ROWS, into, dtype=torch.float64, device=DEVICE)
        for beta in (0, 1):
            left, right = tile.random(tile.tokens, out), tile.random(tile.tokens, into)
            grad.add(left, right)
            truth += left[:, rows].double().t() @ right.double()
            yield Check(f"float32 sum, {name}, beta {beta}", relative_error(grad.buffer[rows], truth), OF_SUM)
        yield all_written(f"float32 sum, {name}", grad.buffer)


def attention_chosen(tile: Tile) -> Findings:
    """Which attention sdpa chooses: for a layer's heads, one head group's, in float32, and with a mask."""
    heads, kv_heads, width = tile.shape.heads, tile.shape.kv_heads, tile.shape.head_dim
    group = heads // kv_heads
    yield {"what": "cuDNN", "version": str(torch.backends.cudnn.version())}
    cases = {"a layer's heads": (heads, kv_heads, DTYPE), "a head group": (group, 1, DTYPE)}
    cases["float32"] = (heads, kv_heads, torch.float32)
    for name, (queries, keys, dtype) in cases.items():
        q, k = (tile.random(1, n, tile.tokens, width, dtype=dtype).requires_grad_() for n in (queries, keys))
        yield {"what": "sdpa", "case": name, "chooses": backend(q, k, k)}
    q, k = (tile.random(1, heads, tile.tokens, width).requires_grad_() for _ in range(2))
    mask = torch.ones(1, 1, tile.tokens, tile.tokens, dtype=torch.bool, device=DEVICE).tril()
    yield {"what": "sdpa", "case": "with a mask", "chooses": backend(q, k, k, mask)}


def documents(tile: Tile) -> Findings:
    """torch's kernel for documents of several lengths, without and with a window and sinks."""
    heads, kv_heads, width = tile.shape.heads, tile.shape.kv_heads, tile.shape.head_dim
    ends = [tile.tokens * i * i // 64 for i in range(9)]
    for window, has_sinks in ((None, False), (tile.tokens // 16, True)):
        name = "documents" + (", window, sinks" if has_sinks else "")
        q, k, v = (tile.random(1, tile.tokens, n, width).transpose(1, 2) for n in (heads, kv_heads, kv_heads))
        if (reason := reason_against(q, v, {})) is not None:
            yield {"what": name, "skipped": reason}
            continue
        given, upstream = [q, k, v], tile.random(1, tile.tokens, heads, width)
        given += [tile.random(heads)] if has_sinks else []
        starts = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        lengths |= {f"max_length_{of}": max(b - a for a, b in pairwise(ends)) for of in "qk"}
        found = []
        for dtype in (None, DTYPE, torch.float64):
            q, k, v, *sinks = leaves = [x.to(dtype or DTYPE).detach().requires_grad_() for x in given]
            if dtype is None:
                out, _ = torch_varlen(None, q, k, v, s_aux=next(iter(sinks), None), sliding_window=window, **lengths)
            else:
                out = dense_documents(ends, window, q, k, v, *sinks)
            found.append([out.detach(), *gradients(out, upstream, *leaves)])
        whats = ("output", "gradient of q", "of k", "of v", "of sinks")
        for what, ours, same, truth in zip(whats, *found, strict=False):
            yield check_beside_torch(f"{name}, {what}", ours, same, truth)


def dense_documents(
    ends: list[int], window: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sinks: torch.Tensor
) -> torch.Tensor:
    """Causal attention within documents by all scores: [1, n, h, K]."""
    found = []
    for start, end in pairwise(ends):
        keys, values = (x[0, :, start:end].repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (k, v))
        away = torch.arange(end - start, device=DEVICE)[:, None] - torch.arange(end - start, device=DEVICE)
        hidden = (away < 0) | (away >= (window or end))
        scores = (q[0, :, start:end] @ keys.mT * q.shape[3] ** -0.5).masked_fill(hidden, -torch.inf)
        scores = torch.cat([scores, *(each[:, None, None].expand(-1, end - start, 1) for each in sinks)], 2)
        found.append((scores.softmax(2)[..., : end - start] @ values).transpose(0, 1))
    return torch.cat(found)[None]


def offload(tile: Tile) -> Findings:
    """Three layers, checkpointed with their inputs on the GPU, and once more with them in host memory."""
    model = build(tile.shape, DTYPE, layers=3, vocab=8)
    apply_seqtile(model, loss=False)
    x, upstream = (tile.random(1, tile.longer, tile.shape.hidden) for _ in range(2))
    found = []
    for how in (enable_checkpointing, offloaded):
        how(model)
        model.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        out = model.model(inputs_embeds=leaf).last_hidden_state
        out.backward(upstream)
        found.append(
            [out.detach(), leaf.grad, *(each.grad for each in model.model.parameters() if each.grad is not None)]
        )
    if DEVICE == "cuda":
        held = model._seqtile_offload.store.pool.total
        yield Check("offload, host memory over two inputs", abs(held / (2 * x.nbytes) - 1), 0.05)
    errors = [(ours.float() - there.float()).norm() / there.float().norm() for ours, there in zip(*found, strict=True)]
    yield Check(
        "offload, a step", torch.stack(errors).max().item(), WRONG[DTYPE]
    )  # gigabytes, so not in float64 on the host


CHECKS: dict[str, Callable[[Tile], Findings]] = {
    check.__name__: check
    for check in (
        attention_chosen,
        cross_entropy,
        gated_activation,
        norm,
        rotary,
        weight_gradient,
        documents,
        offload,
    )
}


def main() -> None:
    tile = tile_at_hand()
    file = file_argument(__doc__)
    run_checks("kernels", {name: partial(check, tile) for name, check in CHECKS.items()}, file)


if __name__ == "__main__":
    main()
