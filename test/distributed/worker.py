"""One rank of a distributed run: trains untiled and tiled models the same way and compares them."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from transformers import CONFIG_MAPPING

import seqtile
from distributed.cases import FAMILIES, Case
from seqtile.arch import ARCHS
from seqtile.models.find import experts_in, layers_of, mlps_of
from seqtile.models.hooks import unknown_hook
from seqtile.models.model_types import model_classes
from seqtile.models.placement import computed_forward
from seqtile.models.status import outcome_of
from seqtile.proof.small import WORDS, small_model
from support.assertions import relative_error
from support.tiny import (
    apply_liger,
    batch_of,
    build,
    checkpointing,
    config_of,
    interpreted,
    make_interpretable,
    modeling_restored,
)
from support.training import halved, update, with_lora

# Tokens of each rank's sequences, and of a chunk: both ranks tiled, one rank, the other rank. The interpreter is slow.
LENGTHS, CHUNK = (((11, 7), (7, 11)), 7) if interpreted() else (((101, 9, 63), (60, 160, 30)), 50)
LAYERS = 1 if interpreted() else 2
KINDS = {"plain": None, "ckpt": False, "reentrant": True}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def ddp(model: nn.Module):
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, torch.optim.SGD(trainable(model), lr=1.0)


def fsdp2(
    model: nn.Module,
    group: bool = False,
    head: bool = False,
    mlp: bool = False,
    projection: bool = False,
    **options: object,
):
    from torch.distributed.fsdp import fully_shard

    base = base_of(model)
    for layer in layers_of(base):
        if projection:
            fully_shard(layer.mlp.gate_proj, **options)
        if mlp:
            fully_shard(layer.mlp, **options)
        fully_shard(layer, **options)
    if group:
        fully_shard([base.model.norm, base.lm_head], **options)
    if head:
        fully_shard(base.lm_head, **options)
    fully_shard(model, **options)
    return model, torch.optim.SGD(trainable(model), lr=1.0)


def expert_parallel(model: nn.Module):
    """Hugging Face's expert parallelism: each rank holds half of the experts and gets their tokens from a shared
    batch."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    styles = {"": "ep_dispatch_experts", ".gate_up_proj": "grouped_gemm", ".down_proj": "grouped_gemm"}
    layers = range(len(model.model.layers))
    plan = {f"model.layers.{i}.mlp.experts{part}": style for i in layers for part, style in styles.items()}
    apply_expert_parallelism(model, mesh, mesh, plan)
    return model, torch.optim.SGD(trainable(model), lr=1.0)


def mixed(model: nn.Module):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def zero(stage: int, leaf: bool = False, accumulate: int = 1, **sharding: object):
    def wrap(model: nn.Module):
        import deepspeed

        if leaf:
            deepspeed.utils.set_z3_leaf_modules(model, [type(base_of(model).model.layers[0].mlp)])
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulate,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **sharding},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,  # DeepSpeed's default is 1
        }
        optimizer = torch.optim.SGD(trainable(model), lr=1.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine, engine

    return wrap


STRATEGIES = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2_group": partial(fsdp2, group=True),
    "fsdp2_head": partial(fsdp2, head=True),
    "fsdp2_mlp": partial(fsdp2, mlp=True),
    "fsdp2_projection": partial(fsdp2, projection=True),
    "fsdp2_keep": partial(fsdp2, reshard_after_forward=False),
    "fsdp2_mixed": mixed,
    "expert_parallel": expert_parallel,
    "zero1": zero(1),
    "zero2": zero(2),
    "zero2_offload": zero(2, offload_optimizer={"device": "cpu"}),
    "zero3": zero(3),
    "zero3_leaf": zero(3, leaf=True),
    "zero3_offload": zero(3, offload_optimizer={"device": "cpu"}),
    "zero3_evaluated": zero(3),
    "zero3_attentions": zero(3),
}


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the model's trainable parameters, gathered."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if any(hasattr(parameter, "ds_id") for parameter in named.values()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: parameter.detach().clone() for name, parameter in named.items()}
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in named.items()}
    return {name: parameter.detach().clone() for name, parameter in whole.items()}


def train(model: nn.Module, strategy: str, batches: list[dict]) -> tuple[list[float], dict[str, torch.Tensor]]:
    wrapped, optimizer = STRATEGIES[strategy](model)
    losses = []
    for batch in batches:
        if strategy in ("zero3_evaluated", "zero3_attentions"):  # also before the first step
            model.eval()
            asked = {"output_attentions": True} if strategy == "zero3_attentions" else {}
            with torch.no_grad():
                losses.append(wrapped(**batch, **asked).loss.item())
            model.train()
        loss = wrapped(**batch).loss
        losses.append(loss.item())
        update(wrapped, optimizer, loss)
    inside = list(model.modules())[1:]  # DeepSpeed's engine has hooks of its own on the model
    assert not any(map(unknown_hook, inside)), "a hook of the wrapper is not known"
    weights = full(model)
    held = getattr(base_of(model), "_external_params", None)
    assert not held, "ZeRO-3 gathers for the whole step what only a module inside needs"
    if wrapped is optimizer:
        wrapped.destroy()
    return losses, weights


def made(case: Case) -> nn.Module:
    """The model of a case, the same at every call. Its weights are small enough for a learning rate of 1."""
    if case.arch in FAMILIES:
        return of_a_family(case.arch)
    torch.manual_seed(0)
    routed = {"output_router_logits": True, "mlp_only_layers": []} if ARCHS[case.arch].routed else {}
    attention = {"attn_implementation": "eager"} if case.strategy == "zero3_attentions" else {}
    model = halved(build(case.arch, tie_word_embeddings=False, num_hidden_layers=LAYERS, **routed, **attention))
    if case.adapter == "generic":
        for mlp in mlps_of(model) + experts_in(model):
            setattr(mlp, "activation_fn" if hasattr(mlp, "activation_fn") else "act_fn", nn.GELU())
    if case.adapter == "lora":
        targets = ["q_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "qkv_proj"]
        targets += ["k_proj", "v_proj", "o_proj"] * (case.layer != "none")
        names = [name for name in targets if any(path.endswith(name) for path, _ in model.named_modules())]
        experts = ["experts.gate_up_proj", "experts.down_proj"] if ARCHS[case.arch].routed else None
        model = with_lora(model, *names, target_parameters=experts, task_type="CAUSAL_LM")
        model.enable_input_require_grads()  # a reentrant checkpoint needs an input that requires a gradient
    return model.train()


def of_a_family(model_type: str) -> nn.Module:
    return halved(small_model(model_classes(model_type)[0], CONFIG_MAPPING[model_type]())).train()


def base_of(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def made_tiled(case: Case) -> nn.Module:
    """The same model, tiled, and with Liger in the order of the case."""
    # Liger's MLPs support one activation and, if a patched class built them, no biases, whatever the config says.
    if case.arch in FAMILIES:
        model = made(case)
        seqtile.apply_seqtile(model, layer=case.layer != "none", chunk_tokens=CHUNK)
        status = seqtile.status(model)
        assert status.loss.tiled == 1 and status.mlp.tiled == status.mlp.total, status
        assert (status.layer is not None and status.layer.tiled > 0) == (case.layer != "none"), status
        return model
    odd = case.adapter == "generic" or config_of(case.arch).to_dict().get("mlp_bias") or ARCHS[case.arch].routed
    options = {"chunk_tokens": CHUNK}
    if case.layer != "none":
        options |= {"layer": True, "head_groups": 2 if case.layer == "groups" else None}
    if case.liger == "class":
        apply_liger(case.arch, mlp=not odd)
        getattr(seqtile, f"apply_seqtile_to_{case.arch}")(**options)
    model = made(case)
    base = base_of(model)
    if case.liger == "class":
        make_interpretable(base)
    if case.liger == "again":
        seqtile.apply_seqtile(base, **options)
    if case.liger in ("model", "again"):
        apply_liger(case.arch, model=base, mlp=not odd)
        status = seqtile.status(base)
        assert status.mlp.others == ("liger_kernel",) or odd, status
        assert status.loss.others == ("liger_kernel",) or case.arch == "granite", status  # Liger has no loss for it
    if case.liger != "class":
        seqtile.apply_seqtile(base, **options)
    status = seqtile.status(base)
    assert (status.loss.tiled, status.mlp.tiled) == (1, LAYERS), status
    assert (status.layer is not None and status.layer.tiled == LAYERS) == (case.layer != "none"), status
    called = case.adapter == "generic" or ARCHS[case.arch].routed
    assert (status.mlp.reason is not None) == called, status
    norm = base.model.norm
    assert ("liger" in computed_forward(norm).__module__) == (case.liger != "none")
    return model


def run(case: Case) -> None:
    """Trains a case untiled and tiled: same losses and updates."""
    with modeling_restored():
        compare(case, dist.get_rank())
    seqtile.restore()


def compare(case: Case, rank: int) -> None:
    untiled = made(case)
    start = full(untiled)
    checkpointing(base_of(untiled), KINDS[case.checkpointing])
    drawn = 0 if case.strategy == "expert_parallel" else rank  # there the ranks share a batch
    torch.manual_seed(drawn + 1)
    batches = [batch_of(1, length) for length in LENGTHS[drawn]]
    if case.arch in FAMILIES:
        rows = [batch["input_ids"].remainder(WORDS - 10) + 5 for batch in batches]
        batches = [{"input_ids": ids, "labels": ids, "use_cache": False} for ids in rows]
    # Train to the end before patching: Liger and seqtile on the classes also change existing models.
    theirs, their_weights = train(untiled, case.strategy, batches)
    tiled = made_tiled(case)
    checkpointing(base_of(tiled), KINDS[case.checkpointing])
    ours, our_weights = train(tiled, case.strategy, batches)
    tolerance = 3e-2 if case.strategy == "fsdp2_mixed" else 1e-4  # bfloat16
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=tolerance / 10, atol=tolerance / 10)
    for name, weight in their_weights.items():
        moved = weight - start[name]
        assert moved.norm() > 0 or case.arch in FAMILIES, name  # a router's bias may have no gradient
        error = relative_error(our_weights[name] - start[name], moved)
        assert error <= tolerance, f"{case}: the update of {name} is {error:.1e} off"
    outcome = outcome_of(base_of(tiled)) or ""
    assert "up to rounding" in outcome, f"{case}: {outcome}"
