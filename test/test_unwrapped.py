"""Every public function that takes a model says what to pass in the place of a name or a wrapper."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import seqtile
from seqtile import offload, sp
from support.tiny import build

TAKERS: dict[str, Callable[[Any], object]] = {
    "apply_seqtile": seqtile.apply_seqtile,
    "apply_seqtile_to_llama": seqtile.apply_seqtile_to_llama,
    "share_prefixes": seqtile.share_prefixes,
    "status": seqtile.status,
    "fit": lambda model: seqtile.fit(model, seq_len=9),
    "evaluate": lambda model: seqtile.evaluate(model, [1, 2, 3]),
    "apply_ulysses": lambda model: sp.apply_ulysses(model, None),
    "sp.restore": sp.restore,
    "offload.enable": offload.enable,
}


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_a_name_or_a_wrapper_instead_of_a_model(take: Callable[[Any], object]) -> None:
    load = r"got a str; load it first with AutoModelForCausalLM\.from_pretrained\('Qwen/Qwen3-0\.6B'\)"
    with pytest.raises(TypeError, match=f"expected a Hugging Face model, {load}"):
        take("Qwen/Qwen3-0.6B")
    with pytest.raises(TypeError, match=r"got a OptimizedModule; pass the model itself.*\._orig_mod of torch\.compile"):
        take(torch.compile(build("llama")))
    with pytest.raises(
        TypeError, match=r"expected a Hugging Face model, got the class LlamaForCausalLM; load it first"
    ):
        take(type(build("llama")))


def test_what_is_inside_a_compiled_model_is_tiled() -> None:
    """As the error about a compiled model says; test/models/test_training_loops.py trains one."""
    compiled = torch.compile(build("llama"))
    seqtile.apply_seqtile(compiled._orig_mod)
    assert seqtile.status(compiled._orig_mod).mlp.tiled == 2
