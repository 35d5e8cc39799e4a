"""Training steps of a rank under every gradient reducer, and refusals."""

import copy
import os
from collections.abc import Callable, Iterator

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

import seqtile
from distributed.worker import ddp, fsdp2, full, zero
from seqtile import sp
from seqtile.models.status import outcome_of
from seqtile.sp.attention import ulysses_attention
from seqtile.sp.layout import ShardedLayout
from sp import recurrences
from sp.over_ranks import by_first_rank, context
from support.assertions import relative_error
from support.tiny import batch_of, build
from support.training import halved

WINDOW = 2  # batches per step
_TINY = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
_SMALL = _TINY | dict(num_key_value_heads=2, intermediate_size=16)
_INDEXED = dict(kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, index_topk=4)
_INDEXED |= dict(index_n_heads=2, index_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2)
_INDEXED = _SMALL | _INDEXED | dict(moe_intermediate_size=8, first_k_dense_replace=1)
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_MINIMAX = _SMALL | _HYBRID | dict(num_local_experts=2, head_dim=8)
_JAMBA = _SMALL | dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_dt_rank=4)
_MAMBA = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1)
_T5 = dict(vocab_size=50, d_model=16, d_ff=16, num_layers=1, num_heads=2)
_ROBERTA = _TINY | dict(intermediate_size=16, is_decoder=True)
NOT_SPREAD: dict[str, tuple[dict, str]] = {  # models that mix tokens in other ways: model type, and the message
    "minimax": (_MINIMAX, "MiniMaxForCausalLM has MiniMaxLightningAttention, whose recurrence is not known"),
    "jamba": (_JAMBA, "JambaForCausalLM has JambaMambaMixer, whose recurrence is not known"),
    "deepseek_v32": (_INDEXED, "DeepseekV32ForCausalLM has indexed_attention"),
    "glm_moe_dsa": (_INDEXED, "GlmMoeDsaForCausalLM has indexed_attention"),
    "mamba": (_MAMBA, "MambaForCausalLM has MambaMixer, whose recurrence is not known"),
    "doge": (_SMALL, "DogeForCausalLM has masks that its layers make"),
    "stablelm": (_SMALL, "StableLmForCausalLM passes no keyword arguments on to its attention"),
    "t5": (_T5, "T5ForConditionalGeneration has an encoder"),
    "bert": (_TINY | {"intermediate_size": 16}, "the attention of BertForMaskedLM is not causal"),
    "roberta": (_ROBERTA, "RobertaForCausalLM makes its own position_ids"),
}
OF_OTHER_CLASSES = {"t5": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, "bert": MODEL_FOR_MASKED_LM_MAPPING}


def hsdp(model: nn.Module) -> tuple[nn.Module, object]:
    """FSDP2 that shards over half of the ranks and replicates over both halves, as over two nodes."""
    shape, names = (2, dist.get_world_size() // 2), ("dp_replicate", "dp_shard")
    return fsdp2(model, mesh=dist.init_device_mesh("cpu", shape, mesh_dim_names=names))


STRATEGIES: dict[str, Callable] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "zero0": zero(0, accumulate=WINDOW),
    "zero1": zero(1, accumulate=WINDOW),
    "zero2": zero(2, accumulate=WINDOW),
    "zero3": zero(3, accumulate=WINDOW),
    "zero3_all_reduce": zero(3, accumulate=WINDOW, reduce_scatter=False),
    "zero3_hpz": zero(3, accumulate=WINDOW, zero_hpz_partition_size=2),  # two ranks have the weights, as a node has
}


QWEN2_MOE = _SMALL | dict(moe_intermediate_size=8, shared_expert_intermediate_size=8, num_experts=2)
QWEN2_MOE |= {"num_experts_per_tok": 1, "use_sliding_window": True, "sliding_window": 8}
QWEN2_MOE |= {"layer_types": ["sliding_attention"] * 2}


def window_of(group: int, step: int, rows: int = 1) -> list[dict[str, torch.Tensor]]:
    """The batches that a data-parallel group accumulates: with different lengths and numbers of labels, one without
    any. If there are several rows, they share a prefix."""
    torch.manual_seed(10 * step + group)
    lengths = (61, 90 + 7 * group)
    batches = [batch_of(rows, length) for length in lengths]
    for batch in batches:
        batch["input_ids"][:, :40] = batch["input_ids"][0, :40].clone()
    batches[0]["labels"][0, : 10 + 30 * group] = -100
    if step == 1 and group == 0:
        batches[1]["labels"][:] = -100
    for batch in batches:
        del batch["attention_mask"]
    return batches


def by_one_process(model: nn.Module, groups: int, step: int, rows: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    """A step over the batches of all groups. Returns the loss (the mean over all of their labels) and the weights."""
    windows = [window_of(group, step, rows) for group in range(groups)]
    items = sum((batch["labels"][:, 1:] != -100).sum() for window in windows for batch in window)
    total = 0.0
    for batch in (batch for window in windows for batch in window):
        loss = model(**batch, num_items_in_batch=items).loss
        loss.backward()
        total += loss.item()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.zero_grad()
    return total, model.state_dict()


def by_many(model: nn.Module, optimizer: object, step: int, ctx: sp.SequenceParallel) -> float:
    shards = [sp.shard(batch, ctx) for batch in window_of(ctx.data_parallel_rank, step)]
    items = sp.count_items(shards, ctx)
    losses = (sp.reduce_loss(model(**shard | {"num_items_in_batch": items}).loss, ctx) for shard in shards)
    return stepped(model, optimizer, losses)


def by_whole_batches(model: nn.Module, optimizer: object, step: int, ctx: sp.SequenceParallel, rows: int = 1) -> float:
    """The same with whole batches: as ranks that share no sequence would train, except for their number."""
    windows = [window_of(group, step, rows) for group in range(ctx.data_parallel_size)]
    items = sum((batch["labels"][:, 1:] != -100).sum() for window in windows for batch in window)
    options = {"num_items_in_batch": items / ctx.data_parallel_size}
    # Times one: DeepSpeed's stage 0 always divides the gradient of the forward's own output.
    losses = (model(**batch, **options).loss * 1 for batch in windows[ctx.data_parallel_rank])
    return stepped(model, optimizer, losses)


def stepped(model: nn.Module, optimizer: object, losses: Iterator[torch.Tensor]) -> float:
    """A step over the losses of a window; each loss is computed after the backward of the previous one. Returns their
    sum, averaged over ranks."""
    total = torch.zeros(())
    for loss in losses:
        total += loss.detach()
        if model is optimizer:  # DeepSpeed's engine
            model.backward(loss, scale_wrt_gas=False)
            model.step()
        else:
            loss.backward()
    if model is not optimizer:
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def evaluated(one: nn.Module, wrapped: nn.Module, length: int) -> None:
    """Between two steps, without changes: the loss and the logits of a whole sequence."""
    batch = batch_of(1, length)
    wrapped.eval()
    with torch.no_grad():
        theirs, ours = one.eval()(**batch), wrapped(**batch)
        counts = batch["attention_mask"].bool()
        assert relative_error(ours.logits[counts], theirs.logits[counts]) <= 1e-4
    assert relative_error(ours.loss, theirs.loss) <= 1e-5
    one.train(), wrapped.train()


def forgotten(wrapped: nn.Module, optimizer: object, ctx: sp.SequenceParallel) -> None:
    """The backward of a partial loss. It comes last, because a reducer need not survive an error."""
    loss = wrapped(**sp.shard(batch_of(1, 40), ctx)).loss
    with pytest.raises(RuntimeError, match=r"expected loss = sp\.reduce_loss\(loss, ctx\)"):
        wrapped.backward(loss, scale_wrt_gas=False) if wrapped is optimizer else loss.backward()


def reducers(
    name: str, strategy: str, options: dict, batches: str = "cut", rows: int = 1, size: int = 2, updates: int = 2
) -> None:
    """Groups of `size` ranks, windows of two batches, tiled: after each step all parameters equal those of one process.
    Whole sequences are evaluated between the first two, and the backward of a partial loss raises.

    With several `rows` prefixes are shared; with "alone" the ranks share no sequences.
    """
    ctx = context(1 if batches == "alone" else size)
    one = halved(build(name, tie_word_embeddings=False) if name == "llama" else recurrences.build(name))
    many = copy.deepcopy(one)
    start = full(one)
    if batches != "alone":
        sp.apply_ulysses(many, ctx, batches=batches)
    if rows > 1:
        seqtile.share_prefixes(many, min_tokens=20)
    seqtile.apply_seqtile(many, chunk_tokens=20, **options)
    wrapped, optimizer = STRATEGIES[strategy](many)
    for step, tolerance in enumerate([1e-5] + [1e-4] * (updates - 1)):  # the second starts with the first one's error
        if step == 1 and batches == "cut":  # each rank evaluates its own sequence, as in README
            sp.restore(many)
            evaluated(one, wrapped, 40 + 9 * dist.get_rank())
            sp.apply_ulysses(many, ctx)
        elif step == 1:
            evaluated(one, wrapped, 40 + 9 * ctx.data_parallel_rank)
        theirs, updated = by_first_rank(by_one_process, one, ctx.data_parallel_size, step, rows)
        one.load_state_dict(updated)
        if batches == "cut":
            ours = by_many(wrapped, optimizer, step, ctx)
        else:
            ours = by_whole_batches(wrapped, optimizer, step, ctx, rows)
            assert rows == 1 or seqtile.status(many).prefixes.saved_tokens == 40 * (rows - 1)
        assert abs(ours - theirs) <= 1e-5 * theirs, f"loss {ours}, expected {theirs}"
        weights = full(many)
        for part, weight in full(one).items():
            moved = weight - start[part]
            factor = (weights[part] - start[part]).norm() / moved.norm()
            error = (weights[part] - weight).norm()
            allowed = tolerance * moved.norm() + 2**-23 * weight.norm()  # each weight is rounded once
            assert error <= allowed, f"of {part} {error:.1e} off {moved.norm():.1e}, x {factor:.3f}"
    assert "up to rounding" in str(outcome_of(many))
    if batches == "cut":
        forgotten(wrapped, optimizer, ctx)
    if wrapped is optimizer:
        wrapped.destroy()


def refusals() -> None:
    """Each on every rank, with nothing changed, and without a rank that waits for another."""
    rank = dist.get_rank()
    for arguments, match in (
        ({"sequence_parallel_size": 3}, "expected a divisor of the 2 ranks"),
        ({"sequence_parallel_size": 0}, "expected a divisor of the 2 ranks"),
        ({}, "expected exactly one of"),
        ({"sequence_parallel_size": 2, "group": dist.group.WORLD}, "expected exactly one of"),
    ):
        with pytest.raises(ValueError, match=match):
            sp.initialize(**arguments)
    ctx = sp.initialize(group=dist.group.WORLD)
    assert (ctx.rank, ctx.size, ctx.data_parallel_rank, ctx.data_parallel_size) == (rank, 2, 0, 1)
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "sp"))
    alone = sp.initialize(mesh=mesh["sp"])
    assert (alone.rank, alone.size, alone.data_parallel_rank, alone.data_parallel_size) == (0, 1, rank, 2)
    meshes()

    model, batch = build("llama"), batch_of(1, 60)
    for function in (lambda model: sp.apply_ulysses(model, ctx), sp.restore):
        with pytest.raises(TypeError, match=r"a Hugging Face model, got a DistributedDataParallel; .*module"):
            function(nn.parallel.DistributedDataParallel(build("llama")))
    refused_models(ctx)
    model.config._attn_implementation = "not_registered"
    with pytest.raises(ValueError, match=r"attention is 'not_registered', expected one of eager, .*sdpa"):
        sp.apply_ulysses(model, ctx)
    model.set_attn_implementation("sdpa")
    sp.apply_ulysses(model, ctx)
    sp.apply_ulysses(model, ctx)
    with pytest.raises(ValueError, match="over other ranks already"):
        sp.apply_ulysses(model, alone)
    shard = sp.shard(dict(batch), ctx)
    for changes, match in (
        ({"use_cache": True}, "use_cache=False"),
        ({"output_router_logits": True}, "expected output_router_logits=False"),
        ({"shift_labels": None}, "labels came without shift_labels, which a shard's loss needs"),
        ({"num_items_in_batch": torch.tensor(30 + rank)}, "batches of different shapes"),
        ({"num_items_in_batch": None}, "labels came without num_items_in_batch"),
        ({"cu_seq_lens_q": torch.tensor([0, 20, 60])}, "cu_seq_lens_q tells other documents"),
        ({"attention_mask": torch.arange(30)[None] != 7}, "attention_mask has a hole"),
        ({"position_ids": torch.arange(60)[None]}, "expected this rank's shard of it"),
        ({"attention_mask": batch["attention_mask"]}, "expected this rank's shard of it"),
        ({"attention_mask": {"full_attention": None}}, "attention_mask is a dict"),
    ):
        with pytest.raises(ValueError, match=match):
            model(**shard | changes)
    tensors = {name: value for name, value in shard.items() if isinstance(value, torch.Tensor)}
    unequal = {name: value[:, : 20 + rank] if value.ndim == 2 else value for name, value in tensors.items()}
    with pytest.raises(ValueError, match="batches of different shapes"):
        model(**unequal, use_cache=False)
    with pytest.raises(ValueError, match="the batch has no labels"):
        sp.reduce_loss(None, ctx)
    with pytest.raises(TypeError, match="expected a dict of tensors as batch, got a tuple"):
        sp.shard((batch["input_ids"],), ctx)
    with pytest.raises(ValueError, match="before generating"):
        model.generate(batch["input_ids"], max_new_tokens=3)
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    layout = ShardedLayout(ctx, 30, (((0, 60),),), "sdpa")
    for changes, match in (
        ({"is_causal": False}, "not causal"),
        ({"s_aux": torch.ones(2)}, "sdpa has no sinks"),
        ({"anything": torch.ones(2)}, "attention with anything"),
        ({"softcap": 3.0}, "no soft cap"),
        ({"attention_mask": torch.ones(1, 1, 30, 30)}, "a mask of its layer's own"),
        ({"ulysses_layout": None}, "no layout came with the tokens"),
    ):
        with pytest.raises(ValueError, match=match):
            ulysses_attention(model, q, k, v, **{"attention_mask": None, "ulysses_layout": layout} | changes)
    loss = model(**shard).loss
    assert loss.isfinite()
    assert model(**shard, cu_seq_lens_q=torch.tensor([0, 60])).loss.equal(loss)
    attend, model.model.layers[1].self_attn.forward = model.model.layers[1].self_attn.forward, keep
    with pytest.raises(ValueError, match="1 of 2 layers attended over the whole sequence"):
        model(**shard)
    model.model.layers[1].self_attn.forward = attend
    qwen2_moe = Qwen2MoeForCausalLM(Qwen2MoeConfig(**QWEN2_MOE))
    sp.apply_ulysses(qwen2_moe, ctx)
    with pytest.raises(ValueError, match="a window of 8 is not passed on to attention by this model"):
        qwen2_moe(input_ids=shard["input_ids"] % 50, position_ids=shard["position_ids"], use_cache=False)
    refused_recurrences(ctx)
    copied = copy.deepcopy(model)
    assert copied(**shard).loss.equal(loss)
    sp.restore(copied)
    assert copied.config._attn_implementation == "sdpa" and model(**shard).loss.equal(loss)
    assert copied(**batch).loss.isfinite(), "whole again"
    sp.restore(model)
    assert model.config._attn_implementation == "sdpa" and model.generate(batch["input_ids"], max_new_tokens=3).numel()


def meshes() -> None:
    """Which ranks share a sequence, and which draw other samples, by the names of a mesh's axes."""
    rank = dist.get_rank()
    for names, shape, part, expected in (
        (("tp", "sp"), (2, 1), "sp", (0, 1, 0, 1)),
        (("pp", "dp_replicate", "cp"), (2, 1, 1), "cp", (0, 1, 0, 1)),
        (("tp", "sp"), (1, 2), "sp", (rank, 2, 0, 1)),
        (("dp_replicate", "dp_shard", "sp", "tp"), (1, 2, 1, 1), "sp", (0, 1, rank, 2)),
        (("cp",), (2,), "cp", (rank, 2, 0, 1)),
    ):
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        ctx = sp.initialize(mesh=mesh[part])
        assert (ctx.rank, ctx.size, ctx.data_parallel_rank, ctx.data_parallel_size) == expected, names
        labels = torch.tensor([[1, 2, -100]])
        assert sp.count_items([{"shift_labels": labels}], ctx) == 2 * ctx.size
    for names, part in (
        (("replicas", "sp"), "sp"),
        (("dp", "tp"), "tp"),
        (("cp", "sp"), "sp"),
        (("dp", "ranks"), "ranks"),
    ):
        mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
        with pytest.raises(ValueError, match=rf"got '{part}' of {', '.join(names)}; name the axes"):
            sp.initialize(mesh=mesh[part])
    unnamed = sp.initialize(mesh=dist.init_device_mesh("cpu", (2,)))
    assert (unnamed.size, unnamed.data_parallel_size) == (2, 1)


def another_attention() -> None:
    """One chosen with set_attn_implementation after `apply_ulysses` computes the next forward, and stays after
    `restore`. sdpa and eager attention give padding other values, which these labels read."""
    ctx, model, batch = context(), build("mistral", sliding_window=20), batch_of(2, 60)
    place = torch.arange(60)
    batch["attention_mask"] = ((place >= torch.tensor([[0], [7]])) & (place < torch.tensor([[60], [31]]))).long()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for batches in ("cut", "whole"):
        ours = copy.deepcopy(model)
        sp.apply_ulysses(ours, ctx, batches=batches)
        for name in ("eager", "sdpa", "sdpa", "eager"):
            expected = copy.deepcopy(model)
            expected.set_attn_implementation(name)
            (ours.model if batches == "whole" else ours).set_attn_implementation(name)
            for _ in range(2):
                loss = ours(**batch if batches == "whole" else sp.shard(batch, ctx)).loss
                loss = sp.reduce_loss(loss, ctx) if batches == "cut" else loss
                assert relative_error(loss.detach(), expected(**batch).loss.detach()) <= 1e-5, (batches, name)
        ours.set_attn_implementation("sdpa")
        sp.restore(ours)
        assert ours.config._attn_implementation == "sdpa"


def refused_models(ctx: sp.SequenceParallel, match: str = "", **options: object) -> None:
    """Models that mix tokens in other ways, by name or with the message `match`, and prompt tuning; nothing changes."""
    for model_type, (fields, named) in NOT_SPREAD.items():
        config = CONFIG_MAPPING[model_type](**fields)
        other = OF_OTHER_CLASSES.get(model_type, MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)](config)
        before = other.config._attn_implementation
        with pytest.raises(ValueError, match=match or named):
            sp.apply_ulysses(other, ctx, **options)
        assert other.config._attn_implementation == before
    prompted = peft.get_peft_model(build("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="puts tokens before a sequence"):
        sp.apply_ulysses(prompted, ctx, **options)


def refused_recurrences(ctx: sp.SequenceParallel) -> None:
    """Models with known recurrences: fewer heads than ranks, unknown functions, no layout."""
    shard = sp.shard(batch_of(1, 60), ctx)
    del shard["attention_mask"]
    one_head = recurrences.build("qwen3_5", linear_num_key_heads=1, linear_num_value_heads=1)
    sp.apply_ulysses(one_head, ctx)
    with pytest.raises(ValueError, match="Qwen3_5GatedDeltaNet has 1 heads, expected at least one for each of 2 ranks"):
        one_head(**shard)
    model = recurrences.build("qwen3_5")
    sp.apply_ulysses(model, ctx)
    layer, x = model.model.layers[0].linear_attn, torch.randn(1, 30, 48)
    with pytest.raises(ValueError, match="no layout came with the tokens of Qwen3_5GatedDeltaNet"):
        layer(x)
    recurrence, layout = layer.forward, ShardedLayout(ctx, 30, (((0, 60),),), "sdpa")
    convolve = recurrence._forward.__globals__["causal_conv1d_fn"]
    recurrence._forward.__globals__["causal_conv1d_fn"] = lambda *args, **kwargs: 2 * convolve(*args, **kwargs)
    with pytest.raises(ValueError, match="Qwen3_5GatedDeltaNet changes its convolution's output before its recurrence"):
        layer(x, ulysses_layout=layout)
    sp.restore(model)
    assert "forward" not in vars(layer) and model(**batch_of(1, 20)).loss.isfinite()
    mixed = recurrences.build("qwen3_5", linear_num_key_heads=1, linear_num_value_heads=2)
    for layer in (layer.linear_attn for layer in mixed.model.layers if hasattr(layer, "linear_attn")):
        layer.in_proj_b.register_forward_hook(lambda module, args, output: output.bfloat16())
    sp.apply_ulysses(mixed, ctx)
    # Both ranks read the queries; their gradients could not be added in bfloat16, which the forward already knows.
    with pytest.raises(ValueError, match="heads that ranks share are in another dtype than the rest"):
        mixed(**shard)
    balanced = build("qwen3_moe")
    sp.apply_ulysses(balanced, ctx)
    with pytest.raises(ValueError, match="expected return_dict=True"):
        balanced(**shard, output_router_logits=True, return_dict=False)


def keep(hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
    """The output shape of an attention that does not use Hugging Face's interface."""
    return hidden_states, None


def death() -> None:
    """A step of all ranks, then one without rank 1."""
    ctx, model = context(), build("llama")
    sp.apply_ulysses(model, ctx)
    for step in range(2):
        if step == 1 and ctx.rank == 1:
            os._exit(7)
        sp.reduce_loss(model(**sp.shard(batch_of(1, 60), ctx)).loss, ctx).backward()
