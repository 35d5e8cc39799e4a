# make help lists the targets. Every target that needs the environment makes it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := $(VENV)/transformers-oldest
AXOLOTL := $(VENV)/axolotl
TRL := $(VENV)/trl-oldest
STAMP := $(VENV)/.up-to-date
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Many images set it. Without compiled files, each of the many processes of the tests compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal --durations 50

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-gpu test-dist docs models predict check-cuda check-oldest lint format bench bench-smoke table

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv from dev/constraints.txt; nothing to do when it is up to date

$(STAMP): pyproject.toml dev/constraints.txt dev/no-deps.txt dev/transformers-oldest.txt dev/axolotl.txt dev/trl-oldest.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c dev/constraints.txt torch
	$(PIP) -c dev/constraints.txt -e '.[dev,docs,bench,demo,liger,deepspeed]'
	$(PIP) --no-deps -r dev/no-deps.txt
	rm -rf $(OLDEST) $(AXOLOTL) $(TRL)
	$(PIP) --no-deps --target $(OLDEST) -r dev/transformers-oldest.txt
	$(PIP) --no-deps --target $(AXOLOTL) -r dev/axolotl.txt
	$(PIP) --no-deps --target $(TRL) -r dev/trl-oldest.txt
	touch $@

demo: $(STAMP)  ## fine-tune a real model on real long documents, untiled and tiled, compare, and evaluate; LONG=1: on 8,192 tokens
	$(BIN)/seqtile finetune --compare --seq-len $(if $(LONG),8192,3584) --steps 2 --output runs/demo
	@echo "A document that was not trained on, before and after:"
	$(BIN)/seqtile evaluate smollm2-135m docs/quickstart.md
	$(BIN)/seqtile evaluate runs/demo/model docs/quickstart.md --output runs/demo

INTERPRETED := test/kernels test/ops test/models/test_gradients.py test/models/test_layer_gradients.py \
	test/models/test_liger_orders.py test/distributed/test_data_parallel.py
# Axolotl's tests come first: one worker runs what they share, 15 s, while the other runs the rest.
ON_OLDEST := test/integrations/test_axolotl.py test/attention/test_varlen.py test/models/test_drift.py test/models/test_patch.py test/models/test_layer.py \
	test/models/test_layer_holes.py test/sp/test_documents.py test/recipes/test_resume.py \
	test/recipes/test_save.py test/recipes/test_finetune.py::test_chats_with_adapters
ON_OLDEST_TRL := $(addprefix test/recipes/test_,finetune.py on_ranks.py resume.py save.py)

test: $(STAMP)  ## the tests of every day, without a GPU: as they are, in Triton's interpreter, on the oldest transformers and TRL
	$(PYTEST) -m "not gpu"
	TRITON_INTERPRET=1 $(PYTEST) -m "not gpu" $(INTERPRETED)
	PYTHONPATH=$(TRL):$(AXOLOTL):$(OLDEST) $(PYTEST) -m "not gpu and not dist" -k "not compile" $(ON_OLDEST)

test-dist: $(STAMP)  ## of them, those that start several processes
	$(PYTEST) -m dist

test-all: $(STAMP)  ## every case of every test, see test/support/choice.py, and of every benchmark at tiny size: hours
	$(PYTEST) --full -m "not gpu"
	TRITON_INTERPRET=1 $(PYTEST) --full -m "not gpu" $(INTERPRETED)
	PYTHONPATH=$(OLDEST) $(PYTEST) --full -m "not gpu and not dist" test/models test/proof test/sp
	PYTHONPATH=$(AXOLOTL):$(OLDEST) $(BIN)/python -m pytest -q --full test/integrations/test_axolotl.py
	PYTHONPATH=$(TRL) $(PYTEST) --full -m "not gpu" $(ON_OLDEST_TRL)
	$(BIN)/python -m benchmark.run --size small

# With WHEELS=DIR: the python at hand (PYTHON=...), and of what it lacks the wheels in DIR, see dev/wheels.sh; no network.
ifdef WHEELS
WITH_WHEELS := $(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target build/wheels $(WHEELS)/*.whl
endif

test-gpu:  ## what a GPU can break, with the python at hand (PYTHON=...): 5 minutes; WHEELS=DIR brings what it lacks
	$(WITH_WHEELS)
	PYTHONPATH=src$(if $(WHEELS),:build/wheels) $(PYTHON) -m dev.gpu_tests

docs: $(STAMP)  ## the book, docs/, as a site in build/docs; a warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -n -E -b html docs build/docs

models: $(STAMP)  ## prove every model type of transformers, and write the table in docs/models.md: two minutes
	PYTHONPATH=test $(BIN)/python -m dev.models
	PYTHONPATH=test:$(OLDEST) $(BIN)/python -m dev.models

predict: $(STAMP)  ## predicted times on a GPU, without one; not measured
	$(BIN)/python -m benchmark.predicted_times

CUDA := .venv-cuda
check-cuda:  ## the CUDA branch on fake tensors, with a torch built for CUDA in an environment of its own (4.5 GB), without a GPU
	test -d $(CUDA) || $(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet torch==2.11.0 triton==3.6.0 transformers==5.17.0 numpy
	$(CUDA)/bin/python -m dev.check_cuda

# The core of the tests; what torch.compile makes of a graph is another thing in each release of torch, and held for one.
ON_OLDEST_TORCH := test/ops test/kernels test/modules test/offload test/memory test/models/test_gradients.py test/models/test_forward.py \
	test/models/test_layer.py test/models/test_layer_gradients.py test/models/test_patch.py test/models/test_training_loops.py
check-oldest:  ## the core of the tests on the oldest torch that is promised, in an environment of its own (7 GB), without a GPU
	test -d .venv-oldest || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet torch==2.10.0 transformers==5.16.0 accelerate liger-kernel peft \
	  hypothesis pytest pytest-benchmark pytest-timeout pytest-xdist
	PYTHONPATH=src .venv-oldest/bin/python -m pytest -q -n 2 --dist worksteal -m "not gpu and not dist" \
	  -k "not compil and not graph" $(ON_OLDEST_TORCH)

lint: $(STAMP)  ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## mend style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

BENCHMARK := -m benchmark.run $(if $(BENCH),--size $(BENCH)) $(if $(SUBJECTS),--subjects "$(SUBJECTS)") \
	$(if $(MEMORY_LIMIT),--memory-limit $(MEMORY_LIMIT)) $(if $(COMMIT),--commit $(COMMIT)) $(if $(MINUTES),--minutes $(MINUTES)) \
	$(if $(DIRECTORY),--directory $(DIRECTORY))
ifdef WHEELS
bench:
	$(WITH_WHEELS)
	PYTHONPATH=src:build/wheels $(PYTHON) $(BENCHMARK)
else
bench: $(STAMP)  ## side by side with its peers on this GPU: 30 minutes; BENCH=quick 10; MEMORY_LIMIT=80 (GB); SUBJECTS="gated_mlp ..."
	$(BIN)/python $(BENCHMARK)
endif

bench-smoke: $(STAMP)  ## every benchmark, one case of tiny size each, without a GPU
	$(BIN)/python -m benchmark.run --size smoke

table: $(STAMP)  ## what the pages show of plans, of options and of benchmark/results, and README's picture; these in the terminal
	$(BIN)/python -m benchmark.pages
	$(BIN)/python -m dev.options
