"""Simulates a training step or an evaluation of a whole model at full size on tensors without data, and counts the live
bytes of a GPU."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from benchmark.known_integers import KnownIntegers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.masking_utils import flash_attention_mask

import seqtile
from seqtile.arch import ARCHS
from seqtile.memory.setup import Setup
from seqtile.memory.simulate import FlashFunction
from seqtile.models.placement import placement_at
from seqtile.offload.checkpointing import Checkpoints, install
from seqtile.offload.store import Copies, Pool, Store
from seqtile.sp.attention import UlyssesAttention, UlyssesFunction
from seqtile.sp.layout import ShardedLayout
from seqtile.unwrapped import unwrapped
from support.measure import LiveBytes

ligers_norm, ligers_rope, ligers_swiglu = (
    pytest.importorskip(f"liger_kernel.transformers.{name}") for name in ("rms_norm", "rope", "swiglu")
)

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class NormFunction(torch.autograd.Function):
    """Liger's RMSNorm, which saves its input."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset, casting_mode, in_place, row_mode):
        ctx.in_place = in_place
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, d_y):
        d_x = d_y.view_as(d_y) if ctx.in_place else torch.empty_like(d_y)
        return d_x, torch.empty_like(ctx.saved_tensors[1]), None, None, None, None, None


class RopeFunction(torch.autograd.Function):
    """Liger's RoPE: in place in both directions."""

    @staticmethod
    def forward(ctx, q, k, *positions):
        return q.view_as(q), k.view_as(k)

    @staticmethod
    def backward(ctx, dq, dk):
        return dq.view_as(dq), dk.view_as(dk), None, None


class SwiGLUFunction(torch.autograd.Function):
    """Liger's SwiGLU: gate and up are saved, and overwritten by their gradients."""

    @staticmethod
    def forward(ctx, gate, up, *multipliers):
        ctx.multipliers = len(multipliers)
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx, d_product):
        return (*ctx.saved_tensors, *(None for _ in range(ctx.multipliers)))


class Simulated(NamedTuple):
    peak: int
    """Bytes on a GPU without weights and optimizer."""
    pinned: int
    """Bytes of host memory."""


class HostMemory(Pool):
    """Its blocks are on the meta device, and are not counted."""

    free = 0

    def take(self, size: int) -> torch.Tensor:
        self.total += max(0, size - self.free)
        self.free = max(0, self.free - size)
        return torch.empty(size, dtype=torch.uint8, device="meta")

    def give(self, memory: torch.Tensor, copied: object = None) -> None:
        self.free += memory.numel()


class NoCopies(Copies):
    """Only allocates."""

    def out(self, tensor: torch.Tensor, block: torch.Tensor) -> None: ...

    def back(self, block: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty(block.shape, dtype=block.dtype), None


class Sharded(LiveBytes):
    """Also counts what FSDP2 frees and allocates by resizing storages."""

    def resizing(self, real: Callable[[torch.Tensor], None], full: bool) -> Callable[[torch.Tensor], None]:
        """Wraps `real`, which resizes a tensor's storage to full or empty, with a count."""

        def resize(tensor: torch.Tensor) -> None:
            real(tensor)
            key, size = tensor.untyped_storage()._cdata, tensor.numel() * tensor.itemsize if full else 0
            if key in self._seen:
                self.live += size - self._seen[key]
                self._seen[key] = size
                self.peak = max(self.peak, self.live)

        return resize


def attention(setup: Setup) -> Callable:
    def whole(module, q, k, v, mask, **kwargs):
        if setup.autocast:  # as Hugging Face's flash_attention_forward does
            q, k, v = (x.to(getattr(torch, setup.dtype)) for x in (q, k, v))
        return FlashFunction.apply(q, k, v), None

    if setup.sequence_parallel == 1 or setup.shared_tokens:
        return whole
    return WithoutScores(seqtile.sp.initialize(setup.sequence_parallel, per_node=setup.nodes.per_node))


class WithoutScores(UlyssesFunction):
    """Like `seqtile.sp.attention.ulysses_attention`, with an attention that allocates no scores."""

    def __init__(self, ctx: seqtile.sp.SequenceParallel):
        super().__init__()
        self.ctx = ctx

    def _steps(self, module, mask, heads, **kwargs) -> UlyssesAttention:
        layout = ShardedLayout(self.ctx, kwargs["position_ids"].shape[1], (), "sdpa")
        return StepsWithoutScores(module, layout, None, {}, *heads)


class StepsWithoutScores(UlyssesAttention):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = self.qkv.heads.rows
        if len(rows) > 1:  # each run of queries gets the keys before it, as by_lengths.py gives them to the kernel
            seen = torch.cat([torch.arange(stop) for _, stop in rows])
            k, v = (x.index_select(2, seen) for x in (k, v))
            times = q.shape[1] // k.shape[1]
            outs = [FlashFunction.apply(q[:, i::times], k, v) for i in range(times)]
            return torch.stack(outs, 3).flatten(2, 3)
        return FlashFunction.apply(q, k, v)

    def agree_on_max(self, size: int) -> int:
        return size


def apply_ligers_mlps(model: nn.Module, modes: ExitStack) -> None:
    """Applied before tiling, as in README: a sequence of one chunk runs Liger's own forward."""
    modes.enter_context(patch.object(ligers_swiglu, "LigerSiLUMulFunction", SwiGLUFunction))
    for module in [module for module in model.modules() if hasattr(module, "gate_proj")]:
        module.forward = MethodType(ligers_swiglu.LigerSwiGLUMLP.forward, module)


def apply_liger(model: nn.Module, modes: ExitStack) -> None:
    """Applies Liger to the untiled parts: Liger's own forwards of norms and RoPE, which seqtile supports, with other
    kernels."""
    in_place = not ARCHS[model.config.model_type].norm_after  # else Liger's norm must not overwrite its gradient
    modes.enter_context(patch.object(ligers_norm, "LigerRMSNormFunction", NormFunction))
    modes.enter_context(patch.object(ligers_rope, "dispatch", lambda _, *tensors: RopeFunction.apply(*tensors[:4])))
    modeling = sys.modules[type(model).__module__]
    modes.enter_context(patch.object(modeling, "apply_rotary_pos_emb", ligers_rope.liger_rotary_pos_emb))
    for module in [module for module in model.modules() if placement_at(module) is None]:
        if type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
            vars(module).update(
                variance_epsilon=1e-6, offset=0.0, casting_mode="llama", in_place=in_place, row_mode=None
            )
            module.forward = MethodType(ligers_norm.LigerRMSNorm.forward, module)
        elif hasattr(module, "gate_proj"):
            module.forward = lambda x, module=module: module.down_proj(
                SwiGLUFunction.apply(module.gate_proj(x), module.up_proj(x))
            )
        elif hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            module.forward = lambda x, module=module: module.down_proj(
                SwiGLUFunction.apply(*module.gate_up_proj(x).chunk(2, dim=-1))
            )


def with_4_bits(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces the projections by bitsandbytes' layers, on the meta device."""
    from bitsandbytes.nn import Linear4bit

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in LINEAR:
                bias = child.bias is not None
                options = {"compute_dtype": dtype, "quant_type": "nf4", "compress_statistics": True}
                layer = Linear4bit(child.in_features, child.out_features, bias, **options).to(dtype)
                setattr(module, name, layer.requires_grad_(False))
    model.is_loaded_in_4bit = True  # PEFT reads it


def quantise(model: nn.Module) -> None:
    """Quantizes their weights as a GPU would."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False  # in an evaluation it would pack the weights for a CPU
            weight = module.weight
            blocks = weight.numel() // 64
            scales = QuantState(
                torch.empty(-(-blocks // 256)), code=torch.empty(256), blocksize=256, dtype=torch.float32
            )
            kind = {"code": torch.empty(16), "blocksize": 64, "quant_type": "nf4", "dtype": weight.dtype}
            of_blocks = torch.empty(blocks, dtype=torch.uint8)
            state = QuantState(of_blocks, weight.shape, **kind, offset=torch.empty(()), state2=scales)
            codes = torch.empty(weight.numel() // 2, 1, dtype=torch.uint8)
            module.weight = nn.Parameter(codes, requires_grad=False)
            module.weight.quant_state = state


def build(config: PreTrainedConfig, setup: Setup, modes: ExitStack, host: HostMemory, rank: int) -> nn.Module:
    """Builds the model as it would be on one of the GPUs of `setup`."""
    if setup.gpus > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=setup.gpus)
        modes.callback(dist.destroy_process_group)
        mesh = init_device_mesh("cpu", (setup.gpus,))
    name = "no_scores_by_lengths" if setup.shared_tokens else "no_scores"
    AttentionInterface.register(name, attention(setup))
    if setup.shared_tokens:  # an attention that is called as FlashAttention is
        AttentionMaskInterface.register(name, flash_attention_mask)
    name = setup.attention if setup.attention in ("sdpa", "eager") else name  # Hugging Face's own, with its masks
    size, per_node = setup.sequence_parallel, setup.nodes.per_node
    sp_group = seqtile.sp.initialize(size, per_node=per_node) if setup.gpus > 1 and setup.shared_tokens else None
    with torch.device("meta"):
        model = causal_lm = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=name,
            dtype=torch.float32 if setup.autocast else getattr(torch, setup.dtype),
        )
        if setup.load_in_4bit:
            with_4_bits(model, model.dtype)
        if setup.lora_rank is not None:
            model = get_peft_model(model, LoraConfig(r=setup.lora_rank, target_modules=LINEAR))
            causal_lm.enable_input_require_grads()
    known = setup.shared_tokens or name == setup.attention  # Hugging Face's masks depend on positions
    modes.enter_context(KnownIntegers() if known else FakeTensorMode(allow_non_fake_inputs=True))
    model.train().to_empty(device="cpu")  # tensors without data, of a FakeTensorMode
    model.tie_weights()
    if setup.load_in_4bit:
        quantise(model)
    tiled = {part: part in setup.tiles for part in ("mlp", "loss", "layer")}
    if setup.liger and "layer" in setup.tiles:
        apply_ligers_mlps(causal_lm, modes)
    if any(tiled.values()):
        seqtile.apply_seqtile(model, **tiled, head_groups=setup.head_groups, chunk_tokens=setup.chunk_tokens)
    if setup.liger:
        apply_liger(causal_lm, modes)
    if setup.shared_tokens:
        if setup.sequence_parallel > 1:
            seqtile.sp.apply_ulysses(model, sp_group, batches="whole")
        seqtile.share_prefixes(model)
    causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    if "activations" in setup.offload:
        install(Checkpoints(Store(host, NoCopies(torch.device("cpu")))), causal_lm, setup.keep_last)
    if setup.gpus > 1 and setup.zero_stage == 3:
        for layer in causal_lm.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def sharing_a_prefix(rows: int, seq_len: int, shared_tokens: int) -> dict[str, torch.Tensor]:
    """Returns sequences whose first `shared_tokens` tokens are the same; the other tokens have labels. The ids have
    data, in which `seqtile.share_prefixes` finds the prefix."""
    own = torch.arange(seq_len) >= shared_tokens
    ids = 1 + torch.arange(rows)[:, None] * own
    return {"input_ids": ids, "labels": ids.masked_fill(~own, -100)}


def told_apart(rows: str, count: int, length: int) -> dict[str, torch.Tensor]:
    """Returns the tensor that tells Hugging Face of documents, or of padding: [count, length]."""
    if rows == "packed":
        return {"position_ids": (torch.arange(length) % (length // 3)).expand(count, -1)}
    return {"attention_mask": torch.ones(count, length, dtype=torch.long).tril(length - 9)} if rows == "padded" else {}


def simulate(
    config: PreTrainedConfig, setup: Setup, *, seq_len: int, batch_size: int = 1, rank: int = 0, evaluate: bool = False
) -> "Simulated":
    """Simulates a step (forward, loss and backward): peak bytes, and pinned bytes. Or an evaluation: forward and loss,
    with the cache that the model creates by default."""
    if (setup.gpus > 1 or setup.load_in_4bit) and Version(torch.__version__) < Version("2.11"):
        pytest.skip("torch 2.10 runs neither FSDP2's collectives nor bitsandbytes on tensors without data")
    with ExitStack() as modes:
        host = HostMemory()
        model = build(config, setup, modes, host, rank).train(not evaluate)
        if setup.shared_tokens:
            batch = sharing_a_prefix(batch_size, seq_len, setup.shared_tokens)
        else:
            ids = torch.zeros(batch_size, seq_len // setup.sequence_parallel, dtype=torch.long)
            labels = {"shift_labels": ids, "ignore_index": None} if "loss" in setup.tiles else {"labels": ids}
            batch = {"input_ids": ids} | labels | told_apart(setup.rows, batch_size, seq_len)
        memory = Sharded()
        for name, full in (("alloc_storage", True), ("free_storage", False)):
            modes.enter_context(patch.object(_fsdp_param, name, memory.resizing(getattr(_fsdp_param, name), full)))
        batch |= {} if evaluate and not setup.shared_tokens else {"use_cache": False}
        with memory, torch.set_grad_enabled(not evaluate):
            for _ in range(2 if setup.accumulate and not evaluate else 1):
                with torch.autocast("cpu", getattr(torch, setup.dtype), enabled=setup.autocast):
                    loss = model(**batch).loss
                if not evaluate:
                    loss.backward()
        if setup.shared_tokens:
            saved = (batch_size - 1) * setup.shared_tokens
            assert seqtile.status(unwrapped(model)).prefixes.saved_tokens == saved
    return Simulated(memory.peak, host.total)
