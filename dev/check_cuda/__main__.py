"""Runs the CUDA branch on fake CUDA tensors, with a torch built for CUDA and no GPU: `make check-cuda`.

Every operation is checked for what cuBLAS and torch's attention kernels refuse or copy, and for what makes the host
wait; every kernel of ours is bound, specialised and compiled for sm_90 as it is launched. First, calls that break each
rule must be reported. Ends with 1 if anything is wrong.

A case's line also names the kernels that computed attention, and after "sdpa" those that torch could choose for its
calls of `scaled_dot_product_attention`, its choice first.
"""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "test")]

import torch  # noqa: E402
from dev.check_cuda.engine import backward, grad  # noqa: E402
from dev.check_cuda.rules import CudaRules, can_use_efficient_attention, can_use_flash_attention  # noqa: E402
from dev.check_cuda.violations import unreported, violations  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.attention import SDPBackend, bias, sdpa_kernel  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils  # noqa: E402

import seqtile  # noqa: E402
from kernels.ahead import launches  # noqa: E402
from seqtile.attention.backends import attend  # noqa: E402
from seqtile.attention.heads import Rows, count, rank_heads, width  # noqa: E402
from seqtile.attention.layout import Layout  # noqa: E402
from seqtile.attention.local import LocalAttention  # noqa: E402
from seqtile.attention.torch_varlen import reason_against, register  # noqa: E402
from seqtile.kernels import dispatch  # noqa: E402
from seqtile.ops.linear import LowRank  # noqa: E402
from seqtile.ops.weight_grads import WeightGrad  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"  # "cpu" where a case is tried out without a torch for CUDA
TOKENS = 9000  # three tiles, the last ragged


def pretended(rules: CudaRules) -> ExitStack:
    """A GPU, as far as torch asks for one before a kernel runs."""
    properties = SimpleNamespace(multi_processor_count=132, name="a fake H100", major=9, minor=0)
    stack = ExitStack()
    for target, name, value in (
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "current_device", lambda: 0),
        (torch._C, "_cuda_getDevice", lambda: 0),
        (torch.cuda, "device_of", lambda tensor: nullcontext()),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "is_bf16_supported", lambda *args, **options: True),
        (torch.cuda, "get_rng_state", lambda *args, **options: torch.zeros(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda *args, **options: None),
        (torch.amp.autocast_mode, "amp_definitely_not_available", lambda: False),
        (fake_tensor, "init_gpu_context", lambda device: None),
        (FakeTensorMode, "avoid_device_init", True),
        (torch.nn.functional, "scaled_dot_product_attention", rules.attend),
        (bias.CausalBias, "__new__", rules.causal_bias),
        (bias, "can_use_flash_attention", can_use_flash_attention),
        (bias, "can_use_efficient_attention", can_use_efficient_attention),
        (masking_utils, "find_packed_sequence_indices", lambda position_ids: None),  # reads them: here is one document
        (torch.autograd, "grad", grad),
        (dispatch, "FakeTensor", ()),  # a simulation would not launch them
    ):
        stack.enter_context(patch.object(target, name, value, create=True))
    return stack


def cuda(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=grad)


def autocast(dtype: torch.dtype | None) -> torch.autocast | nullcontext:
    return nullcontext() if dtype is None else torch.autocast(DEVICE, dtype)


def loss(
    dtype: torch.dtype = BF16,
    of_weight: torch.dtype | None = None,
    cast: torch.dtype | None = None,
    frozen: str = "",
    tokens: int = TOKENS,
    vocab: int = 32_000,
    bias: bool = False,
    class_weight: bool = False,
    **options: object,
) -> Callable[[], None]:
    def run() -> None:
        hidden = cuda(tokens, 512, dtype=dtype, grad=frozen != "hidden")
        weight = cuda(vocab, 512, dtype=of_weight or dtype, grad=frozen != "weight")
        given = dict(options)
        if bias:
            given["bias"] = cuda(vocab, dtype=of_weight or dtype)
        if class_weight:
            given["class_weight"] = torch.rand(vocab, device=DEVICE)
        target = torch.zeros(tokens, device=DEVICE, dtype=torch.int64)
        with autocast(cast):
            result = seqtile.linear_cross_entropy(hidden, weight, target, chunk_tokens=4096, **given)
        backward(result[0] if isinstance(result, tuple) else result)
        for parameter in (hidden, weight):
            assert (parameter.grad is None) != parameter.requires_grad
            assert parameter.grad is None or parameter.grad.dtype == parameter.dtype

    return run


def mlp(
    dtype: torch.dtype = BF16,
    cast: torch.dtype | None = None,
    *,
    fused: bool = False,
    rank: int | None = None,
    bias: bool = False,
) -> Callable[[], None]:
    def run() -> None:
        size, width = 512, 1536
        x = cuda(1, TOKENS, size, dtype=dtype)
        shapes = {"gate": (width, size), "up": (width, size), "down": (size, width)}
        options = {f"{name}_bias": cuda(shape[0], dtype=dtype) for name, shape in shapes.items() if bias}
        if rank is not None:
            options |= {
                f"{name}_lora": LowRank(cuda(rank, shape[1], dtype=dtype), cuda(shape[0], rank, dtype=dtype), 2.0)
                for name, shape in shapes.items()
            }
        weights = [cuda(*shape, dtype=dtype) for shape in shapes.values()]
        if fused:
            weights = [cuda(2 * width, size, dtype=dtype), None, weights[2]]
        with autocast(cast):
            y = seqtile.gated_mlp(x, *weights, chunk_tokens=4096, **options)
        backward(y)
        assert all(weight is None or weight.grad is not None for weight in (x, *weights))

    return run


def model(
    arch: str = "llama", *, tokens: int = TOKENS, checkpointing: bool = False, cudnn: bool = True, **options: object
) -> Callable[[], None]:
    def run() -> None:
        config = AutoConfig.for_model(
            arch,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=2,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=128_256,
            max_position_embeddings=tokens,
        )
        with torch.device(DEVICE):
            made = AutoModelForCausalLM.from_config(config, dtype=BF16, attn_implementation="sdpa").train()
        seqtile.apply_seqtile(made, **options)
        if checkpointing:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=DEVICE)
        with nullcontext() if cudnn else sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            backward(made(input_ids=ids, labels=ids, use_cache=False).loss)
        missing = [name for name, parameter in made.named_parameters() if parameter.grad is None]
        assert not missing, missing[:5]

    return run


def sums(rank: int) -> Callable[[], None]:
    """The sums of a LoRA's gradients, one chunk's, which overwrites what was there, and another's, which is added."""

    def run() -> None:
        for shape in ((rank, 512), (512, rank)):
            total = WeightGrad(cuda(*shape))
            for _ in range(2):
                total.add(cuda(TOKENS, shape[0]), cuda(TOKENS, shape[1]))
            assert total.result().shape == shape

    return run


def sp(
    documents: Rows,
    parents: tuple[int | None, ...] = (),
    *,
    rank: int = 0,
    ranks: int = 1,
    heads: tuple[int, int] = (16, 4),
    window: int | None = None,
    dtype: torch.dtype = BF16,
    kernel: Callable[[], str] = lambda: "sdpa",
    widths: tuple[int, int] = (128, 128),
    sinks: bool = False,
) -> Callable[[], None]:
    """The attention of one rank, for its heads and queries of a row of documents. `heads`: of queries, and of keys.
    `widths`: of queries and keys, and of values."""

    def run() -> None:
        length = documents[-1][1]
        layout = Layout(length, (documents,), kernel())
        layout.parents = parents
        mine = rank_heads(rank, ranks, *heads, ((0, length),))
        module = SimpleNamespace(config=SimpleNamespace(), training=True)
        options = {"scaling": 0.1, "dropout": 0.0} | ({"s_aux": cuda(width(mine.q), dtype=dtype)} if sinks else {})
        attention = LocalAttention(module, layout, mine, window, options)
        sizes = ((count(mine.rows), width(mine.q)), (length, width(mine.kv)), (length, width(mine.kv)))
        each = zip(sizes, (widths[0], *widths), strict=True)
        qkv = [cuda(1, *size, wide, dtype=dtype) for size, wide in each]  # as they come from the all-to-all
        out = attend(attention, *(x.transpose(1, 2) for x in qkv))
        assert out.shape == (*qkv[0].shape[:3], widths[1])
        backward(out)
        assert all(x.grad is not None for x in (*qkv, *([options["s_aux"]] if sinks else [])))

    return run


def documents_of_torch(
    documents: Rows, parents: tuple[int | None, ...] = (), heads: tuple[int, int] = (16, 4), **options: object
) -> Callable[[], None]:
    """The same by torch's kernel for documents."""

    def run() -> None:
        q, v = (cuda(1, 1, 1, wide, dtype=options.get("dtype", BF16)) for wide in options.get("widths", (128, 128)))
        assert reason_against(q, v, {}) is None
        sp(documents, parents, heads=heads, kernel=register, **options)()

    return run


CASES: dict[str, Callable[[], None]] = {
    "loss": loss(),
    "loss, no token ignored": loss(ignore_index=None),
    "loss, float16": loss(FP16),
    "loss, float32": loss(FP32),
    "loss, of one tile": loss(tokens=3000),
    "loss, of one tile, float32 weight": loss(tokens=3000, of_weight=FP32, cast=BF16),
    "loss, odd vocabulary": loss(vocab=32_001),
    "loss, reduction none": loss(reduction="none"),
    "loss, bias and class weights": loss(bias=True, class_weight=True),
    "loss, smoothing and soft cap": loss(label_smoothing=0.1, softcap=30.0),
    "loss, metrics": loss(return_metrics=True),
    "loss, autocast": loss(FP32, cast=BF16),
    "loss, autocast, bias": loss(BF16, FP32, cast=BF16, bias=True),
    "loss, sums in its own dtype": loss(accumulate_dtype=None),
    "loss, frozen weight": loss(frozen="weight"),
    "loss, frozen hidden": loss(frozen="hidden"),
    "loss, number of items": loss(num_items=37),
    "mlp": mlp(),
    "mlp, float32": mlp(FP32),
    "mlp, autocast": mlp(FP32, BF16),
    "mlp, gate and up in one": mlp(fused=True),
    "mlp, lora": mlp(rank=8),
    "mlp, lora of rank 1": mlp(rank=1),
    "sums of a lora of rank 1": sums(1),
    "mlp, autocast, lora, biases": mlp(FP32, BF16, rank=8, bias=True),
    "model": model(),
    "model, layer": model(layer=True),
    "model, layer, groups": model(layer=True, head_groups="auto"),
    "qwen3, layer, groups": model("qwen3", layer=True, head_groups="auto"),
    "model, layer, checkpointing": model(layer=True, checkpointing=True),
    "model, layer, groups, checkpointing": model(layer=True, head_groups="auto", checkpointing=True),
    "model, layer, groups, without cuDNN": model(layer=True, head_groups="auto", cudnn=False),
    "model, layer, groups, 1M tokens": model(layer=True, head_groups="auto", tokens=1_000_000),
    "sp, a document": sp(((0, 8192),)),
    "sp, half a document's queries": sp(((0, 8192),), rank=1, ranks=4, heads=(2, 2)),
    "sp, completions of a prompt": sp(((0, 4000), (4000, 5001), (5001, 6000), (6000, 8192)), (None, 0, 0, 2)),
    "sp, completions of a prompt, float32": sp(((0, 4000), (4000, 8192)), (None, 0), heads=(4, 4), dtype=FP32),
    "sp, documents of a few lengths": sp(((0, 1000), (1000, 2010), (2010, 4000))),
    "sp, documents of many lengths": sp(
        ((0, 500), (500, 1300), (1300, 2500), (2500, 4400), (4400, 8192), (8192, 16000))
    ),
    "sp, 1M tokens over more ranks than heads": sp(((0, 1_000_000),), rank=1, ranks=16, heads=(8, 8)),
    "sp, a window": sp(((0, 5000), (5000, 8192)), window=1024),
    "documents, torch's kernel": documents_of_torch(((0, 500), (500, 1300), (1300, 4400), (4400, 8192))),
    "documents, window, sinks, float16": documents_of_torch(
        ((0, 5000), (5000, 8192)), window=128, sinks=True, dtype=FP16
    ),
    "documents, padding between": documents_of_torch(((3, 5000), (6000, 8000)), window=4000),
    "documents, latent attention": documents_of_torch(((0, 5000), (5000, 8192)), heads=(8, 8), widths=(192, 128)),
    "documents, odd widths": documents_of_torch(((0, 5000), (5000, 8192)), widths=(60, 60)),
    "documents, completions of a prompt": documents_of_torch(((0, 4000), (4000, 5001), (5001, 8192)), (None, 0, 0)),
    "documents, half their queries": documents_of_torch(((0, 8192),), rank=1, ranks=4, heads=(2, 2)),
}


def main() -> int:
    with pretended(CudaRules()), FakeTensorMode(allow_non_fake_inputs=True):
        seen, missed = len(violations(DEVICE)), unreported(DEVICE)
    print(f"{seen} calls that break a rule, {len(missed)} not reported as such {missed or ''}")
    failed, launched = len(missed), Counter()
    for name, run in CASES.items():
        rules = CudaRules()
        with (
            pretended(rules),
            FakeTensorMode(allow_non_fake_inputs=True),
            launches("sm_90") as kernels,
            rules,
        ):
            try:
                run()
                why = ""
            except Exception as error:
                why = f"{type(error).__name__}: {str(error)[:300]}"
        seqtile.restore()
        wrong = why or rules.wrong()
        names = Counter(kernel.name for kernel in kernels)
        attention = ", ".join(f"{kernel} {times}" for kernel, times in rules.served.items())
        attention = attention and f"; attention by {attention} (sdpa: {', '.join(map('/'.join, rules.able))})"
        print(f"{name:40} {wrong or 'right'}; {len(kernels)} launches of {len(names)} kernels{attention}", flush=True)
        failed += bool(wrong)
        launched += names
    print(f"{len(CASES)} cases, {failed - len(missed)} wrong; {launched.total()} launches of {len(launched)} kernels")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
