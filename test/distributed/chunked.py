"""Trains parts that run chunk by chunk on two processes under every gradient reducer. This is the code of one rank.

python -m distributed.chunked, in test/, prints their table in docs/compatibility.md.
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import CONFIG_MAPPING

import seqtile
from distributed.worker import STRATEGIES, base_of, fsdp2, full, train, zero
from seqtile import sp
from seqtile.models.find import experts_in, layers_of
from seqtile.models.model_types import model_classes
from seqtile.proof.small import WORDS, small_model
from support.assertions import assert_each_as_exact, relative_error
from support.tiny import CHUNK, batch_of, build, checkpointing
from support.training import halved, update, with_lora

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LENGTHS = ((101, 9, 63), (60, 160, 30))
CHECKPOINTS = {"none": None, "non-reentrant": False, "reentrant": True}


class Part(NamedTuple):
    made: Callable[[], nn.Module]
    layer: bool = False
    """True if whole layers are tiled."""


def adapted(make: Callable[[], nn.Module], *also: str, **options: object) -> nn.Module:
    model = with_lora(make(), *PROJECTIONS, *also, task_type="CAUSAL_LM", **options)
    model.enable_input_require_grads()
    return model


def plain(arch: str = "llama", **changes: object) -> nn.Module:
    return halved(build(arch, tie_word_embeddings=False, **changes))


def mixture() -> nn.Module:
    """A mixture in which every token goes to all experts, so that rounding changes no route."""
    return plain("mixtral", output_router_logits=True, num_experts_per_tok=4)


def in_4_bits() -> nn.Module:
    from models.test_quantised import KINDS, quantised

    return quantised(plain(intermediate_size=128), **KINDS["nf4"])


def in_8_bits() -> nn.Module:
    from models.test_quantised import in_8_bits

    return in_8_bits(plain(intermediate_size=128))


DROPOUT = {"lora_dropout": 1e-9}  # drops nothing: chunks would draw other masks
PARTS = {
    "mixture": Part(mixture),
    "mixture, whole layers": Part(mixture, layer=True),
    "LoRA with dropout, of the head too": Part(partial(adapted, plain, "lm_head", **DROPOUT)),
    "LoRA with dropout, whole layers": Part(partial(adapted, plain, **DROPOUT), layer=True),
    "LoRA of experts": Part(partial(adapted, mixture, target_parameters=EXPERTS)),
    "DoRA": Part(partial(adapted, plain, use_dora=True)),
    "4-bit LoRA with dropout": Part(partial(adapted, in_4_bits, **DROPOUT)),
    "8-bit LoRA": Part(partial(adapted, in_8_bits)),
    "layer of another shape": Part(partial(plain, "gemma2"), layer=True),
}


def each_part(model: nn.Module, **options: object):
    """FSDP2 that wraps each part of a layer by itself, and also whole layers."""
    from torch.distributed.fsdp import fully_shard

    for layer in layers_of(base_of(model)):
        for name, child in layer.named_children():
            if name in ("mlp", "self_attn"):
                fully_shard(getattr(child, "experts", child), **options)
    return fsdp2(model, **options)


def in_bfloat16(model: nn.Module):
    """FSDP2 with a policy that sets only the parameters' dtype, so that it casts inputs."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return each_part(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def on_cpu(model: nn.Module):
    from torch.distributed.fsdp import CPUOffloadPolicy

    return each_part(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def experts_in_bfloat16(model: nn.Module):
    """FSDP2 in float32, except for the experts, which cast their inputs and cast their outputs back."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for experts in experts_in(base_of(model)):
        fully_shard(experts, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    return fsdp2(model)


NOT_AHEAD = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
REDUCERS = {"DDP": "ddp", "FSDP2": "fsdp2", "FSDP2, bfloat16": "bfloat16", "ZeRO-2": "zero2", "ZeRO-3": "zero3"}
REDUCERS |= {"ZeRO-3, sp": "zero3_sp", "FSDP2, sp": "fsdp2_sp"}
WRAPPED = {
    "parts": each_part,
    "parts, kept": partial(each_part, reshard_after_forward=False),
    "parts, offloaded": on_cpu,
    "bfloat16": in_bfloat16,
    "experts in bfloat16": experts_in_bfloat16,
    "zero3_sp": STRATEGIES["zero3"],
    "fsdp2_sp": fsdp2,
    "zero3, none ahead": zero(3, **dict.fromkeys(NOT_AHEAD, 0)),
}
"""Additions to those of worker.py: FSDP2 of experts, MLPs and attention by themselves; a sequence over both ranks."""
NOT_UNTILED = {
    ("8-bit LoRA", reducer): "'Parameter' object has no attribute 'CB'"
    for reducer in ("FSDP2", "FSDP2, bfloat16", "FSDP2, sp")
}
"""Models that cannot be trained without seqtile either, and their errors."""


def trained(part: Part, reducer: str, reentrant: bool | None, tiled: bool) -> tuple[list[float], dict]:
    """Returns the losses of two steps, and the change of each parameter."""
    STRATEGIES.update(WRAPPED)
    torch.manual_seed(0)
    model = part.made().train()
    base, start = base_of(model), full(model)
    drawn = dist.get_rank()
    if reducer.endswith("_sp"):
        from sp.over_ranks import context

        sp.apply_ulysses(base, context(), batches="whole")
        drawn = 0  # both ranks have the same batch
    if tiled:
        seqtile.apply_seqtile(base, layer=part.layer, chunk_tokens=CHUNK)
        status = seqtile.status(base)
        assert (status.layer or status.mlp).chunked, status
        assert status.loss.chunked == ("lm_head" in getattr(part.made, "args", ())), status
    checkpointing(base, reentrant)
    torch.manual_seed(1 + drawn)
    losses, weights = train(model, reducer, [batch_of(1, length) for length in LENGTHS[drawn]])
    return losses, {name: weights[name] - start[name] for name in weights}


def compare(part: str, reducer: str, checkpoints: str) -> None:
    """A part trains as it does untiled; in bfloat16, as close to float32 as it is untiled."""
    arguments = PARTS[part], REDUCERS.get(reducer, reducer), CHECKPOINTS[checkpoints]
    if (why := NOT_UNTILED.get((part, reducer))) is not None:
        with pytest.raises(Exception, match=re.escape(why)):
            trained(*arguments, tiled=False)
        return
    theirs, their_moves = trained(*arguments, tiled=False)
    ours, our_moves = trained(*arguments, tiled=True)
    if "bfloat16" in reducer:
        _, true_moves = trained(PARTS[part], "fsdp2", None, tiled=False)
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=3e-3, atol=0)
        assert_each_as_exact(our_moves, their_moves, true_moves)
        return
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=0)
    for name, move in their_moves.items():
        error = relative_error(our_moves[name], move)
        assert move.norm() > 0 and error <= 1e-4, f"the update of {name} is {error:.1e} off"


def few_steps(strategy: str, layer: bool, reentrant: bool | None) -> None:
    """A mixture with 3 chunks on one rank and 7 on the other has the untiled losses. It gathers no more bytes, and
    holds no more whole parameters at once."""
    STRATEGIES.update(WRAPPED)
    rank, found = dist.get_rank(), []
    for tiled in (False, True):
        torch.manual_seed(0)
        model = mixture().train()
        if tiled:
            seqtile.apply_seqtile(model, layer=layer, chunk_tokens=10)
        checkpointing(model, reentrant)
        wrapped, optimizer = STRATEGIES[strategy](model)
        losses, gathered, whole = [], [], []
        # declared, because an undeclared hook inside a part leaves the part untiled
        note = seqtile.tokenwise(partial(lambda whole, model, *_: whole.append(whole_parameters(model)), whole, model))
        for module in nn.ModuleList(layers_of(model)).modules():
            module.register_forward_pre_hook(note)
        for step in range(6):
            torch.manual_seed(2 * step + rank)
            with Gathered() as bytes_:
                loss = wrapped(**batch_of(1, (30, 70)[rank])).loss
                losses.append(loss.item())
                update(wrapped, optimizer, loss)
            gathered.append(bytes_.count)
            if step == 3:
                whole.clear()
        if tiled:
            status = seqtile.status(model)
            assert (status.layer or status.mlp).chunked == 2, status
            read_first = [name for name, module in model.named_modules() if vars(module).get("_external_params")]
            assert not read_first, f"weights were gathered one by one, when they were read, inside of {read_first}"
        if wrapped is optimizer:
            wrapped.destroy()
        found.append((losses, gathered[4:], max(whole)))  # before that, ZeRO-3 records the order of modules
    (theirs, their_bytes, their_most), (ours, our_bytes, our_most) = found
    whole, of_a_layer = (sum(p.numel() for p in each.parameters()) for each in (mixture(), layers_of(mixture())[0]))
    but_a_layer = whole - of_a_layer  # one of two layers, and what FSDP2 keeps: embeddings and head
    assert 0 < our_most <= (max(their_most, but_a_layer) if layer else their_most), (our_most, their_most)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=0)
    assert min(their_bytes) > 0 and all(map(int.__le__, our_bytes, their_bytes)), (our_bytes, their_bytes)


def whole_parameters(model: nn.Module) -> int:
    """Returns how many elements of a model's sharded parameters are whole on this rank now."""
    of_deepspeed = [each for each in model.parameters() if hasattr(each, "ds_id") and not each.ds_persist]
    groups = [each._get_fsdp_state()._fsdp_param_group for each in model.modules() if hasattr(each, "_get_fsdp_state")]
    of_fsdp = [each for group in groups if group is not None and group.is_unsharded for each in group.fsdp_params]
    return sum(each.ds_numel for each in of_deepspeed if each.ds_status.name == "AVAILABLE") + sum(
        each._orig_size.numel() for each in of_fsdp
    )


def without_tokens() -> None:
    """Experts that no token of any rank selects get no gradient under DDP, tiled and untiled."""
    found = []
    for tiled in (False, True):
        torch.manual_seed(0)
        model = small_model(model_classes("longcat_flash")[0], CONFIG_MAPPING["longcat_flash"]()).train()
        for experts in experts_in(model):  # all tokens go to an expert that returns its input
            experts.register_forward_pre_hook(
                lambda module, args: (args[0], torch.full_like(args[1], module.num_routed_experts), args[2])
            )
        if tiled:
            seqtile.apply_seqtile(model, chunk_tokens=5)
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        for length in (17, 6):
            ids = torch.randint(5, WORDS - 5, (1, length + dist.get_rank()))
            wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append({name for name, parameter in model.named_parameters() if parameter.grad is None})
        del wrapped
    assert found[0] == found[1] and any(".experts." in name for name in found[1]), found


class Gathered:
    """Counts the bytes that FSDP2 or ZeRO-3 gather inside."""

    def __enter__(self) -> "Gathered":
        self.name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        self.count, self.function = 0, getattr(dist, self.name)
        self.of_deepspeed = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
        if self.of_deepspeed:
            self.their_function = self.of_deepspeed._dist_allgather_fn
            self.of_deepspeed._dist_allgather_fn = self.counted_by_deepspeed
        setattr(dist, self.name, self.counted)
        return self

    def counted(self, *given: torch.Tensor, **named: object) -> object:
        whole = given[0] if given else named.get("output_tensor", named.get("output"))
        self.count += whole.nbytes
        return self.function(*given, **named)

    def counted_by_deepspeed(self, part: torch.Tensor, whole: torch.Tensor, *rest: object) -> object:
        self.count += whole.nbytes
        return self.their_function(part, whole, *rest)

    def __exit__(self, *_: object) -> None:
        setattr(dist, self.name, self.function)
        if self.of_deepspeed:
            self.of_deepspeed._dist_allgather_fn = self.their_function


def table() -> str:
    """Returns the matrix as it is in docs/compatibility.md."""
    rows = [["", *REDUCERS], ["---"] * (1 + len(REDUCERS))]
    for part in PARTS:
        rows.append(
            [part, *("untiled fails" if (part, reducer) in NOT_UNTILED else "as untiled" for reducer in REDUCERS)]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table())
