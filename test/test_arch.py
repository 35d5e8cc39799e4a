"""The table of architectures against Hugging Face's code: each entry describes its architecture correctly."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import seqtile
from seqtile.arch import ARCHS, Arch
from seqtile.models.find import experts_in, mlps_of
from support.tiny import CLASSES, config_of, modeling_of, name_of_class

PAGE = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
every_architecture = pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)


def model_of(arch: Arch, **changes: object) -> nn.Module:
    """A tiny model without data. In a mixture of experts, the second layer has no experts if the config supports
    that."""
    with torch.device("meta"):
        return CLASSES[arch.model_type][1](config_of(arch.model_type, **changes))


@every_architecture
def test_defaults(arch: Arch) -> None:
    """Its config class sets them, and a config.json may omit them. Qwen2's has no attention_bias: it is always true."""
    config = CLASSES[arch.model_type][0]()
    assert arch.defaults == {name: getattr(config, name, True) for name in arch.defaults}


@every_architecture
def test_projections(arch: Arch) -> None:
    """The merged projections, and those that have a bias if the config requests it."""
    model = model_of(arch, attention_bias=True)
    layer = model.model.layers[-1]
    projections = {name: child for name, child in layer.self_attn.named_children() if name.endswith("_proj")}
    assert projections.keys() == ({"qkv_proj", "o_proj"} if "qkv" in arch.merged else {f"{x}_proj" for x in "qkvo"})
    assert {name[0] for name, child in projections.items() if child.bias is not None} == set(arch.attention_bias)
    fused = {hasattr(mlp, "gate_up_proj") for mlp in mlps_of(model)}
    assert fused == (set() if arch.model_type == "mixtral" else {"gate_up" in arch.merged})
    assert bool(experts_in(model)) == arch.routed


@every_architecture
def test_norms(arch: Arch) -> None:
    """The number of norms in a layer, and the width of those of queries and keys."""
    layer = model_of(arch).model.layers[0]
    norms = [child for child in layer.children() if type(child).__name__.endswith("Norm")]
    assert len(norms) == (1 if arch.parallel else 2 * (arch.norm_before + arch.norm_after))
    assert all(type(norm).__name__.endswith("LayerNorm") == (arch.norm == "layer") for norm in norms)
    q, attention = layer.self_attn.config.num_attention_heads, layer.self_attn
    widths = {None: None, "shared": attention.head_dim, "own": attention.head_dim * q}
    norm = getattr(attention, "q_norm", None)
    assert (None if norm is None else norm.weight.numel()) == widths[arch.head_norm]


@every_architecture
def test_dtype_of_what_a_norm_multiplies_by(arch: Arch) -> None:
    """With a float32 weight, the output is float32 exactly if a norm multiplies in the dtype of its input."""
    norm = model_of(arch).model.norm
    output = norm.to_empty(device="cpu").float()(torch.ones(1, 2, norm.weight.numel(), dtype=torch.bfloat16))
    assert (output.dtype == torch.float32) == (arch.norm == "rms")


@every_architecture
def test_scaled_embeddings(arch: Arch) -> None:
    source = inspect.getsource(getattr(modeling_of(arch.model_type), name_of_class(arch.model_type, "Model")).forward)
    assert ("inputs_embeds = inputs_embeds *" in source) == (arch.embedding_scale is not None)
    assert arch.embedding_scale is None or f"inputs_embeds * self.{arch.embedding_scale}" in source


def test_the_pages_status() -> None:
    """docs/models.md shows what `status` prints for Llama-3.1-8B."""
    widths = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    with torch.device("meta"):
        model = CLASSES["llama"][1](config_of("llama", **widths))
    seqtile.apply_seqtile(model)
    assert f"```text\n{seqtile.status(model)}\n```" in PAGE
