#!/usr/bin/env bash
# Gathers what a GPU machine without a network lacks for `make bench WHEELS=DIR` and `make test-gpu WHEELS=DIR`: the peers,
# and what runs tests beside each other, for its Python on x86-64 Linux.
# It has torch, triton, transformers, pytest, pytest-benchmark, rich, typer and matplotlib itself.
#   dev/wheels.sh DIR [PYTHON_VERSION]     e.g. dev/wheels.sh wheels 3.12; QUACK=1 adds QuACK, which is 100 MB
set -euo pipefail
dir=${1:?expected a directory}
version=${2:-$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
mkdir -p "$dir"
packages=(liger-kernel==0.8.5 cut-cross-entropy==25.1.1 einops hjson pydantic==2.12.5 pydantic-core==2.41.5)
packages+=(annotated-types typing-inspection py-cpuinfo msgpack ninja pytest-timeout)
packages+=(pytest-xdist execnet hypothesis sortedcontainers)
if [[ ${QUACK:-} ]]; then
  packages+=(quack-kernels apache-tvm-ffi torch-c-dlpack-ext nvidia-cutlass-dsl)
  packages+=(nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu13)
fi
platforms=()
for glibc in 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64)
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
  "${platforms[@]}" --dest "$dir" "${packages[@]}"
python3 -m pip wheel --quiet --no-deps --wheel-dir "$dir" deepspeed==0.19.8  # of which there is no wheel: pure Python
