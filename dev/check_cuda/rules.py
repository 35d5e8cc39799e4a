"""What a GPU would refuse, copy or wait for, of every operation that reaches the dispatcher."""

import math
from collections import Counter

import torch
from dev.check_cuda.attention import HALF, ORDER, Call, copies, faults_of_lengths, lies_alike, mask_copies, refusals
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim", "_unique2"}
ONE_WAIT = {"nonzero": 1}  # which tokens are labelled, unless ignore_index is None: README names it
PLANS = 4
"""cuDNN plans each new shape, which takes it up to a second: a batch may have so many."""
HOST_BYTES = 2**30  # of one tensor on the host
ATTENTIONS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_efficient_attention_forward": "efficient",
}
AND_BACKWARD = {f"{name.removesuffix('_forward')}_backward": name for name in ATTENTIONS}


class CudaRules(TorchDispatchMode):
    """`broken`: what cuBLAS or attention's kernels would refuse or copy, and how often. `waits`: operations for which
    the host waits. `served`: how often each kernel of attention is called. `able`: for each call of
    `scaled_dot_product_attention`, the kernels that could serve it, of which torch takes the first."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self.able: Counter[tuple[str, ...]] = Counter()
        self._plans: set[tuple[torch.Size, ...]] = set()

    def wrong(self) -> dict[str, int]:
        """Returns all that is wrong, and how often."""
        found = dict(self.broken)
        found |= {f"the host waits for {key}": n for key, n in self.waits.items() if n > ONE_WAIT.get(key, 0)}
        if len(self._plans) > PLANS:
            found["shapes for which cuDNN makes a plan"] = len(self._plans)
        return found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in WAITS or (name in ("_to_copy", "copy_") and self._waits_for_copy(name, args, kwargs)):
            self.waits[name] += 1
        if name in ("mm", "addmm", "addmm_"):
            self.broken.update(f"{func}: {fault}" for fault in product_faults(name, args, kwargs))
        if func is torch.ops.aten.addmm.dtype_out:
            return kwargs["out"]  # torch 2.11 cannot simulate it
        if name in ATTENTIONS:
            self._check_attention(name, *args)
        elif name in AND_BACKWARD:
            self._check_backward(name, *args)
        elif name in ("_flash_attention_forward", "_flash_attention_backward"):
            self._check_documents(name.rpartition("_")[2], *args)
        if name == "_efficient_attention_backward":  # nor can it simulate this
            return (*(torch.empty_like(operand) for operand in args[1:4]), args[1].new_empty(()))
        result = func(*args, **kwargs)
        if name == "_scaled_dot_product_flash_attention":  # the simulation's output lies as the queries do
            tokens_first = [result[0].shape[i] for i in (0, 2, 1, 3)]
            result = (result[0].new_empty(tokens_first).transpose(1, 2), *result[1:])
        return result

    def _waits_for_copy(self, name: str, args: tuple, kwargs: dict) -> bool:
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        devices |= {kwargs["device"].type} if kwargs.get("device") is not None else set()
        asynchronous = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        return len(devices) > 1 and not asynchronous and args[0].numel() > 0

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Like `scaled_dot_product_attention`, which would ask the driver: calls the kernel that torch would choose."""
        if isinstance(attn_mask, CausalBias):
            return CausalBias._dispatch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        why_not = {kernel: refusals(kernel, call) for kernel in ORDER}
        able = tuple(kernel for kernel in ORDER if not why_not[kernel])
        aten = torch.ops.aten
        self.able[able] += 1
        self.broken.update(f"attention: {fault}" for fault in mask_copies(call))
        if attn_mask is not None and "cudnn" in able:
            self.broken["cuDNN could serve attention with a mask, whose gradient can be NaN"] += 1
        if not able:
            reasons = "; ".join(f"{kernel}: {', '.join(reasons)}" for kernel, reasons in why_not.items())
            self.broken[f"attention without a kernel, of every score at once: {reasons}"] += 1
            last = {"scale": scale, "enable_gqa": enable_gqa}
            return aten._scaled_dot_product_attention_math(*call[:4], dropout_p, is_causal, **last)[0]
        if able[0] == "flash":
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        with_lse = torch.is_grad_enabled() and any(operand.requires_grad for operand in call.operands.values())
        options = (attn_mask, with_lse, dropout_p, is_causal)
        if able[0] == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(query, key, value, *options, scale=scale)[0]
        return aten._scaled_dot_product_efficient_attention(query, key, value, *options, scale=scale)[0]

    def causal_bias(self, kind: type[CausalBias], *arguments: int) -> CausalBias:
        """Like `CausalBias.__new__`, which is given a variant and two lengths, and takes them for the sizes of a
        float32 tensor on the host."""
        if arguments and 4 * math.prod(arguments) > HOST_BYTES:
            gib = 4 * math.prod(arguments) / 2**30
            self.broken[f"CausalBias of {list(arguments[1:])} asks the host for {gib:.0f} GiB"] += 1
        with _disable_current_modes():
            return torch.Tensor.__new__(kind)

    def _check_attention(self, name: str, *args: object) -> None:
        query, key, value, mask = *args[:3], None if "flash" in name else args[3]
        if name == "_efficient_attention_forward":  # [B, n, H, K]
            query, key, value = (operand.transpose(1, 2) for operand in (query, key, value))
        kernel = ATTENTIONS[name]
        call = Call(query, key, value, mask, gqa=query.shape[1] != key.shape[1])
        self.served[kernel] += 1
        faults = refusals(kernel, call) or copies(kernel, call)
        self.broken.update(f"{kernel} attention: {fault}" for fault in faults)
        if kernel == "cudnn":
            self._plans.add((query.shape, key.shape, value.shape))

    def _check_documents(self, which: str, *args: object) -> None:
        """`which`: forward or backward. The latter copies the output and its gradient unless they are contiguous."""
        if which == "backward":
            (d_out, query, key, value, out), starts, most = args[:5], args[6:8], args[8:10]
            ours = [d_out, out]
        else:
            (query, key, value), starts, most, ours = args[:3], args[3:5], args[5:7], []
            self.served["flash of documents"] += 1
        faults = faults_of_lengths(query, key, value, starts, most)
        for x in ours:
            if x.shape != query.shape or x.dtype != query.dtype:
                faults.append(f"output or gradient {list(x.shape)} of {x.dtype}")
            elif not x.is_contiguous():
                faults.append(f"output or gradient {list(x.shape)} with strides {x.stride()} is copied")
        self.broken.update(f"flash attention of documents, {which}: {fault}" for fault in faults)

    def _check_backward(self, name: str, d_out: torch.Tensor, *args: object) -> None:
        out = args[4 if "efficient" in name else 3]
        if not lies_alike(d_out, out):
            kernel = ATTENTIONS[AND_BACKWARD[name]]
            lies = f"{list(d_out.shape)} with strides {d_out.stride()}, the output's are {out.stride()}"
            self.broken[f"{kernel} attention: a gradient {lies}, is copied"] += 1


def can_use_flash_attention(params: torch._C._SDPAParams, debug: bool = False) -> bool:
    """Like `torch.backends.cuda.can_use_flash_attention`."""
    return not refusals("flash", _call(params))


def can_use_efficient_attention(params: torch._C._SDPAParams, debug: bool = False) -> bool:
    """Like `torch.backends.cuda.can_use_efficient_attention`."""
    return not refusals("efficient", _call(params))


def _call(params: torch._C._SDPAParams) -> Call:
    return Call(
        params.query, params.key, params.value, params.attn_mask, params.dropout, params.is_causal, params.enable_gqa
    )


def product_faults(name: str, args: tuple, kwargs: dict) -> list[str]:
    """Returns what torch or cuBLAS would refuse of a product, or copy first. `addmm` with an `out_dtype` is checked as
    torch checks it (_addmm_dtype_out_cuda in Blas.cpp), because it is not simulated."""
    left, right = (args[0], args[1]) if name == "mm" else (args[1], args[2])
    added, out = None if name == "mm" else args[0], kwargs.get("out")
    dtypes = [each for each in (kwargs.get("out_dtype"), *args) if isinstance(each, torch.dtype)]
    out_dtype = dtypes[0] if dtypes else left.dtype
    if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
        return [f"{list(left.shape)} by {list(right.shape)}"]
    found = []
    if left.dtype != right.dtype:
        found.append(f"{left.dtype} by {right.dtype}")
    if out_dtype != left.dtype and not (out_dtype == torch.float32 and left.dtype in HALF):
        found.append(f"{out_dtype} of {left.dtype}")
    size = (left.shape[0], right.shape[1])
    in_place = name == "addmm_" or added is out
    for tensor, whole in ((added, in_place), (None if in_place else out, True)):
        if tensor is not None and tensor.dtype != out_dtype:
            found.append(f"into {tensor.dtype}, of {left.dtype}")
        if tensor is not None and not (tensor.shape == size if whole else _expands(tensor, size)):
            found.append(f"into {list(tensor.shape)}, of {list(size)}")
    if not in_place and out is not None and added is not None and added.dim() == 2 and kwargs.get("beta", 1):
        found.append(f"the sum {list(added.shape)} is copied")
    for tensor in (left, right, out):
        if tensor is not None and tensor.dim() == 2 and not is_matrix(tensor):
            found.append(f"{list(tensor.shape)} with strides {tensor.stride()} is copied")
    return found


def _expands(tensor: torch.Tensor, size: tuple[int, int]) -> bool:
    wanted = size[2 - tensor.dim() :] if tensor.dim() <= 2 else ()
    return bool(wanted) and all(n in (1, want) for n, want in zip(tensor.shape, wanted, strict=True))


def is_matrix(tensor: torch.Tensor) -> bool:
    """Whether cuBLAS takes a tensor as it lies: rows or columns without gaps, further apart than they are long."""
    rows, columns = tensor.shape
    by_row = tensor.stride(1) == 1 and tensor.stride(0) >= max(1, columns)
    by_column = tensor.stride(0) == 1 and tensor.stride(1) >= max(1, rows)
    return by_row or by_column
