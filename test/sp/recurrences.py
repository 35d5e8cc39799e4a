"""Models with recurrences and convolutions, spread over ranks by heads, beside one process."""

import copy
import faulthandler
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from assertions import relative_error
from seqtile import sp
from sp.cases import batch_of_kind
from sp.first_rank import by_first_rank
from tiny import VOCAB, checkpointing

TIME_LIMIT = 120
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "pad_token_id": 0,
}
DELTA = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_conv": 4}
MAMBA |= {"mamba_expand": 2, "mamba_chunk_size": 16}
MLA = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
MLA |= {"num_attention_heads": 6, "num_key_value_heads": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
MLA |= {"topk_group": 1, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": None}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", DELTA | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_5": ("qwen3_5_text", DELTA | {"linear_num_key_heads": 4, "linear_num_value_heads": 4}),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "olmo_hybrid": ("olmo_hybrid", DELTA | {"linear_num_key_heads": 6}),
    "kimi_linear": (
        "kimi_linear",
        {"linear_num_heads": 5, "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "num_experts": 4}
        | {"layer_types": ["linear_attention", "full_attention"], "kv_lora_rank": 16, "q_lora_rank": None, "num_key_value_heads": 4}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
    ),
    "nemotron_h": (
        "nemotron_h",
        {"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4}
        | {"chunk_size": 16, "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1]}),
    "granitemoehybrid": ("granitemoehybrid", MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 64, "layer_types": ["linear_attention", "full_attention"]}),
    "falcon_h1": ("falcon_h1", MAMBA | {"mamba_d_ssm": 96}),
    "zamba2": ("zamba2", MAMBA | {"num_mem_blocks": 1, "layers_block_type": ["linear_attention", "hybrid"], "layer_types": ["linear_attention", "hybrid"], "num_key_value_heads": 4}),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager", "sliding_window": 20}
        | {"layer_types": ["sliding_attention", "full_attention"], "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "deepseek_v3": ("deepseek_v3", MLA),
    "glm4_moe_lite": ("glm4_moe_lite", MLA | {"q_lora_rank": 16}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_ff_dim": 64}),
}


def build(family: str, **changes: Any) -> nn.Module:
    model_type, own = FAMILIES[family]
    fields = {name: value for name, value in (BASE | own | changes).items() if value is not None}
    torch.set_default_dtype(torch.float32)
    implementation = fields.pop("attn_implementation", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), attn_implementation=implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            elif "A_log" not in name and "dt_bias" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def documents(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The documents of a batch, each as a batch of its own, without padding."""
    found = []
    ids, labels = batch["input_ids"], batch["labels"]
    for row in range(len(ids)):
        if "position_ids" in batch:
            starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
            ends = [*starts[1:], ids.shape[1]]
        else:
            mask = batch.get("attention_mask", torch.ones_like(ids))[row].nonzero().flatten()
            starts, ends = [int(mask[0])], [int(mask[-1]) + 1]
        for start, stop in zip(starts, ends, strict=True):
            one = {"input_ids": ids[row : row + 1, start:stop], "labels": labels[row : row + 1, start:stop].clone()}
            found.append(one | {"use_cache": False})
    return found


def one_by_one(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one process that runs each document by itself."""
    items, total = sp.count_items([batch]) if False else (batch["labels"][:, 1:] != -100).sum(), 0.0
    for one in documents(batch):
        if one["input_ids"].shape[1] > 1 and (one["labels"][:, 1:] != -100).any():
            loss = model(**one, num_items_in_batch=items).loss
            loss.backward()
            total = total + loss.detach()
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


class Traffic:
    """The all-to-alls inside, and the bytes that they send to other ranks."""

    def __enter__(self) -> "Traffic":
        self.calls, self.bytes, self.function = 0, 0, dist.all_to_all_single
        dist.all_to_all_single = self.counted
        return self

    def counted(self, received, sent, counts, sent_counts, **options) -> object:
        self.calls += 1
        self.bytes += (sum(sent_counts) - sent_counts[dist.get_rank()]) * sent.itemsize
        return self.function(received, sent, counts, sent_counts, **options)

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self.function


def compared(i: int, family: str, kind: str, ctx: sp.SequenceParallel) -> None:
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
    torch.manual_seed(i)
    one = build(family)
    many = copy.deepcopy(one)
    batch = batch_of_kind(kind)
    loss, gradients = by_first_rank(one_by_one, one, batch)
    sp.apply_ulysses(many, ctx)
    reentrant = (None, False, True)[i % 3]
    checkpointing(many, reentrant)
    with Traffic() as count:
        ours = sp.reduce_loss(many(**sp.shard(batch, ctx)).loss, ctx)
        forward = count.calls
        ours.backward()
    error = relative_error(ours.detach(), loss)
    worst = {}
    for name, parameter in many.named_parameters():
        if name in gradients:
            g = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            g = g.clone(); dist.all_reduce(g); g /= dist.get_world_size()
            worst[name] = relative_error(g, gradients[name])
    bad = sorted(worst.items(), key=lambda x: -x[1])[:3]
    if ctx.rank == 0:
        print(f"{family} {kind} {reentrant}: loss {float(loss):.4f} off {error:.1e}; {bad}; {forward} {count.calls - forward}", flush=True)


def main(*args: str) -> None:
    dist.init_process_group("gloo")
    ctx = sp.initialize(dist.get_world_size())
    import traceback
    for i, family in enumerate(args[0].split(",") if args and args[0] else FAMILIES):
        for j, kind in enumerate(args[1].split(",") if len(args) > 1 else ("plain", "ragged", "packed", "padded")):
            try:
                compared(i + j, family, kind, ctx)
            except Exception:
                if ctx.rank == 0:
                    print(family, kind, "".join(traceback.format_exc().splitlines(True)[-7:]), flush=True)


def balanced(*args: str) -> None:
    dist.init_process_group("gloo")
    ctx = sp.initialize(dist.get_world_size())
    import seqtile
    from tiny import build as build_tiny, loss_and_gradients
    for i, (arch, tiled) in enumerate([("qwen3_moe", False), ("qwen3_moe", True), ("mixtral", False)]):
        for kind in ("plain", "ragged", "packed", "padded"):
            torch.manual_seed(i)
            one = build_tiny(arch, router_aux_loss_coef=0.1)
            many = copy.deepcopy(one)
            batch = batch_of_kind(kind) | {"output_router_logits": True}
            loss, gradients = by_first_rank(loss_and_gradients, one, **batch)
            aux = by_first_rank(lambda: one(**batch).aux_loss.detach())
            sp.apply_ulysses(many, ctx)
            if tiled:
                seqtile.apply_seqtile(many, chunk_tokens=11)
            out = many(**sp.shard(batch, ctx))
            ours = sp.reduce_loss(out.loss, ctx)
            ours.backward()
            worst = {}
            for name, parameter in many.named_parameters():
                g = parameter.grad.clone(); dist.all_reduce(g); g /= dist.get_world_size()
                worst[name] = relative_error(g, gradients[name])
            bad = sorted(worst.items(), key=lambda x: -x[1])[:2]
            if ctx.rank == 0:
                print(arch, tiled, kind, float(aux), float(out.aux_loss), float(relative_error(ours.detach(), loss)), bad, flush=True)
