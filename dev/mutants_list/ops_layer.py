"""Mutants of the op that is a decoder layer."""

from mutants_list.mutant import Mutant

GRADIENTS = ("models/test_layer_gradients.py",)
LAYER = ("models/test_layer.py",)
HOLES = ("models/test_layer_holes.py",)

MUTANTS = (
    Mutant(
        "layer: of what the norm returns only the first tile is computed",
        "NormedInput.chunk",
        "self._known = chunk.stop if self._whole",
        "self._known = len(self._x) if self._whole",
        GRADIENTS,
    ),
    Mutant(
        "layer: of the groups' gradients only the last stays",
        "QKVGradients.add",
        "out=self._d_normed[chunk], add=add or i > 0)",
        "out=self._d_normed[chunk], add=i > 0)",
        GRADIENTS,
    ),
    Mutant(
        "layer: the rotary embedding's gradient is turned forwards",
        "QKVGradients.add",
        "rotary_(d_qk, *inputs.angles(chunk), backward=True)",
        "rotary_(d_qk, *inputs.angles(chunk))",
        GRADIENTS,
    ),
    Mutant(
        "layer: the backward takes the groups in the forward's order",
        "_Backward.gradients",
        "order = range(self.sizes.groups - 1, -1, -1)",
        "order = range(self.sizes.groups)",
        GRADIENTS,
    ),
    Mutant(
        "layer: the scale of the residual is left out of attention's gradient",
        "_Backward._grad_attn_output",
        "            d_out.mul_(sizes.scale)\n",
        "            pass\n",
        LAYER,
        select="same_step and scaled",
    ),
    Mutant(
        "layer: the gradient beside the MLP is lost",
        "_backward",
        "add=d_y[chunk]",
        "add=None",
        GRADIENTS,
    ),
    Mutant(
        "layer: adapters' scale is left out of a gradient",
        "Projection.add_gradients",
        "sums.b.add(d_y, torch.mm(x, self.a.T).mul_(self.scale))",
        "sums.b.add(d_y, torch.mm(x, self.a.T))",
        LAYER,
        select="adapters",
    ),
    Mutant(
        "layer: queries that attention changed in place are computed again",
        "SavedTensors.pack",
        "if in_base and tensor._version == version:",
        "if in_base:",
        HOLES,
        select="in_place",
    ),
    Mutant(
        "layer: an output that was changed in place is not noticed",
        "SavedTensors.unpack",
        "if self._qkv_changed if in_qkv else place in self._changed:",
        "if self._qkv_changed if in_qkv else False:",
        HOLES,
        select="in_place",
    ),
    Mutant(
        "layer: an attention that saves much is not refused",
        "excess_saved_bytes",
        "return size if size > out.numel() * out.element_size() // LARGE else 0",
        "return 0",
        LAYER,
        select="saves_much",
    ),
    Mutant(
        "layer: a mask for each head is not refused in groups",
        "_check",
        "tensor.dim() == 4 and tensor.shape[1] > 1",
        "tensor.dim() > 4",
        HOLES,
        select="mask_for_each",
    ),
    Mutant(
        "layer: an attention that runs again draws other random numbers",
        "_Backward._through_attention",
        "with state.forward_autocast(), state.forward_random():",
        "with state.forward_autocast():",
        HOLES,
        select="dropout",
    ),
)
