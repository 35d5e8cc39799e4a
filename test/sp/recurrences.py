"""Models with recurrences, convolutions, sinks and latent attention, sharded over ranks by heads, against one process
that runs each document by itself: Hugging Face's own code, without kernels, mixes documents in recurrences."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations import hub_kernels

import seqtile
from seqtile import sp
from seqtile.attention.heads import count, rank_heads, width, within
from seqtile.sp.layout import ShardedLayout
from seqtile.sp.recurrence import Recurrence
from sp.attentions import flex_with_sinks, install
from sp.cases import batch_of_kind
from sp.over_ranks import Traffic, assert_same_gradients, assert_same_step, averaged, by_first_rank, context
from support.assertions import relative_error
from support.measure import LiveBytes
from support.tiny import VOCAB, checkpointing, loss_and_gradients
from support.tiny import build as build_tiny

SEQUENCES = ("plain", "ragged", "packed", "padded")
CHECKPOINTING = (None, False, True)  # reentrant
BASE = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
BASE |= dict(num_key_value_heads=2, head_dim=12, pad_token_id=0)
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = LINEAR | dict(linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=8, linear_value_head_dim=10)
DELTA |= {"linear_conv_kernel_dim": 4}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
MAMBA = dict(mamba_n_heads=6, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2, mamba_d_conv=4, mamba_expand=2)
MAMBA |= {"mamba_chunk_size": 16}
LATENT = dict(q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10, n_group=1, topk_group=1)
MLA = LATENT | dict(kv_lora_rank=8, num_attention_heads=6, num_key_value_heads=6, n_routed_experts=4, head_dim=None)
MLA |= dict(num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1)
KIMI = LINEAR | LATENT | EXPERTS | dict(linear_num_heads=5, linear_head_dim=8, linear_conv_kernel_dim=4)
KIMI |= dict(kv_lora_rank=16, num_key_value_heads=4, num_local_experts=4)
NEMOTRON = dict(mamba_num_heads=6, mamba_head_dim=16, ssm_state_size=8, n_groups=2, conv_kernel=4, chunk_size=16)
NEMOTRON |= {"layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"]}
MAMBA2 = dict(num_heads=6, head_dim=16, state_size=8, n_groups=2, expand=2, chunk_size=16, num_attention_heads=None)
ZAMBA = dict(n_mamba_heads=6, mamba_ngroups=2, mamba_d_state=8, mamba_expand=2, chunk_size=16, num_mem_blocks=1)
ZAMBA |= dict(layers_block_type=["linear_attention", "hybrid"], layer_types=["linear_attention", "hybrid"])
GPT_OSS = dict(num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager", sliding_window=20)
GPT_OSS |= dict(layer_types=["sliding_attention", "full_attention"], num_attention_heads=6, num_key_value_heads=3)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", DELTA | SHARED),
    "qwen3_5": ("qwen3_5_text", DELTA | dict(linear_num_key_heads=4, linear_num_value_heads=4)),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA | SHARED),
    "olmo_hybrid": ("olmo_hybrid", DELTA | {"linear_num_key_heads": 6}),
    "kimi_linear": ("kimi_linear", KIMI),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "mamba2": ("mamba2", MAMBA2 | {"num_key_value_heads": None}),
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1]}),
    "granitemoehybrid": ("granitemoehybrid", MAMBA | LINEAR | dict(num_local_experts=0, shared_intermediate_size=64)),
    "falcon_h1": ("falcon_h1", MAMBA | {"mamba_d_ssm": 96}),
    "zamba2": ("zamba2", ZAMBA | {"num_key_value_heads": 4}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "deepseek_v3": ("deepseek_v3", MLA),
    "glm4_moe_lite": ("glm4_moe_lite", MLA | {"q_lora_rank": 16}),
    "lfm2": ("lfm2", dict(layer_types=["conv", "full_attention"], conv_L_cache=3, block_ff_dim=64)),
}


class Case(NamedTuple):
    family: str
    kind: str
    reentrant: bool | None
    """How layers are checkpointed; None: not at all."""


ALIKE = ("qwen3_5_moe", "bamba", "granitemoehybrid", "falcon_h1", "zamba2", "glm4_moe_lite")
"""Families whose mixers are those of another family; with whole batches every family runs every day."""


def every_day(count: int, case: Case) -> bool:
    """Whether a case runs every day: of families that are alike one, on two ranks; nemotron_h on four, which are more
    than its groups, and on one. Each runs one kind of sequence and one way of checkpointing, in turn."""
    i = list(FAMILIES).index(case.family)
    turn = case.kind == SEQUENCES[(i + count) % 4] and case.reentrant == CHECKPOINTING[(i + count) % 3]
    return turn and case.family not in ALIKE and count in ((1, 4) if case.family == "nemotron_h" else (2,))


REFUSED_OF_OLDEST = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "nemotron_h", "mamba2", "falcon_h1", "lfm2")
"""The families that transformers 5.16 lacks, or whose layers it does not give what `sp` passes: refused there."""


def build(family: str, **changes: Any) -> nn.Module:
    """A small model with larger weights than the usual initialisation, so that no value is tiny; except decay
    parameters."""
    model_type, own = FAMILIES[family]
    fields = {name: value for name, value in (BASE | own | changes).items() if value is not None}
    attention = fields.pop("attn_implementation", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            elif not name.endswith(("A_log", "dt_bias")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


HEADS = ("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads")
HEADS += ("num_heads", "n_mamba_heads")


def at_least_a_head_each(family: str, ranks: int) -> dict[str, int]:
    """Twice as many heads of recurrences for more than four ranks; Mamba's half as wide."""
    if ranks <= 4:
        return {}
    own = FAMILIES[family][1]
    widths = ("mamba_d_head", "mamba_head_dim", *(("head_dim",) if family == "mamba2" else ()))
    return {x: 2 * own[x] for x in HEADS if x in own} | {x: own[x] // 2 for x in widths if x in own}


def documents(batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the documents of a batch, each as its own batch without padding."""
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        if "position_ids" in batch:
            starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        else:
            starts = [0] if "attention_mask" not in batch else [int(batch["attention_mask"][row].argmax())]
        ends = [*starts[1:], len(ids)]
        if "attention_mask" in batch:
            ends = [starts[0] + int(batch["attention_mask"][row].sum())]
        for start, stop in zip(starts, ends, strict=True):
            yield {"input_ids": ids[None, start:stop], "labels": labels[None, start:stop], "use_cache": False}


def one_by_one(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a whole batch, document by document."""
    items, total = (batch["labels"][:, 1:] != -100).sum(), torch.zeros(())
    model.zero_grad()
    for document in documents(batch):
        if (document["labels"][:, 1:] != -100).any():
            loss = model(**document, num_items_in_batch=items).loss
            loss.backward()
            total += loss.detach()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return total, gradients


def compared(
    case: Case, attention: str | None = None, options: dict[str, Any] | None = None, batches: str = "cut"
) -> None:
    """Compares loss, all gradients, and the number of all-to-alls: two per token-mixing module and direction."""
    ctx = context()
    one, batch = build(case.family, **at_least_a_head_each(case.family, ctx.size)), batch_of_kind(case.kind)
    many = copy.deepcopy(one)
    loss, gradients = by_first_rank(one_by_one, one, batch)
    many.config._attn_implementation = attention or one.config._attn_implementation
    sp.apply_ulysses(many, ctx, batches=batches)
    many = copy.deepcopy(many)  # it is sharded as well
    if options:
        seqtile.apply_seqtile(many, chunk_tokens=11, **options, check=False)
    checkpointing(many, case.reentrant)
    with Traffic() as traffic:
        ours = many(**batch).loss if batches == "whole" else sp.reduce_loss(many(**sp.shard(batch, ctx)).loss, ctx)
        forward = len(traffic.sent)
        ours.backward()
    assert relative_error(ours.detach(), loss) <= 1e-5, f"{case}: loss"
    assert_same_gradients(many, gradients, partial(one_by_one, batch=batch), one, str(case))
    mixers = 2 * sum(isinstance(vars(x).get("forward"), Recurrence) or hasattr(x, "is_causal") for x in many.modules())
    assert forward == mixers, f"{case}: {forward} all-to-alls in the forward"
    expected = mixers * (1 if case.reentrant is None else 2)
    if case.family != "zamba2":  # Hugging Face checkpoints a block and the layer inside it
        assert len(traffic.sent) - forward == expected, f"{case}: {len(traffic.sent) - forward} in the backward"
    if ctx.size > 1:
        assert traffic.sent[:2] == [sum(sizes) for sizes in sent_by(case.family, ctx, ours.dtype.itemsize, batch)], case


def sent_by(family: str, ctx: sp.SequenceParallel, itemsize: int, batch: dict) -> list[list[int]]:
    """The bytes that the first layer sends from this rank to each other: the inputs of their heads, and the outputs
    here."""
    heads, groups, a_head, a_group, returned = SENT[family](ctx.size)
    rows, length = batch["input_ids"].shape
    nodes, length = ctx.nodes, -(-length // ctx.size) * ctx.size
    in_nodes = family in OF_ATTENTION and nodes.chooses_in_nodes(heads, groups)
    shares = nodes.heads(heads, groups, length, in_nodes)
    others = [rank for rank in range(ctx.size) if rank != ctx.rank]

    def queries(holder: int, rank: int) -> int:
        """Tokens of the holder whose queries the rank computes."""
        return rows * sum(count(within(shares[rank].rows, *run)) for run in nodes.tokens_of(holder, length))

    a_key = rows * length // ctx.size * a_group
    there = [queries(ctx.rank, to) * width(shares[to].q) * a_head + width(shares[to].kv) * a_key for to in others]
    back = [queries(to, ctx.rank) * width(shares[ctx.rank].q) * returned for to in others]
    return [[itemsize * elements for elements in sizes] for sizes in (there, back)]


OF_ATTENTION = ("gpt_oss", "deepseek_v3", "glm4_moe_lite")  # their first layer


def delta(k_heads: int, v_heads: int, size: int = 1, gate: int = 1) -> tuple[int, int, int, int, int]:
    """v, gate and beta per head, q and k per key head; v."""
    times = 1 if size <= 4 else 2
    return times * v_heads, times * k_heads, 10 + gate + 1, 2 * 8, 10


def mamba(size: int) -> tuple[int, int, int, int, int]:
    """x and dt per head; B and C per group."""
    return (6, 2, 16 + 1, 2 * 8, 16) if size <= 4 else (12, 2, 8 + 1, 2 * 8, 8)


def kimi(size: int) -> tuple[int, int, int, int, int]:
    heads = 5 if size <= 4 else 10
    return heads, heads, 8 + 8 + 1, 2 * 8, 8


def latent(size: int) -> tuple[int, int, int, int, int]:
    """Queries; the latent and the rotary part, to every rank, or keys and values of each head."""
    compressed, by_heads = size * (8 + 4), 6 * (8 + 4 + 10)
    return (6, 1, 12, 8 + 4, 10) if compressed < by_heads else (6, 6, 12, 8 + 4 + 10, 10)


SENT = {  # heads, head chunks, elements per token sent to a head and to a group, elements returned by a head
    "qwen3_next": lambda size: delta(3, 6, size),
    "qwen3_5": lambda size: delta(4, 4, size),
    "qwen3_5_moe": lambda size: delta(3, 6, size),
    "olmo_hybrid": lambda size: delta(6, 6, size),
    "kimi_linear": kimi,
    "gpt_oss": lambda size: (6, 3, 12, 2 * 12, 12),
    "deepseek_v3": latent,
    "glm4_moe_lite": latent,
    "lfm2": lambda size: (48, 48, 1, 0, 1),
} | dict.fromkeys(("nemotron_h", "mamba2", "bamba", "granitemoehybrid", "falcon_h1", "zamba2"), mamba)


def with_sinks(attention: str, kind: str) -> None:
    """Attentions that a CPU lacks, in a model with sinks."""
    install()
    AttentionInterface.register("flex_attention", flex_with_sinks)
    compared(Case("gpt_oss", kind, False), attention)


BALANCED = (("qwen3_moe", {}, False), ("qwen3_moe", {}, True), ("mixtral", {}, False))


def balance(arch: str, shape: dict, tiled: bool, kind: str, batches: str) -> None:
    """The loss that balances experts, over all ranks' tokens except padding, equals that of one process."""
    ctx, one = context(), build_tiny(arch, router_aux_loss_coef=0.1, **shape)
    many, batch = copy.deepcopy(one), batch_of_kind(kind) | {"output_router_logits": True}
    expected = by_first_rank(loss_and_gradients, one, **batch)
    balancing = by_first_rank(lambda: one(**batch).aux_loss.detach())
    sp.apply_ulysses(many, ctx, batches=batches)
    if tiled:
        seqtile.apply_seqtile(many, chunk_tokens=11, check=False)
    output = many(**(batch if batches == "whole" else sp.shard(batch, ctx)))
    ours = output.loss if batches == "whole" else sp.reduce_loss(output.loss, ctx)
    ours.backward()
    assert relative_error(output.aux_loss, balancing) <= 1e-5
    assert_same_step(ours, many, expected)


def memory(family: str) -> None:
    """A rank's allocations, forward and backward of a layer at 4,096 tokens, are its share of one process's."""
    ctx, tokens = context(), 4096
    wide = {"hidden_size": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_num_heads": 4}
    wide |= {"mamba_num_heads": 8, "n_groups": 4, "chunk_size": 128}
    own = {name: value for name, value in wide.items() if name == "hidden_size" or name in FAMILIES[family][1]}
    model = build(family, **own | ({"linear_num_heads": 4} if family == "kimi_linear" else {})).requires_grad_(False)
    layer = next(x for x in model.modules() if type(x).__name__ in MIXERS[family])
    whole = peak_of(layer, torch.randn(1, tokens, 64))
    layer.forward = Recurrence(layer)
    local = tokens // ctx.size
    layout = ShardedLayout(ctx, local, (((0, tokens),),), "sdpa")
    exchanged = 2 * 4 * local * 64 if family == "lfm2" else 0  # inputs and outputs, negligible next to a recurrence
    steps = 10 if exchanged else 1  # gloo's thread sometimes keeps exchanged buffers a moment longer
    ours = min(peak_of(layer, torch.randn(1, local, 64), ulysses_layout=layout) for _ in range(steps))
    assert ours <= 1.05 * whole / ctx.size + exchanged, f"{ours}, of {whole}"


MIXERS = {
    "qwen3_5": "Qwen3_5GatedDeltaNet",
    "kimi_linear": "KimiLinearDeltaAttention",
    "nemotron_h": "NemotronHMamba2Mixer",
    "lfm2": "Lfm2ShortConv",
}


def peak_of(layer: nn.Module, x: torch.Tensor, **options: Any) -> int:
    x.requires_grad_()
    with LiveBytes() as live:
        layer(x, **options).sum().backward()
    return live.peak


def halves() -> None:
    """In bfloat16, decays are sent in float32, and received values equal sent ones."""
    ctx = context()
    one, batch = build("qwen3_next").bfloat16(), batch_of_kind("plain")
    for module in one.modules():
        if hasattr(module, "A_log"):
            module.A_log.data = module.A_log.data.float()
    many = copy.deepcopy(one)
    loss, gradients = by_first_rank(one_by_one, one, batch)
    sp.apply_ulysses(many, ctx)
    with Traffic() as traffic:
        ours = sp.reduce_loss(many(**sp.shard(batch, ctx)).loss, ctx)
        ours.backward()
    assert relative_error(ours.detach(), loss) <= 1e-2
    errors = {name: relative_error(x, gradients[name]) for name, x in averaged(many).items()}
    assert max(errors.values()) <= 0.1, errors
    heads, groups, a_head, a_group, _ = delta(3, 6, gate=2)  # twice as many bytes as other elements
    share = rank_heads(1 - ctx.rank, 2, heads, groups, ((0, 96),))
    local = 48 * 2
    assert traffic.sent[0] == local * (width(share.q) * a_head + width(share.kv) * a_group)


class Kernels:
    """Functions with the signatures of flash-linear-attention's, causal-conv1d's and mamba-ssm's GPU kernels, computed
    by Hugging Face's own code. `asked` counts the calls with document lengths."""

    def __init__(self) -> None:
        self.asked = 0

    def install(self, modeling: Any, patch: pytest.MonkeyPatch) -> None:
        """Replaces a modeling file's functions as Hugging Face does if the packages are installed."""
        for name, package, of_package, function in (
            ("torch_chunk_gated_delta_rule", "fla", "chunk_gated_delta_rule", self.delta_rule),
            ("causal_conv1d_fn", "causal_conv1d", "causal_conv1d_fn", self.convolution),
            ("mamba2_chunk_scan", "mamba_ssm", "mamba_chunk_scan_combined", self.scan),
        ):
            if (own := getattr(modeling, name, None)) is None:
                continue
            plain = inspect.unwrap(own)
            made = ModuleType(package)
            for part in hub_kernels._KERNELS_INTERNAL_PATH_MAPPINGS.get(of_package, "").split("."):
                setattr(made, part or "_", made)
            setattr(made, of_package, function(plain))
            patch.setitem(sys.modules, package, made)
            wrapped = hub_kernels.use_kernel_func_from_hub_with_fallback(of_package, package)(plain)
            patch.setattr(modeling, name, wrapped)

    def delta_rule(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def chunk_gated_delta_rule(
            q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
            use_qk_l2norm_in_kernel=False, cu_seqlens=None,
        ):  # fmt: skip
            kept = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            if cu_seqlens is None:
                return plain(q, k, v, g=g, beta=beta, **kept)
            assert len(q) == 1 and cu_seqlens.dtype == torch.int64 and int(cu_seqlens[-1]) == q.shape[1]
            self.asked += 1
            parts = [[x[:, a:b] for x in (q, k, v, g, beta)] for a, b in pairwise(cu_seqlens.tolist())]
            return torch.cat([plain(*part[:3], g=part[3], beta=part[4], **kept)[0] for part in parts], 1), None

        return chunk_gated_delta_rule

    def convolution(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def causal_conv1d_fn(
            x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, activation=None
        ):
            return plain(x, weight, bias, activation)

        return causal_conv1d_fn

    def scan(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def mamba_chunk_scan_combined(
            x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, dt_softplus=False,
            dt_limit=(0.0, float("inf")), return_final_states=False,
        ):  # fmt: skip
            own = {"chunk_size": chunk_size, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
            return plain(x, dt, A, B, C, **own, dt_limit=dt_limit)

        return mamba_chunk_scan_combined


def kernels(family: str) -> None:
    """Installed kernels are called as their packages define them, and with the lengths of documents."""
    found = Kernels()
    with pytest.MonkeyPatch.context() as patch:
        found.install(sys.modules[type(build(family)).__module__], patch)
        for kind in ("plain", "packed", "padded"):
            compared(Case(family, kind, False))
    told = 0 if family == "nemotron_h" else 2 * 2  # packed and padded, each once and in the recomputation
    assert found.asked == told, found.asked
