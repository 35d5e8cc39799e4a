"""Hugging Face's tests that every model must pass, on classes that seqtile tiles by four tokens.

`hugging_face_models` has the models. PyPI's source of transformers has these tests, and not the files beside them that
they import: where those are missing, empty classes stand in, and the tests in them (generation, export) are not run.
"""

import sys
from importlib.util import find_spec
from types import ModuleType

BESIDE = {
    "tests.exporters.test_export": "ExportTesterMixin",
    "tests.generation.test_utils": "GenerationTesterMixin",
}
mode = "mlp"


def install(wanted: str) -> None:
    global mode
    mode = wanted
    for name, of_tests in BESIDE.items():
        if not found(name):
            module = ModuleType(name)
            setattr(module, of_tests, type(of_tests, (), {}))
            package = ModuleType(name.rpartition(".")[0])
            package.__path__ = []
            sys.modules |= {package.__name__: package, name: module}


def found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
