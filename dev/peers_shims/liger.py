"""Liger-Kernel's tests: its fused loss, cross-entropy, gated MLPs and patches of models are seqtile's.

The loss of given logits and the activation of the MLP have no public counterpart: there the row kernels are called.
"""

from functools import partial
from importlib import import_module
from types import ModuleType

import torch
import transformers
from peers_shims.modes import MODES, architectures
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import seqtile
from seqtile.kernels import LossOptions
from seqtile.kernels.dispatch import cross_entropy_, gated_activation_, gated_activation_backward_
from seqtile.models.forward.mlp import tiled_experts_forward
from seqtile.models.placement import Options

Results = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


VOCABULARY = 1000


class FusedLoss:
    """In three or four tiles."""

    @staticmethod
    def apply(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        class_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accumulate_dtype: torch.dtype | None = None,
        scale_by_probability: bool = False,
        return_accuracy: bool = False,
        return_predicted: bool = False,
        *unused: object,
    ) -> Results:
        loss, metrics = seqtile.linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias,
            ignore_index=ignore_index,
            reduction="none" if scale_by_probability else reduction,
            label_smoothing=label_smoothing,
            class_weight=class_weight,
            z_loss=z_loss * z_factor(target, ignore_index, class_weight, reduction),
            softcap=softcap or None,
            accumulate_dtype=accumulate_dtype,
            chunk_tokens=max(1, len(hidden) // 3),
            return_metrics=True,
        )
        count = (target != ignore_index).sum()
        if scale_by_probability:
            loss = reduced(loss * (-loss.detach()).exp(), count, reduction)
        return (
            loss,
            reduced(z_loss * metrics.logsumexp**2, count, reduction) if return_z_loss else None,
            metrics.token_accuracy if return_accuracy else None,
            metrics.predicted_tokens if return_predicted else None,
        )


def reduced(losses: torch.Tensor, divisor: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / divisor if reduction == "mean" else losses.sum()


def z_factor(
    target: torch.Tensor, ignore_index: int, class_weight: torch.Tensor | None, reduction: str
) -> float | torch.Tensor:
    """Liger divides the squares of log-sum-exp by the number of tokens, seqtile by what it divides the losses by."""
    if class_weight is None or reduction != "mean":
        return 1.0
    labels = target[target != ignore_index]
    return float(class_weight[labels].sum() / len(labels))


class RowLosses(torch.autograd.Function):
    """The loss of every row of logits, by the kernel to which `linear_cross_entropy` gives its tiles."""

    @staticmethod
    def forward(
        ctx, logits: torch.Tensor, target: torch.Tensor, options: LossOptions, class_weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        losses, lse, predicted = torch.empty(len(logits)), torch.empty(len(logits)), torch.empty_like(target)
        vectors = {"class_weight": class_weight, "lse": lse, "predicted": predicted}
        cross_entropy_(logits.clone(), target, losses, options, **vectors)
        ctx.save_for_backward(logits, target, class_weight)
        ctx.options = options
        ctx.mark_non_differentiable(lse, predicted)
        return losses, lse, predicted

    @staticmethod
    def backward(ctx, d_losses: torch.Tensor, *unused: torch.Tensor):
        logits, target, class_weight = ctx.saved_tensors
        gradient, vectors = logits.clone(), {"class_weight": class_weight, "row_scale": d_losses.contiguous()}
        cross_entropy_(gradient, target, torch.empty(len(logits)), ctx.options, write_grad=True, **vectors)
        return gradient, None, None, None


class LossOfLogits:
    @staticmethod
    def apply(
        logits: torch.Tensor,
        target: torch.Tensor,
        class_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_accuracy: bool = False,
        return_predicted: bool = False,
    ) -> Results:
        labelled = target != ignore_index
        labels = target[labelled]
        z_scale = z_loss * z_factor(target, ignore_index, class_weight, reduction)
        options = LossOptions(softcap=softcap or 0.0, label_smoothing=label_smoothing, z_loss=z_scale)
        weights = None if class_weight is None else class_weight.float()
        found = RowLosses.apply(logits[labelled].contiguous(), labels, options, weights)
        losses, lse, predicted = (
            torch.full(target.shape, fill, dtype=values.dtype).masked_scatter(labelled, values)
            for values, fill in zip(found, (0, 0, -1), strict=True)
        )
        divisor = labelled.sum() if weights is None else weights[labels].sum()
        return (
            reduced(losses, divisor, reduction).to(logits.dtype),
            reduced(z_loss * lse**2, labelled.sum(), reduction).to(logits.dtype) if return_z_loss else None,
            (found[2] == labels).float().mean() if return_accuracy else None,
            predicted if return_predicted else None,
        )


def loss_of_logits_by_name(name: str, *arguments: object) -> Results:
    assert name == "cross_entropy"
    return LossOfLogits.apply(*arguments)


class ActivationOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        rows = gate.reshape(-1, gate.shape[-1])
        return gated_activation_(rows.clone(), up.reshape(rows.shape), "silu").view(gate.shape)

    @staticmethod
    def backward(ctx, d_product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up, d = (tensor.reshape(-1, tensor.shape[-1]).clone() for tensor in (*ctx.saved_tensors, d_product))
        gated_activation_backward_(gate, up, d, "silu")
        return gate.view(d_product.shape), up.view(d_product.shape)


class Activation:
    @staticmethod
    def apply(gate: torch.Tensor, up: torch.Tensor, gate_factor: float = 1.0, factor: float = 1.0) -> torch.Tensor:
        return ActivationOfRows.apply(gate * gate_factor, up) * factor


class TiledMLP(LlamaMLP):
    """In `num_shards` tiles; where the suite leaves it to Liger, in five."""

    activation = "silu"

    def __init__(self, config: object, num_shards: int | None = None):
        super().__init__(config)
        self.num_shards = num_shards or 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chunk_tokens = -(-x.shape[:-1].numel() // self.num_shards)
        weights = (layer.weight for layer in (self.gate_proj, self.up_proj, self.down_proj))
        return seqtile.gated_mlp(x, *weights, activation=self.activation, chunk_tokens=chunk_tokens)


class TiledGELU(TiledMLP):
    activation = "gelu_tanh"


class TiledWithFactors(nn.Module):
    """Falcon-H1's: the gate and the output are multiplied by numbers."""

    def __init__(self, config: object):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.gate_factor, self.factor = config.mlp_multipliers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.gate_proj.weight * self.gate_factor, self.up_proj.weight, self.down_proj.weight)
        return seqtile.gated_mlp(x, *weights, chunk_tokens=x.shape[:-1].numel() // 3) * self.factor


class TiledFused(transformers.models.phi3.modeling_phi3.Phi3MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chunk_tokens = x.shape[:-1].numel() // 3
        return seqtile.gated_mlp(x, self.gate_up_proj.weight, None, self.down_proj.weight, chunk_tokens=chunk_tokens)


class TiledExperts(MixtralExperts):
    forward = tiled_experts_forward(Options(chunk_tokens=100), MixtralExperts.forward)


def install(mode: str) -> None:
    import_module("test.utils").supports_bfloat16 = lambda: True  # a CPU does


def prepare(module: ModuleType, mode: str) -> None:
    """Convergence: models patched by seqtile instead of Liger; two layers, a small vocabulary, few short steps."""
    if not hasattr(module, "MINI_MODEL_SETUPS"):
        return
    known = {"mini_" + name: name for name in architectures()} | {
        "mini_llama3": "llama",
        "mini_granite3": "granite",
    }
    for name, setup in module.MINI_MODEL_SETUPS.items():
        if name in known:
            setup.liger_kernel_patch_func = partial(patch, known[name], mode)
            setup.liger_kernel_patch_revert_func = partial(unpatch, known[name])
            config = setup.mini_model_config
            config.num_hidden_layers, config.vocab_size, config.pad_token_id = 2, VOCABULARY, None
            if mode == "groups":  # which draw the dropout of a batch in another order
                config.attention_dropout = 0.0
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[-2:]
    run, loader, collate = module.run_mini_model, module.DataLoader, module.simple_collate_fn

    def short(samples: list[dict]) -> object:
        return collate([{name: [v % VOCABULARY for v in sample[name][:128]] for name in sample} for sample in samples])

    module.DataLoader = lambda data, **options: loader(data, batch_size=2, shuffle=False, collate_fn=short)
    module.run_mini_model = lambda num_steps, **options: run(num_steps=4, **options)


def patch(model_type: str, mode: str, **unused: bool) -> None:
    options = MODES[mode]
    if options is not None:
        getattr(seqtile, f"apply_seqtile_to_{model_type}")(chunk_tokens=50, **options)


def unpatch(model_type: str, **unused: object) -> None:
    seqtile.restore(model_type)


LOSS = {"LigerFusedLinearCrossEntropyFunction": FusedLoss}
REPLACED = {
    "liger_kernel.transformers.functional": LOSS
    | {"LigerCrossEntropyFunction": LossOfLogits, "LigerSiLUMulFunction": Activation},
    "liger_kernel.transformers.fused_linear_cross_entropy": LOSS,
    "liger_kernel.transformers.cross_entropy": {"dispatch": loss_of_logits_by_name},
    "test_fused_linear_cross_entropy": LOSS,
    "test_cross_entropy": {"LigerCrossEntropyFunction": LossOfLogits},
    "test_tiled_mlp": {
        "LigerGEGLUMLP": LlamaMLP,  # what the tiled ones are compared with
        "LigerSwiGLUMLP": LlamaMLP,
        "LigerTiledGEGLUMLP": TiledGELU,
        "LigerTiledSwiGLUMLP": TiledMLP,
    },
    "test_swiglu": {
        "LigerSiLUMulFunction": Activation,
        "LigerSwiGLUMLP": TiledMLP,
        "LigerPhi3SwiGLUMLP": TiledFused,
        "LigerFalconH1SwiGLUMLP": TiledWithFactors,
        "LigerExperts": TiledExperts,
    },
}
AT_MOST = {"H": 256, "V": 1000}
LEFT_OUT = [
    (r"test_float32_internal|blackwell|legacy_function|dtensor", "a test of how Liger's kernel is made"),
    (r"test_cross_entropy.py.*out_of_bounds", "expects the words of Liger's error"),
]
KNOWN = [
    (
        r"correctness_functional(.|\n)*z_loss is -",
        "class weights of a negative sum would need a negative z_loss here",
    ),
    (
        r"test_cross_entropy.py.*-1e-08-0.05-",
        "rtol 5 % in bfloat16: on a CPU torch's gradient is 5 % off float64, seqtile's 0.4 %",
    ),
    (
        r"z_loss_with_other_params.*-sum-.*1e-08-1e-06-",
        "rtol 1e-6 in float32: torch's gradient is 1.4e-7 off float64, seqtile's 3e-8 (of the norm)",
    ),
    (
        r"geglu.*dtype1-1.0-1.0-",
        "atol 1 on gradients of 1,000 in bfloat16: the untiled MLP's are 0.42 % off float64, seqtile's 0.36 %",
    ),
]
