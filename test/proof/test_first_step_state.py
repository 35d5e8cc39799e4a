"""What users' modules keep is put back after the first step's comparison, or the step is not compared."""

import enum
import io
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from peft import PveraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize
from transformers import LlamaConfig, LlamaForCausalLM

import seqtile
import support.tiny
from seqtile.models.status import outcome_of
from support.tiny import CHUNK, batch_of, build

CALLS, TOTAL = [], 0


class Noting(nn.Module):
    """An activation of a user's that notes each call."""

    of_class: ClassVar[list] = []

    def __init__(self, note: Callable, kept: Any = None):
        super().__init__()
        self.note, self.kept, self.calls = note, kept, 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.total += 1
        self.noted(x)
        return F.silu(x)

    def noted(self, x: torch.Tensor) -> None:
        self.note(self, x)


class NotingOfClass(Noting):
    def noted(self, x: torch.Tensor) -> None:
        self.of_class.append(1)
        type(self).number += 1

    number = 0

    @classmethod
    def reset(cls) -> None:
        cls.number = 0
        cls.of_class.clear()


class NotingInAParameter(Noting):
    def __init__(self, note: None):
        super().__init__(note)
        self.kept = nn.Parameter(torch.zeros(2), requires_grad=False)

    def noted(self, x: torch.Tensor) -> None:
        self.kept.data.add_(1)


class NotingByDefault(Noting):
    def noted(self, x: torch.Tensor, calls: list = []) -> None:  # noqa: B006
        calls.append(1)
        self.kept = len(calls)


def in_globals(act: Noting, x: torch.Tensor) -> None:
    global TOTAL
    TOTAL += 1
    CALLS.append(x.shape)
    act.kept = TOTAL, len(CALLS)


def by_argument(calls: list, act: Noting, x: torch.Tensor) -> None:
    calls.append(1)
    act.kept = len(calls)


def in_a_closure() -> Noting:
    total, lists = 0, [[]]

    def note(act: Noting, x: torch.Tensor) -> None:
        nonlocal total
        total += 1
        lists[0].append(total)
        act.kept = total, len(lists[0])

    return Noting(note)


def noting(kept: Any, note: Callable) -> Callable[[], Noting]:
    return lambda: Noting(lambda act, x: note(act.kept, x), kept() if callable(kept) else kept)


def of_numpy() -> Noting:
    numpy.random.seed(0)
    return Noting(lambda act, x: numpy.random.rand())


PUT_BACK = {  # an activation, and what it has noted
    "nothing": (noting(None, lambda kept, x: None), str),
    "a list": (noting(list, lambda kept, x: kept.append(1)), str),
    "a list in a tuple": (noting(lambda: ([],), lambda kept, x: kept[0].append(1)), str),
    "a dict": (noting(dict, lambda kept, x: kept.update({len(kept): 1})), str),
    "counts": (noting(Counter, lambda kept, x: kept.update("a")), str),
    "ordered": (noting(OrderedDict, lambda kept, x: kept.update({len(kept): 1})), str),
    "a dict of lists": (noting(partial(defaultdict, list), lambda kept, x: kept["a"].append(1)), str),
    "a set": (noting(set, lambda kept, x: kept.add(len(kept))), str),
    "a deque": (noting(partial(deque, maxlen=9), lambda kept, x: kept.append(x.detach())), len),
    "a tensor": (noting(lambda: torch.zeros(3), lambda kept, x: kept.add_(1)), torch.Tensor.tolist),
    "torch's generator": (
        noting(lambda: torch.Generator().manual_seed(0), lambda kept, x: torch.rand(1, generator=kept)),
        lambda kept: kept.get_state().tolist(),
    ),
    "Python's generator": (noting(lambda: random.Random(0), lambda kept, x: kept.random()), random.Random.getstate),
    "numpy's generator": (of_numpy, lambda kept: numpy.random.get_state()[2]),
    "a number of its class": (lambda: NotingOfClass(None), lambda kept: (NotingOfClass.number, NotingOfClass.reset())),
    "its parameter": (lambda: NotingInAParameter(None), torch.Tensor.tolist),
    "its class": (lambda: NotingOfClass(None), lambda kept: (len(Noting.of_class), Noting.of_class.clear())),
    "a default": (lambda: NotingByDefault(None), lambda kept: (kept, NotingByDefault.noted.__defaults__[0].clear())),
    "a partial": (lambda: Noting(partial(by_argument, [])), str),
}


def stepped(act: nn.Module, **options: Any) -> nn.Module:
    model = build("llama", num_hidden_layers=1)
    model.model.layers[0].mlp.act_fn = act
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK, **options)
    model(**batch_of(2, 61))
    return model


@pytest.mark.full("0.2 s each", but=("a dict of lists", "its parameter"))
@pytest.mark.parametrize("case", PUT_BACK)
def test_what_can_be_put_back(case: str) -> None:
    made, look = PUT_BACK[case]
    noted = []
    for check in (False, True):
        model = stepped(act := made(), check=check)
        assert (act.calls, act.total) == (1, 1)
        assert not check or "equal the untiled model's" in outcome_of(model), outcome_of(model)
        noted.append(look(act.kept))
    assert noted[0] == noted[1]


LOST_BY = {
    "globals": lambda: Noting(in_globals),
    "a closure": in_a_closure,
    "a module's number": lambda: Noting(lambda act, x: setattr(support.tiny, "CALLS", 1)),
    "a class's number": lambda: Noting(lambda act, x: setattr(SimpleCounts, "number", 1)),
    "the system's generator": noting(random.SystemRandom, lambda kept, x: kept.random()),
}


class SimpleCounts:
    number = 0


@pytest.mark.full("0.2 s each", but=("a closure",))
@pytest.mark.parametrize("case", LOST_BY)
def test_what_users_functions_set_elsewhere_is_not_compared(case: str) -> None:
    act = LOST_BY[case]()
    assert outcome_of(stepped(act)).startswith(
        "not compared: model.layers.0.mlp.act_fn is a Noting that may keep state"
    )
    assert (act.calls, act.total) == (1, 1)


class Holding(nn.Identity):
    def __init__(self, file: io.StringIO):
        super().__init__()
        self.file = file


class Counts(Counter):
    """A user's own."""


LOST = {
    "a file": (io.StringIO, lambda kept, x: kept.write("a")),
    "an iterator": (itertools.count, lambda kept, x: next(kept)),
    "a subclass": (Counts, lambda kept, x: kept.update("a")),
    "an object": (SimpleNamespace, lambda kept, x: setattr(kept, "a", 1)),
}


@pytest.mark.full("0.2 s each", but=("a file-by a closure",))
@pytest.mark.parametrize("how", ["held", "in a list", "by a closure", "by a module's forward", "by a class's forward"])
@pytest.mark.parametrize("case", LOST)
def test_what_cannot_be_put_back(case: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, note = LOST[case][0](), LOST[case][1]
    name, calls = "kept", []

    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        note(kept, x)
        return F.silu(x)

    if how == "held":
        act = Noting(lambda act, x: note(act.kept, x), kept)
    elif how == "in a list":
        act = Noting(lambda act, x: note(act.kept[0], x), [kept])
    else:
        act, name = Noting(lambda act, x: noted(x)), "note"
    if how == "by a module's forward":
        act, name = nn.SiLU(), "forward"
        act.forward = noted
    if how == "by a class's forward":
        monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: noted(x))
        act, name = nn.Tanh(), "forward"
    model = stepped(act)
    said, place = outcome_of(model), f"model.layers.0.mlp.act_fn is a {type(act).__name__}"
    assert said.startswith(f"not compared: {place} that may keep state in {name} (") and "restore; declare it" in said
    assert said in str(seqtile.status(model)) and (calls in ([1], [])) and getattr(act, "calls", 1) == 1


def test_what_is_declared_is_compared_whatever_it_holds() -> None:
    """A declaration repeats the comparison, and says that nothing is kept."""
    act = nn.Sequential(nn.SiLU(), Holding(io.StringIO()))
    model = stepped(act)
    assert outcome_of(model).startswith("not compared: model.layers.0.mlp.act_fn.1 is a Holding that may keep state in")
    seqtile.tokenwise(act)
    assert "so the next step compares again" in outcome_of(model)
    model(**batch_of(2, 61))
    assert "equal the untiled model's" in outcome_of(model)


@seqtile.tokenwise
class Open(nn.Linear):
    file = io.StringIO()


def test_a_declared_class_from_which_torch_derives_another() -> None:
    act = Open(130, 130)
    parametrize.register_parametrization(act, "weight", nn.Identity())
    assert type(act) is not Open
    assert "equal the untiled model's" in outcome_of(stepped(act))


def test_a_generator_of_a_known_module_is_put_back() -> None:
    """PEFT keeps one for each adapter in a dict."""
    states = []
    for check in (False, True):
        config = PveraConfig(target_modules=["v_proj"], r=2, generator_seed=3)
        adapted = get_peft_model(build("llama", num_hidden_layers=1), config)
        model = adapted.get_base_model()
        seqtile.apply_seqtile(model, chunk_tokens=CHUNK, check=check)
        adapted(**batch_of(2, 61))
        assert not check or "equal the untiled model's" in outcome_of(model)
        states.append(model.model.layers[0].self_attn.v_proj.pvera_generator["default"].get_state())
    assert torch.equal(*states) and not torch.equal(states[0], torch.Generator().manual_seed(3).get_state())


@pytest.mark.parametrize("config", [{"size": 3}, (3,), None, 3])
def test_a_module_whose_config_is_of_another_kind(config: Any) -> None:
    model, batch = build("llama"), batch_of(1, 37)
    model.model.layers[1].mlp.act_fn = Noting(lambda self, x: self.kept.append(1), [])
    model.model.layers[1].mlp.config = model.model.layers[1].mlp.act_fn.config = config
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    model(**batch).loss.backward()
    assert "equal the untiled model's" in outcome_of(model), outcome_of(model)
    assert model.model.layers[1].mlp.act_fn.kept == [1]


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class Kinds(enum.Enum):
    PLAIN = 1


class Scale(NamedTuple):
    factor: float


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        return output if Kinds(1) is Kinds.PLAIN and Scale(1.0).factor == 1.0 else None


def test_a_model_of_ones_own_class_and_config() -> None:
    model = OwnModel(OwnConfig(**support.tiny.config_of("llama").to_dict())).train()
    seqtile.apply_seqtile(model, chunk_tokens=CHUNK)
    model(**batch_of(1, 37)).loss.backward()
    assert "equal the untiled model's" in outcome_of(model), outcome_of(model)
