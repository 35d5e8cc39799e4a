"""The subpackages and what each may import: imports run in one direction."""

import ast
import sys
from functools import cache
from pathlib import Path

from seqtile.protocols import SequenceParallelAttention, SequenceParallelFunction
from seqtile.sp.attention import UlyssesAttention, ulysses_attention
from seqtile.sp.groups import ALONE
from seqtile.sp.layout import ShardedLayout

SOURCE = Path(__file__).parent.parent / "src" / "seqtile"

SUBPACKAGES = {  # subpackage -> subpackages that it may import
    "arch": set(),
    "limits": set(),
    "rules": set(),
    "protocols": set(),
    "renamed": set(),
    "declared": set(),
    "tensor_like": set(),
    "unwrapped": set(),
    "sdpa": {"limits"},
    "kernels": set(),
    "ops": {"kernels", "limits", "protocols", "rules"},
    "modules": {"ops"},
    "attention": {"limits", "ops", "rules", "sdpa"},
    "models": {
        "attention",
        "arch",
        "declared",
        "limits",
        "protocols",
        "renamed",
        "rules",
        "sdpa",
        "tensor_like",
        "unwrapped",
        "ops",
        "modules",
        "proof",
    },
    "proof": {"declared", "protocols", "renamed", "ops", "models"},
    "offload": {"renamed", "unwrapped"},
    "sp": {"attention", "limits", "protocols", "renamed", "rules", "sdpa", "tensor_like", "unwrapped", "ops"},
    "memory": {"arch", "attention", "renamed", "rules", "models", "proof"},
    "integrations": {"ops", "models", "offload", "fitting", "sp", "unwrapped"},
    "fitting": {"attention", "models", "offload", "memory", "renamed", "limits", "unwrapped"},
    "evaluation": {"models", "unwrapped"},
    "recipes": {
        *("fitting", "evaluation", "arch", "ops", "modules", "models", "offload", "renamed", "sp", "memory", "limits"),
        *("integrations", "proof", "unwrapped", "__init__"),
    },
    "probe": {"limits", "memory", "sp", "__init__"},
    "cli": {"limits", "recipes", "memory", "probe", "__init__"},
    "__init__": {"ops", "modules", "models", "offload", "sp", "memory", "fitting", "evaluation", "integrations"},
}
FOREIGN = {  # package -> subpackages that may import it; no one may import an unlisted package
    "torch": set(SUBPACKAGES) - {"arch", "limits", "renamed", "rules"},
    "triton": {"kernels"},
    "filelock": {"offload", "recipes"},
    "deepspeed": {"probe"},
    "transformers": {
        "attention",
        "models",
        "proof",
        "memory",
        "sdpa",
        "sp",
        "recipes",
        "offload",
        "integrations",
        "evaluation",
        "probe",
        "unwrapped",
    },
    "accelerate": {"integrations", "sp", "probe"},
    "bitsandbytes": {"models"},
    "trl": {"integrations", "probe", "recipes"},
    "liger_kernel": {"probe"},
    "datasets": {"probe", "recipes"},
    "tokenizers": {"probe"},
    "numpy": {"recipes"},
    "peft": {"recipes"},
    "tqdm": {"recipes"},
    "yaml": {"recipes"},
    "axolotl": {"integrations"},
    "pydantic": {"integrations"},
    "huggingface_hub": {"recipes"},
    "packaging": {"recipes"},
    "matplotlib": {"recipes"},
    "rich": {"recipes", "cli"},
    "typer": {"recipes", "cli"},
}
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Returns all nodes of a file's tree, the module first."""
    return list(ast.walk(ast.parse(file.read_text())))


@cache
def imports_of(file: Path) -> set[str]:
    """Returns the modules that a file imports anywhere."""
    names = set()
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            inside = {f"seqtile.{alias.name}" for alias in node.names if alias.name in SUBPACKAGES}
            names |= (inside if node.module == "seqtile" else set()) or {node.module}
    return names


def imports_for_types(file: Path) -> set[str]:
    """Returns the modules that only a type checker imports."""
    unread = [node for node in nodes_of(file) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    inside = [each for node in unread for each in ast.walk(node)]
    return {each.module for each in inside if isinstance(each, ast.ImportFrom)}


def _imports(file: Path, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in imports_of(file))


def subpackage_of(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py") if parts else "__init__"


def test_arrows() -> None:
    for file in FILES:
        subpackage = subpackage_of(file.relative_to(SOURCE).parts)
        for name in imports_of(file):
            package, *rest = name.split(".")
            if package == "seqtile":
                target = subpackage_of(tuple(rest))
                assert target == subpackage or target in SUBPACKAGES[subpackage], f"{file} imports {name}"
            elif package not in sys.stdlib_module_names:
                assert subpackage in FOREIGN.get(package, set()), f"{file} imports {name}"


def test_the_page_names_every_subpackage() -> None:
    page = (SOURCE.parents[1] / "docs" / "layout.md").read_text()
    named = {line.split()[0].removesuffix("/") for line in page.splitlines() if line.startswith("  ")}
    assert named == SUBPACKAGES.keys()


def test_a_plan_answers_without_torch() -> None:
    """In memory, only these two files need torch; the other files do not import them."""
    slow = {"measure.py", "simulate.py"}
    for file in (SOURCE / "memory").glob("*.py"):
        needs = {name.split(".")[0] for name in imports_of(file)} & {"torch", "transformers"}
        slow_imports = ("seqtile.models", "seqtile.proof", "seqtile.memory.simulate", "seqtile.memory.measure")
        needs |= {name for name in imports_of(file) if name.startswith(slow_imports)}
        assert bool(needs) == (file.name in slow), file


def test_no_circle_of_files() -> None:
    """Also none of subpackages, with the one exception that apply.py of models imports proof, which imports models."""
    assert {subpackage_of(file.relative_to(SOURCE).parts) for file in FILES} <= SUBPACKAGES.keys()
    importers = {file.name for file in (SOURCE / "models").rglob("*.py") if _imports(file, "seqtile.proof")}
    assert importers == {"apply.py"}
    subpackages = {
        name: may - ({"proof"} if name == "models" else set())
        for name, may in SUBPACKAGES.items()
        if name != "__init__"
    }
    files = {
        ".".join(("seqtile", *file.relative_to(SOURCE).with_suffix("").parts)): imports_of(file)
        - imports_for_types(file)
        for file in FILES
        if file.name != "__init__.py"
    }
    for left in (subpackages, files):
        while free := {name for name, imported in left.items() if not imported & left.keys()}:
            left = {name: imported for name, imported in left.items() if name not in free}
        assert not left


def test_tests_and_benchmarks_stand_by_themselves() -> None:
    """Shared code of tests is in test/support. Benchmarks do not import it, and tests do not import dev, but for those
    of dev's own rules."""
    root = SOURCE.parents[1]
    of_tests = {path.stem for path in (root / "test").iterdir()}
    for folder, foreign in (("benchmark", of_tests), ("test", {"dev"})):
        of_dev = ("bench/test_check_cuda.py", "book/test_length.py", "book/test_options.py")
        for file in sorted({*(root / folder).rglob("*.py")} - {root / "test" / name for name in of_dev}):
            assert not {name.split(".")[0] for name in imports_of(file)} & foreign, file


def test_kernels_know_no_autograd_and_ops_no_modules() -> None:
    for file in (SOURCE / "kernels").glob("*.py"):
        names = {node.attr for node in nodes_of(file) if isinstance(node, ast.Attribute)}
        assert not names & {"autograd", "requires_grad", "backward", "grad_fn"}, file
    for file in (SOURCE / "ops").rglob("*.py"):
        assert not imports_of(file) & {"torch.nn", "torch.distributed"}, file
        assert "nn.Module" not in file.read_text(), file


def test_attention_over_ranks_crosses_subpackages_by_its_protocols() -> None:
    """Models and ops use sp's attention only through protocols; no module sets an attribute on another's function."""
    assert isinstance(ulysses_attention, SequenceParallelFunction)
    layout = ShardedLayout(ALONE, 8, (((0, 8),),), "sdpa")
    steps = UlyssesAttention(None, layout, None, {}, 2, 1)
    assert isinstance(steps, SequenceParallelAttention) and isinstance(steps.in_groups(1), SequenceParallelAttention)
    protocols = (SequenceParallelAttention, SequenceParallelFunction)
    crossing = {name for protocol in protocols for name in vars(protocol) if not name.startswith("_")}
    for file in FILES:
        for node in nodes_of(file)[0].body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            assert not any(isinstance(target, ast.Attribute) for target in targets), f"{file}: {ast.unparse(node)}"
        for node in nodes_of(file):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            ):
                asked = {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
                assert not asked & crossing, f"{file}: {ast.unparse(node)}"


CONTAINERS = {"dict", "list", "set", "defaultdict", "deque", "Counter", "WeakKeyDictionary", "WeakValueDictionary"}
CONTAINERS |= {"WeakSet"}


def is_empty_container(value: ast.AST | None) -> bool:
    """Whether a value is an empty dict, list or set, or a call that creates a container to be filled later."""
    if isinstance(value, ast.Dict | ast.List):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    return isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in CONTAINERS


def test_laws_of_the_source() -> None:
    """No environment variable but in what `seqtile env` reports, no bare except, no assignment into torch, no
    process-wide state except one registry, the switch between Triton and PyTorch, and what was declared last."""
    registries, switches = [], []
    for file in FILES:
        for node in nodes_of(file):
            if file.name != "cli.py":
                assert not (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")), file
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{file}: bare except"
            switches += [f"{file.name}: {name}" for name in node.names] if isinstance(node, ast.Global) else []
            if isinstance(node, ast.Assign | ast.AugAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    assert not ast.unparse(target).startswith(("torch.", "F.")), f"{file}: assigns into torch"
        for node in nodes_of(file)[0].body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_empty_container(node.value):
                registries.append(f"{file.name}: {ast.unparse(node).split(' = ')[0].split(':')[0]}")
    assert registries == ["apply.py: _CLASSES"]
    assert sorted(switches) == ["declared.py: latest", "dispatch.py: _triton_wanted"]


def test_files_and_functions_stay_short() -> None:
    for file in FILES:
        assert len(file.read_text().splitlines()) <= 400, file
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                assert lines <= 60, f"{file}: {node.name} is {lines} lines long, signature and docstring aside"
