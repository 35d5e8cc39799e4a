"""The probes that run in one process."""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqtile
from seqtile.memory.measure import LiveBytes
from seqtile.probe.cases import CLOSE, VOCAB, WINDOW, Case, Finding, error, gradients, leak, small_model, window

Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""hidden [T, D], weight [V, D], target [T], tokens per chunk -> the mean loss."""

HEAD = (2048, 64, 256)  # T, D, V for the probe of the head
CHUNKS = 256
LENGTHS = (8192, 16384)  # for the probe of memory, with chunks of 256 tokens; TRL's tiles have 4,096
WIDTH, WORDS = 16, 1024
UNEQUAL = (60, 4)  # the numbers of labels of two batches
GUIDE = "the mean of the batches' means; its guide says how to weigh by labels"
RING = "torch's ring attention, over several GPUs: not tried here"
UPSTREAM = "a sum, divided afterwards as its docstring recommends"
not_tried = partial(Finding, False, "", "not tried")


def tiled_model(sliding_window: int | None = None) -> nn.Module:
    model = small_model(sliding_window)
    seqtile.apply_seqtile(model, layer=True, chunk_tokens=16, check=False)
    return model


# accumulation -------------------------------------------------------------------------------------------------


def unequal_batches() -> list[dict[str, Tensor]]:
    """Returns two batches with one row of 64 tokens each; the last 60 and the last 4 tokens have labels."""
    batches = []
    for i, labelled in enumerate(UNEQUAL):
        ids = torch.randint(3, VOCAB, (1, 64), generator=torch.Generator().manual_seed(i))
        labels = ids.clone()
        labels[:, :-labelled] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def both_at_once() -> Tensor:
    """Returns the gradient of the mean over all labels of both batches, computed as one batch."""
    model, batches = small_model(), unequal_batches()
    model(**{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}).loss.backward()
    return gradients(model)


def accumulation(model: nn.Module, backward: Callable[[nn.Module, dict[str, Tensor], int], None]) -> Finding:
    """Calls `backward(model, batch, items)` for each batch, where `items` is the number of labels of both."""
    for batch in unequal_batches():
        backward(model, batch, sum(UNEQUAL))
    return small_error(error(gradients(model), both_at_once()))


def small_error(value: float) -> Finding:
    return Finding(value < CLOSE, f"{value:.1e}")


def by_items(model: nn.Module, batch: dict[str, Tensor], items: int) -> None:
    model(**batch, num_items_in_batch=items).loss.backward()


def accelerate_accumulates() -> Finding:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(UNEQUAL))
    model = accelerator.prepare(small_model())

    def backward(model: nn.Module, batch: dict[str, Tensor], items: int) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)

    by_guide = small_model()
    for batch in unequal_batches():
        (by_guide(**batch).loss / len(UNEQUAL)).backward()
    return accumulation(model, backward).by_contract(error(gradients(model), gradients(by_guide)) < CLOSE)


def deepspeed_accumulates() -> Finding:
    """Sums the loss over chunks and divides by the number of labels afterwards, as DeepSpeed's docstring recommends."""

    def backward(model: nn.Module, batch: dict[str, Tensor], items: int) -> None:
        hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state[0, :-1]
        (deepspeed_tiled_loss(hidden, model.lm_head.weight, batch["labels"][0, 1:], 16, "sum") / items).backward()

    return accumulation(small_model(), backward)


def trl_accumulates() -> Finding:
    """SFTTrainer, with one SGD update of learning rate 1 over the two batches."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1"
    )
    ids, labels = (torch.cat([batch[name] for batch in unequal_batches()]) for name in ("input_ids", "labels"))
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "completion_mask": (labels != -100).int().tolist()})
    model = small_model()
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    with tempfile.TemporaryDirectory() as directory:
        options = {"output_dir": directory, "use_cpu": True, "report_to": "none", "bf16": False, "save_strategy": "no"}
        options |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
        options |= {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": len(UNEQUAL)}
        arguments = SFTConfig(**options, completion_only_loss=True, disable_tqdm=True)
        SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer).train()
    after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return small_error(error(before - after, both_at_once()))


# the head's gradient, memory ----------------------------------------------------------------------------------


def untiled(hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, target)


def seqtile_loss(hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
    return seqtile.linear_cross_entropy(hidden, weight, target, chunk_tokens=chunk)


def checkpointed(hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
    """The loop that users write by hand; autograd sums the weight's gradient in the weight's dtype."""
    from torch.utils.checkpoint import checkpoint

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.T).float(), y, reduction="sum")

    parts = zip(hidden.split(chunk), target.split(chunk), strict=True)
    return sum(checkpoint(loss, x, y, use_reentrant=False) for x, y in parts) / len(target)


def torch_loss(hidden: Tensor, weight: Tensor, target: Tensor, chunk: int, **others: Any) -> Tensor:
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None, **others)
    return F.linear_cross_entropy(hidden, weight, target, options=options)


def deepspeed_tiled_loss(hidden: Tensor, weight: Tensor, target: Tensor, chunk: int, reduction: str = "mean") -> Tensor:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    def loss(_: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.T).float(), y, reduction=reduction)

    shards = -(-len(hidden) // chunk)
    return TiledFusedLogitsLoss.apply(loss, None, hidden[None], target[None], None, shards, [weight], reduction)


def trl_loss(hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction

    log_probs, *_ = ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, 256, None, 1.0, ())
    return -log_probs.mean()


def liger_loss(hidden: Tensor, weight: Tensor, target: Tensor, chunk: int, **options: Any) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(**options)(weight, hidden, target)


def problem(tokens: int, width: int, words: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(words, width, generator=generator) / width**0.5).to(device, dtype).requires_grad_()
    return [hidden, weight, torch.randint(words, (tokens,), generator=generator).to(device)]


def head(loss: Loss, device: str = "cpu") -> Finding:
    """Right if the error against float64 is at most twice that of torch's untiled loss, also in bfloat16."""
    hidden, weight, target = problem(*HEAD, torch.bfloat16, device)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    untiled(*exact, target, 0).backward()
    errors = []
    for each in (untiled, loss):
        weight.grad = hidden.grad = None
        each(hidden, weight, target, HEAD[0] // CHUNKS).backward()
        errors.append(error(weight.grad, exact[1].grad))
    return Finding(errors[1] <= 2 * errors[0], f"{errors[1]:.1e}", "imprecise")


def memory(loss: Loss, device: str = "cpu") -> Finding:
    """Right if memory grows by less than an eighth of a row of logits per token, in bfloat16."""
    peaks = []
    for tokens in LENGTHS:
        inputs = problem(tokens, WIDTH, WORDS, torch.bfloat16, device)
        with LiveBytes() as live:
            loss(*inputs, 256).backward()
        peaks.append(live.peak)
    growth = (peaks[1] - peaks[0]) / (LENGTHS[1] - LENGTHS[0])
    return Finding(growth < WORDS * 2 / 8, f"{growth:,.0f}", "grows")


FLOAT32 = {"acc_policy": "accurate", "acc_dtype": torch.float32}
OWN = "its own number of chunks"
HEADS: tuple[tuple[str, str, Loss, str], ...] = (
    ("linear_cross_entropy", "seqtile", seqtile_loss, ""),
    ("F.linear_cross_entropy, chunk size chosen", "torch", torch_loss, ""),
    ("the same, accurate, float32", "torch", partial(torch_loss, **FLOAT32), "float32 within a chunk, not between"),
    ("checkpointed chunks", "torch", checkpointed, "a loop by hand"),
    ("untiled", "torch", untiled, "one piece, for comparison"),
    ("TiledFusedLogitsLoss", "deepspeed", deepspeed_tiled_loss, "mean of shards"),
    ("ChunkedLogProbFunction", "trl", trl_loss, "its own tiles of 4,096 tokens"),
    ("fused linear cross-entropy", "liger-kernel", liger_loss, OWN),
    ("the same, accum_dtype float32", "liger-kernel", partial(liger_loss, accum_dtype=torch.float32), OWN),
)


def cases() -> list[Case]:
    all_cases = [
        Case("leak", "layer=True", "seqtile", lambda: leak(tiled_model())),
        Case("leak", "sdpa, position_ids", "transformers", lambda: leak(small_model())),
        Case("window", "layer=True", "seqtile", lambda: window(tiled_model(WINDOW))),
        Case("window", "sdpa", "transformers", lambda: window(small_model(WINDOW))),
        Case("window", "layer=True, packed", "seqtile", lambda: window(tiled_model(WINDOW), packed=True)),
        Case("window", "sdpa, packed", "transformers", lambda: window(small_model(WINDOW), packed=True)),
        Case("leak", "context parallel", "accelerate", not_tried, RING, gpu=True),
        Case("window", "context parallel", "accelerate", not_tried, RING, gpu=True),
        Case("accumulation", "num_items_in_batch", "seqtile", lambda: accumulation(tiled_model(), by_items)),
        Case("accumulation", "num_items_in_batch", "transformers", lambda: accumulation(small_model(), by_items)),
        Case("accumulation", "accelerator.accumulate, mean loss", "accelerate", accelerate_accumulates, GUIDE),
        Case("accumulation", "TiledFusedLogitsLoss / labels", "deepspeed", deepspeed_accumulates, UPSTREAM),
        Case("accumulation", "SFTTrainer", "trl", trl_accumulates),
    ]
    for name, probe in (("head", head), ("memory", memory)):
        for system, package, loss, note in HEADS:
            gpu = package == "liger-kernel"
            all_cases.append(Case(name, system, package, partial(probe, loss, "cuda" if gpu else "cpu"), note, gpu))
    return all_cases
