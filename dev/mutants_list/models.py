"""Mutants of what is done to Hugging Face's models."""

from mutants_list.mutant import Mutant

GRADIENTS = ("models/test_gradients.py",)
LAYER = ("models/test_layer.py",)
LAYER_GRADIENTS = ("models/test_layer_gradients.py",)
HOLES = ("models/test_layer_holes.py",)
PATHS = ("models/test_paths.py",)
PATCH = ("models/test_patch.py",)
PLAIN = ("models/test_plain.py",)

MUTANTS = (
    Mutant(
        "causal LM: labels are not shifted",
        "models/loss.py",
        "F.pad(labels, (0, 1), value=ignore_index)[..., 1:]",
        "F.pad(labels, (0, 1), value=ignore_index)[..., :-1]",
        ("models/test_forward.py",),
    ),
    Mutant(
        "causal LM: logits are not divided",
        "models/loss.py",
        '"logit_scale": scale / divisor}',
        '"logit_scale": scale}',
        GRADIENTS,
        select="what_is_done_to_the_logits",
    ),
    Mutant(
        "causal LM: a head that falls back is not soft-capped",
        "models/loss.py",
        "logits = torch.tanh(logits / softcap) * softcap",
        "pass",
        PATHS,
        select="path or called_head",
    ),
    Mutant(
        "causal LM: another loss function is not refused",
        "models/loss.py",
        "if (reason := _unknown_loss_reason(model.loss_function)) is not None:",
        "if (reason := None) is not None:",
        PATCH,
        select="refused",
    ),
    Mutant(
        "MLP: the bias of up is not read",
        "models/mlp.py",
        'arguments[f"{name}_bias"] = projection.bias',
        'arguments[f"{name}_bias"] = None if name == "up" else projection.bias',
        GRADIENTS,
        select="gradients_equal and granite",
    ),
    Mutant(
        "MLP: called under ZeRO-3, and not refused",
        "models/mlp.py",
        "        check_not_zero3(mlp, reason)\n",
        "        pass\n",
        PATHS,
        select="zero3",
    ),
    Mutant(
        "experts: their tiles are as short as an MLP's",
        "models/mlp.py",
        "self.num_experts / top_k_index.shape[-1]",
        "1",
        PATCH,
        select="mixture",
    ),
    Mutant(
        "layer: attention is not told of a window",
        "models/layer.py",
        'options["sliding_window"] = getattr(attention, "sliding_window", of_model)',
        'options["sliding_window"] = None',
        LAYER,
        select="attention_is_asked",
    ),
    Mutant(
        "layer: attentions that are asked for are not made",
        "models/layer.py",
        "if (fits and not _is_zero3(self)) or asked:",
        "if fits and not _is_zero3(self):",
        LAYER,
        select="caches_and_outputs",
    ),
    Mutant(
        "layer: what attention and MLP add is not scaled",
        "models/layer.py",
        "getattr(self, arch.residual_scale) if arch.residual_scale else 1.0",
        "1.0",
        LAYER_GRADIENTS,
        select="granite or scaled",
    ),
    Mutant(
        "layer: positions in layers that have none",
        "models/layer.py",
        'position_embeddings if getattr(self.self_attn, "use_rope", True) else None',
        "position_embeddings",
        LAYER_GRADIENTS,
        select="without_positions or smollm3",
    ),
    Mutant(
        "layer: called, without the norms of heads",
        "models/layer.py",
        'return getattr(attention, f"{name}_norm")(heads) if hasattr(attention, f"{name}_norm") else heads',
        "return heads",
        LAYER,
        select="called",
    ),
    Mutant(
        "plain: a module with hooks is read",
        "models/weights.py",
        'return "has hooks"',
        "return None",
        PATHS,
        select="path",
    ),
    Mutant(
        "called again: a change before the backward is not noticed",
        "models/fallback.py",
        "if (active and active != modes) or list(_call_environment(modules)) != surroundings:",
        "if active and active != modes:",
        PLAIN,
        select="changed_back",
    ),
    Mutant(
        "projections: an adapter with dropout is read",
        "models/weights.py",
        "if type(dropout) is nn.Dropout and dropout.training and dropout.p > 0:",
        "if type(dropout) is nn.Dropout and dropout.p > 1:",
        PATHS,
        select="dropout",
    ),
    Mutant(
        "projections: a merged adapter is added once more",
        "models/weights.py",
        "if module.merged or module.disable_adapters or not active:",
        "if module.disable_adapters or not active:",
        PATHS,
        select="path",
    ),
    Mutant(
        "uncached: a cache that was never filled is returned",
        "models/layer.py",
        "        outputs.past_key_values = None\n",
        "",
        HOLES,
        select="no_cache",
    ),
    Mutant(
        "patch: layers of another shape are not refused",
        "models/patch.py",
        "if options.layer and not arch.layer:",
        "if options.layer and not arch.prefix:",
        LAYER,
        select="refusals",
    ),
    Mutant(
        "placement: a tiled forward that is wrapped is not refused",
        "models/placement.py",
        "    if placement_at(owner, around) is placement:\n",
        "    if placement is None:\n",
        PATCH,
        select="wrapper",
    ),
)
