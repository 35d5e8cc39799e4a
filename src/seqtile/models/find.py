"""Finds the modules of a model that can be tiled, by their structure, not by their names.

the text model's modules ── a decoder layer: a layer that Hugging Face can checkpoint
                        ├── an MLP: makes something of each token's tensors by two projections or more of its own
                        └── experts: given tokens, their experts and the weights of these
"""

import inspect
import re
from collections.abc import Callable, Iterator

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from seqtile.models.forward.mlp import is_mxfp4, num_experts
from seqtile.models.known import is_known_home
from seqtile.models.placement import class_of
from seqtile.models.read import own_weights
from seqtile.models.stand_in import without_stand_ins

# Arguments that tell of other tokens, or more:
_OF_A_SEQUENCE = re.compile(r"mask|cache|past|position|state|layer|head")


@without_stand_ins
def head_of(model: nn.Module) -> nn.Module | None:
    """Returns a model's head over a vocabulary; None if it has none."""
    return getattr(model, "get_output_embeddings", lambda: None)()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the layers of a model's text part, in their order."""
    return [module for module in _walk(text_model_of(model)) if isinstance(module, GradientCheckpointingLayer)]


def is_checkpointed(model: nn.Module) -> bool:
    return any(getattr(layer, "gradient_checkpointing", False) for layer in layers_of(model))


def mlps_of(model: nn.Module) -> list[nn.Module]:
    """Returns every module of the text part that is tiled as an MLP, inside PEFT's wrappers; not experts."""
    head = head_of(model)
    return [module for module in mlps_in(text_model_of(model)) if head is None or head not in module.modules()]


def mlps_in(module: nn.Module) -> list[nn.Module]:
    """Returns the MLPs in a module, itself included, inside PEFT's wrappers; not experts, nor what a user has put in a
    projection's place."""
    inside = list(_walk(module))
    put_in = {id(child) for each in inside if _has_projections(each) for child in each.children() if _is_users(child)}
    return [each for each in inside if id(each) not in put_in and _is_mlp(each)]


def experts_in(model: nn.Module) -> list[nn.Module]:
    """Returns every module of the text part that holds the weights of a mixture's experts, inside PEFT's wrappers."""
    return [module for module in _walk(text_model_of(model)) if are_experts(module)]


def text_model_of(model: nn.Module) -> nn.Module:
    """Returns the part of a model, perhaps of text and images, that computes the hidden states of its head."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return model if decoder is None else decoder


def are_experts(module: nn.Module) -> bool:
    """Returns whether a module holds the weights of all experts of a mixture and gets the experts of each token."""
    return is_mxfp4(module) or (len(_arguments(type(module))) == 3 and num_experts(module) > 0)


def _is_mlp(module: nn.Module) -> bool:
    names = _arguments(type(module))
    required = [name for name, needed in names.items() if needed]
    if len(required) not in (1, 2) or any(_OF_A_SEQUENCE.search(name) for name in names if name not in required):
        return False
    return _has_projections(module)


def _has_projections(module: nn.Module) -> bool:
    """Returns whether a module holds two projections or more, and no other module with weights below it, as an MLP or
    attention does."""
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict | GradientCheckpointingLayer):
        return False
    children = [inside_peft(child) for child in module.children()]
    if any(num_experts(part) for part in (module, *children)):  # a convolution's weight has three dimensions, too
        return False
    stand_ins = [] if _is_users(module) else [child for child in children if _is_users(child)]
    put_in = [child for child in stand_ins if any(map(_is_projection, child.modules()))]
    others = [child for child in children if child not in put_in]  # one with weights below its own is no projection
    if any({*map(id, child.parameters())} - {*map(id, own_weights(child))} for child in others):
        return False
    return len({*put_in, *filter(_is_projection, children)}) >= 2


def _is_users(module: nn.Module) -> bool:
    """Returns whether a module may stand where Hugging Face's code has a projection."""
    return type(module) is nn.Sequential or not is_known_home(class_of(module).__module__)


def _is_projection(module: nn.Module) -> bool:
    weights = [*own_weights(module), *module.buffers(recurse=False)]  # a quantiser's may be buffers
    is_matrix = any(len(getattr(weight, "ds_shape", weight.shape)) == 2 for weight in weights)
    return is_matrix and not isinstance(module, nn.Embedding)


def _arguments(cls: type) -> dict[str, bool]:
    """Returns the names of a class's positional forward arguments, and whether each is required."""
    try:
        return {each.name: each.default is each.empty for each in positional_of(cls.forward)}
    except (ValueError, TypeError, AttributeError):  # the last: of what torch.jit.script makes
        return {}


def positional_of(forward: Callable) -> list[inspect.Parameter]:
    """Returns the positional arguments of a forward (a plain function), without its module."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


def takes_use_cache(forward: Callable) -> bool:
    """Returns whether a model's forward can be told whether to make a cache."""
    parameters = inspect.signature(forward).parameters
    return "use_cache" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module and all below it; instead of PEFT's wrappers, what runs inside them."""
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        module = inside_peft(waiting.pop())
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting += reversed(list(module.children()))


def inside_peft(module: nn.Module) -> nn.Module:
    """Returns the module that runs within PEFT's adapters of parameters and its copies of modules to save."""
    while True:
        if "modules_to_save" in module._modules:
            saved = [module.modules_to_save[name] for name in module.active_adapters if name in module.modules_to_save]
            module = saved[0] if saved and not module.disable_adapters else module.original_module
        elif "base_layer" in module._modules:
            module = module.base_layer
        else:
            return module
