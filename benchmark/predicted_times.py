"""What a step of ours should take on a GPU: predicted without one, not measured.

    make predict, or python -m benchmark.predicted_times [--size quick] [--tflops 750] [--tbs 4.2]   # an H200

Every operation of a step at full size is counted, on tensors without data, and priced: a matmul by its FLOP,
whatever else by the bytes that it reads and writes. Of a float32 sum that half-precision products are added to, half of
the traffic is taken to be hidden behind them. The core of attention is left out. The floor is the matmuls alone.

Last comes a training step of a whole model on one prompt and its completions, with `seqtile.share_prefixes` and
without; of attention's core its matmuls alone, in a line of their own.

`make table` puts predictions beside measured times: `predicted_ms` in the rows of a result file, at the rates of
products and copies that the same run reached. There the core of attention counts at the rate of matmuls. No kernel of
attention reaches it, so a layer's prediction is too short, the more the longer the sequence.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from benchmark import bench_decoder_layer, bench_gated_mlp, bench_linear_cross_entropy
from benchmark.comparison import clear
from benchmark.known_integers import KnownIntegers
from benchmark.models import build
from benchmark.rates import H200, Rates
from benchmark.results import Results, Row, SubjectResults, load, save
from benchmark.shapes import LENGTHS, SHAPES, UNHURRIED, Shape, cases
from benchmark.subject import Forward, Subject
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from seqtile import apply_seqtile, share_prefixes
from seqtile.kernels import dispatch
from seqtile.memory import apply_options, with_features
from seqtile.memory.batch import Batch
from seqtile.memory.measure import PRODUCTS, tensors_of
from seqtile.memory.setup import Setup
from seqtile.memory.simulate import FlashFunction
from seqtile.renamed import enable_checkpointing

WRITTEN = {  # by our kernels that a simulation skips; they read whatever else they are given
    "gated_activation_": ("gate",),
    "gated_activation_backward_": ("gate", "up", "d_product"),
    "rms_norm": ("out",),
    "rms_norm_backward": ("out",),
    "rotary_": ("x",),
}
LAYERS: dict[str, dict[str, object] | None] = {"huggingface": None} | {
    f"seqtile{name}": apply_options(with_features(Setup(), feature))
    for name, feature in {"": "loss, MLP", "_layer": "loss, MLP, layer", "_head_groups": "groups"}.items()
}
"""Contestants, and what each asks of `apply_seqtile`."""
COMPLETIONS = Batch(rows=8, seq_len=32_000, shared=30_000, gpus=1)
"""Of one prompt, as GRPO has them."""


class Operation(NamedTuple):
    """One operation."""

    name: str
    flops: int
    bytes: float
    """That no product hides."""

    def seconds(self, rates: Rates) -> float:
        return rates.seconds(self.flops, self.bytes)


class OperationCounter(TorchDispatchMode):
    """Takes down every operation inside, and the kernels of ours that a simulation skips."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._patches = ExitStack()

    def __enter__(self) -> "OperationCounter":
        for name in WRITTEN:
            kernel = getattr(dispatch, name)
            for module in [module for key, module in sys.modules.items() if key.startswith("seqtile.")]:
                if getattr(module, name, None) is kernel:
                    self._patches.enter_context(patch.object(module, name, self._counted(kernel)))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._patches.close()
        super().__exit__(*error)

    def _counted(self, kernel: Callable) -> Callable:
        signature = inspect.signature(kernel)

        def run(*arguments: object, **options: object) -> object:
            given = signature.bind(*arguments, **options).arguments
            tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
            read = size_of(tensor for name, tensor in tensors.items() if name != "out")
            written = size_of(tensors[name] for name in WRITTEN[kernel.__name__])
            self.operations.append(Operation(kernel.__name__, 0, read + written))
            return kernel(*arguments, **options)

        return run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        moves = bool(tensors_of(result)) and not is_free(func) and "scaled_dot_product" not in name
        if moves or name == "cross_entropy_":
            self.operations.append(operation_of(name, args, kwargs or {}, result))
        return result


def is_free(func: torch._ops.OpOverload) -> bool:
    """Whether an operation moves no data: it makes a view, or room."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    views = any(alias is not None and not alias.is_write for alias in aliases)
    return views or func.overloadpacket.__name__.startswith(("empty", "new_empty"))


def operation_of(name: str, args: tuple, kwargs: dict, result: object) -> Operation:
    given = tensors_of((args, {key: value for key, value in kwargs.items() if key != "out"}))
    if name in PRODUCTS:
        left, right = args[PRODUCTS[name] :][:2]
        flops = 2 * left.numel() * right.shape[-1]
        wide = result.dtype == torch.float32 and left.dtype != torch.float32
        times = 2 if name.startswith("addmm") and kwargs.get("beta", 1) != 0 else 1
        name = f"{name} {left.shape[0]} x {left.shape[1]} x {right.shape[-1]}"
        return Operation(name, flops, size_of([result]) * times / 2 if wide else 0)
    if name == "cross_entropy_":
        return Operation(name, 0, size_of(given[:1]) * (3 if args[3] else 1))
    if name == "copy_":
        given = given[1:]
    elif name in ("zero_", "fill_"):
        given = []
    elif name in ("index", "gather", "embedding"):
        given = tensors_of(result)
    elif name == "index_copy_":
        return Operation(name, 0, 2 * size_of(given[-1:]))
    return Operation(name, 0, size_of(given) + size_of(tensors_of(result)))


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes; what is expanded is there once."""
    found = 0
    for tensor in tensors:
        elements = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements *= size if stride else 1
        found += elements * tensor.element_size()
    return found


class Prediction(NamedTuple):
    operations: list[Operation]

    def seconds(self, rates: Rates = H200) -> float:
        return sum(each.seconds(rates) for each in self.operations)

    def floor(self, rates: Rates = H200) -> float:
        return sum(each.flops for each in self.operations) / rates.flops


@contextmanager
def without_data() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def predict(make_operands: Callable[[], object], contestant: Callable[[object], Forward]) -> Prediction:
    """A step, forward and backward, of what a benchmark compares."""
    with without_data():
        operands = make_operands()
        ready = contestant(operands)
        clear(operands)
        with OperationCounter() as counter, ready.around():
            ready.compute().backward(operands.upstream)
    return Prediction(counter.operations)


def steps(size: str) -> Iterator[tuple[str, Callable[[], object], Callable[[object], Forward]]]:
    """What is predicted: name, operands, contestant. Every token is labelled."""
    every_token = partial(bench_linear_cross_entropy.seqtile, ignore_index=None)
    contestants: dict[Subject, dict[str, Callable[[object], Forward]]] = {
        bench_linear_cross_entropy.SUBJECT: {"seqtile": every_token},
        bench_gated_mlp.SUBJECT: {"seqtile": bench_gated_mlp.seqtile},
        bench_decoder_layer.SUBJECT: {name: partial(checkpointed_layer, chosen) for name, chosen in LAYERS.items()},
    }
    for subject, contestants_of in contestants.items():
        for case in cases(size, subject.lengths):
            operands = partial(subject.operands, SHAPES[case.shape], case.tokens, torch.bfloat16)
            for name, contestant in contestants_of.items():
                yield f"{subject.name} {case} {name}", operands, contestant


def checkpointed_layer(options: dict[str, object] | None, work: bench_decoder_layer.Work) -> Forward:
    """The layer itself, where the contestants make copies: tensors without data cannot be copied."""
    if options is not None:
        apply_seqtile(work.model, loss=False, **options)
    return bench_decoder_layer.checkpointed(work, work.model.model.layers[0])


class WholeStep(NamedTuple):
    """A training step of a model whose every layer costs the same."""

    one: Prediction
    """Of a model of one layer."""
    two: Prediction
    layers: int
    core: float
    """FLOP of attention's products of queries and keys, and of probabilities and values."""

    def seconds(self, rates: Rates = H200) -> float:
        return self.one.seconds(rates) + (self.layers - 1) * (self.two.seconds(rates) - self.one.seconds(rates))

    def floor(self, rates: Rates = H200) -> float:
        return self.one.floor(rates) + (self.layers - 1) * (self.two.floor(rates) - self.one.floor(rates))


def step_of_completions(shares: bool, batch: Batch = COMPLETIONS, shape: Shape = SHAPES["llama3_8b"]) -> WholeStep:
    """A step of sequences that begin with one prompt, of whose completions the loss is: layers tiled and checkpointed,
    weights and gradients in bfloat16. Attention that shares tokens is computed once more in its backward."""
    of_layers = [_step_of_few_layers(shares, batch, shape, layers) for layers in (1, 2)]
    own = batch.seq_len - batch.shared
    prompts = batch.shared**2 / 2 * (1 if shares else batch.rows)
    pairs = prompts + batch.rows * own * (batch.shared + own / 2)
    return WholeStep(*of_layers, shape.layers, 2.0 * (11 if shares else 9) * pairs * shape.q * shape.layers)


def _step_of_few_layers(shares: bool, batch: Batch, shape: Shape, layers: int) -> Prediction:
    AttentionInterface.register(
        "without_scores", lambda module, q, k, v, *_, **__: (FlashFunction.apply(q, k, v), None)
    )
    AttentionMaskInterface.register("without_scores", flash_attention_mask)
    with KnownIntegers():
        model = build(shape, torch.bfloat16, layers)
        model.set_attn_implementation("without_scores")
        enable_checkpointing(model)
        apply_seqtile(model, layer=True, check=False)
        if shares:
            share_prefixes(model)
        completion = torch.arange(batch.seq_len) >= batch.shared
        ids = 1 + torch.arange(batch.rows)[:, None] * completion
        with OperationCounter() as counter:
            model(input_ids=ids, labels=ids.masked_fill(~completion, -100), use_cache=False).loss.backward()
    return Prediction(counter.operations)


def core_flops(subject: str, shape: str, tokens: int) -> float:
    """Of attention in a layer under checkpointing: four products in the two forwards, five in the backward, of which
    causality leaves half."""
    return 9 * 2.0 * tokens**2 / 2 * SHAPES[shape].q if subject == "decoder_layer" else 0.0


def add_predictions(results: Results) -> bool:
    """Writes `predicted_ms` into each timed row that lacks it; returns whether there was one."""
    if not results.on_gpu or results.size not in LENGTHS:
        return False
    timed = {
        f"{name} {row['shape']}-{row['tokens']} {row['contestant']}": (subject, row)
        for name, subject in results.subjects.items()
        for row in subject.rows
        if "both_ms" in row and "shape" in row and "predicted_ms" not in row and subject.matmul_tflops
    }
    added = False
    for name, operands, contestant in steps(results.size) if timed else ():
        if name in timed:
            subject, row = timed[name]
            row["predicted_ms"] = milliseconds(subject, row, predict(operands, contestant))
            added = True
    return added


def milliseconds(subject: SubjectResults, row: Row, prediction: Prediction) -> float:
    rates = Rates(subject.matmul_tflops * 1e12, subject.copy_gbs * 1e9)
    core = core_flops(row["subject"], row["shape"], row["tokens"]) / rates.flops
    return round(1e3 * (prediction.seconds(rates) + core), 3)


def add_to_files(directory: Path) -> None:
    """Adds predictions to every result file of a GPU."""
    for file in sorted(directory.glob("*.json")):
        results = load(file)
        if add_predictions(results):
            save(results, file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted time of a step on a GPU, not measured.")
    parser.add_argument("--size", choices=[size for size in LENGTHS if size not in UNHURRIED], default="first")
    parser.add_argument("--tflops", type=float, default=750, help="of matmuls, measured on the GPU meant")
    parser.add_argument("--tbs", type=float, default=4.2, help="TB/s, read and written")
    parser.add_argument("--operations", action="store_true", help="what each step is made of, too")
    chosen = parser.parse_args()
    rates = Rates(chosen.tflops * 1e12, chosen.tbs * 1e12)
    print(f"predicted, not measured: matmuls at {chosen.tflops:g} TFLOP/s, {chosen.tbs:g} TB/s; no core of attention")
    print(f"{'':60}{'predicted ms':>14}{'matmuls ms':>13}{'ratio':>8}")
    for name, operands, contestant in steps(chosen.size):
        prediction = predict(operands, contestant)
        seconds, floor = prediction.seconds(rates), prediction.floor(rates)
        print(f"{name:60}{seconds * 1e3:14.2f}{floor * 1e3:13.2f}{seconds / floor:8.3f}", flush=True)
        if chosen.operations:
            print_operations(prediction, rates)
    for shares in (False, True):
        step = step_of_completions(shares)
        name = f"llama3_8b, 30,000 + 8 x 2,000 tokens{', prompt computed once' * shares}"
        seconds, floor = step.seconds(rates), step.floor(rates)
        print(f"{name:60}{seconds * 1e3:14.2f}{floor * 1e3:13.2f}{seconds / floor:8.3f}")
        print(f"{'    core of attention':60}{'':14}{step.core / rates.flops * 1e3:13.2f}", flush=True)


def print_operations(prediction: Prediction, rates: Rates) -> None:
    by_name: dict[str, list[Operation]] = {}
    for each in prediction.operations:
        by_name.setdefault(each.name, []).append(each)
    total = {name: sum(each.seconds(rates) for each in operations) for name, operations in by_name.items()}
    for name in sorted(total, key=total.get, reverse=True)[:15]:
        print(f"    {len(by_name[name]):6} x {name:50} {total[name] * 1e3:10.2f}")


if __name__ == "__main__":
    main()
