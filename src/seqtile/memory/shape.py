"""What of a model its memory depends on: widths, counts, norms."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Norms:
    """Which norms a decoder layer has, and how Hugging Face's code computes them."""

    kind: str = "rms"
    before: bool = True
    """Before attention and MLP."""
    after: bool = False
    """After attention and MLP."""
    of_heads: bool = False
    """Of queries and keys."""
    whole: bool = False
    """Those have a weight for every head, not one for all."""
    parallel: bool = False
    """One norm is before both attention and MLP, which are side by side."""


NORMS = {
    "cohere": Norms("layer", parallel=True),
    "gemma2": Norms("gemma", after=True),
    "gemma3_text": Norms("gemma", after=True, of_heads=True),
    "glm4": Norms(after=True),
    "olmo2": Norms("olmo", before=False, after=True, of_heads=True, whole=True),
    "qwen3": Norms(of_heads=True),
    "qwen3_moe": Norms(of_heads=True),
}
"""Of the model types whose layers are not Llama's."""
LIKE_LLAMA = ("granite", "llama", "mistral", "mixtral", "phi3", "qwen2", "smollm3")
TILED_WHOLE = ("granite", "llama", "mistral", "qwen2", "qwen3", "smollm3")
"""The model types whose layers seqtile tiles as a whole."""


@dataclass(frozen=True)
class Shape:
    """The widths of a causal LM, in elements."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    model_type: str = "llama"
    tied: bool = False
    """Whether embedding and head are one."""
    attention_biases: int = 0
    """Elements, of a layer."""
    mlp_biases: int = 0
    softcap: bool = False
    """Whether logits have a soft cap."""
    experts: int = 0
    """Of a layer; 0 if it is no mixture."""
    experts_per_token: int = 1
    positions: int | None = None
    """What the model is configured for, at most."""
    inside: str | None = None
    """The model type that it is the text model of."""
    quantised: bool = False

    @property
    def assumed(self) -> bool:
        """Whether its layers are taken for Llama's because its type is not known."""
        return self.model_type not in (*NORMS, *LIKE_LLAMA)

    @property
    def tiles_whole(self) -> bool:
        """Whether seqtile tiles its layers as a whole."""
        return self.model_type in TILED_WHOLE and self.inside is None

    @property
    def notes(self) -> list[str]:
        """What of its configuration is not planned."""
        notes = []
        if self.inside is not None:
            notes.append(f"only the text model of {self.inside} is planned")
        if self.assumed:
            notes.append(f"model type {self.model_type} is not known; planned as a Llama, which may be far off")
        if self.quantised:
            notes.append("its quantization_config is not planned; weights are counted in full")
        return notes

    @property
    def norms(self) -> Norms:
        return NORMS.get(self.model_type, Norms())

    @property
    def fused_qkv(self) -> bool:
        """Whether one projection makes queries, keys and values."""
        return self.model_type == "phi3"

    @property
    def scales_embedding(self) -> bool:
        """Whether embeddings are multiplied before the first layer."""
        return self.model_type == "granite"

    @property
    def fused_gate_up(self) -> bool:
        return self.model_type in ("glm4", "phi3")

    @property
    def q(self) -> int:
        """The width of the queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """The width of the keys, which is that of the values."""
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Of the projections of a layer."""
        return 2 * self.hidden * (self.q + self.kv) + self.attention_biases

    @property
    def mlp_parameters(self) -> int:
        """Of a layer, of all its experts."""
        matrices = 3 * self.hidden * self.mlp * max(self.experts, 1)
        return matrices + self.hidden * self.experts + self.mlp_biases

    @property
    def layer_parameters(self) -> int:
        norms = self.norms
        count = 1 if norms.parallel else 2 * (norms.before + norms.after)
        of_heads = (self.q + self.kv if norms.whole else 2 * self.head_dim) if norms.of_heads else 0
        return self.attention_parameters + self.mlp_parameters + count * self.hidden + of_heads

    @property
    def head_parameters(self) -> int:
        """Of the matrix that makes logits."""
        return self.vocab * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Of everything but the layers."""
        return self.head_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA of this rank over every projection of attention and MLP."""
        d, m = self.hidden, self.mlp
        a_layer = 2 * (d + self.q) + 2 * (d + self.kv) + 3 * (d + m) * max(self.experts, 1)
        return self.layers * rank * a_layer


KNOWN = {
    "meta-llama/Llama-3.1-8B": Shape(4096, 14336, 32, 32, 8, 128, 128256, positions=131072),
    "meta-llama/Llama-3.1-70B": Shape(8192, 28672, 80, 64, 8, 128, 128256, positions=131072),
    "Qwen/Qwen3-8B": Shape(4096, 12288, 36, 32, 8, 128, 151936, "qwen3", positions=40960),
    "Qwen/Qwen3-32B": Shape(5120, 25600, 64, 64, 8, 128, 151936, "qwen3", positions=40960),
    "mistralai/Mistral-7B-v0.3": Shape(4096, 14336, 32, 32, 8, 128, 32768, "mistral", positions=32768),
    "google/gemma-2-9b": Shape(3584, 14336, 42, 16, 8, 256, 256000, "gemma2", tied=True, softcap=True, positions=8192),
    "HuggingFaceTB/SmolLM2-135M": Shape(576, 1536, 30, 9, 3, 64, 49152, tied=True, positions=8192),
}
"""By their names on the hub, from their config.json."""
