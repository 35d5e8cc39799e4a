#!/usr/bin/env bash
# Fifteen minutes on a rented GPU: one call of MINUTES (default 9), and a second one if it follows at once. Calls are in the
# order of what is not yet known:
#   dev/gpu_day.sh OUT next [MINUTES]   the first of these without a GPU's result in benchmark/results
#   dev/gpu_day.sh OUT right            or 1: each kernel once, a few training steps beside the untiled model, attention
#                                       beyond 2**31 elements, the tests
#   dev/gpu_day.sh OUT fast             or 2: loss, MLP and layer beside Hugging Face, Liger and torch; the parts of a tile
#   dev/gpu_day.sh OUT long             or 3: the longest sequences, beside the plan's; how well offload overlaps
# or, instead of the name, a file with steps of its own. It needs bash and python3, no make, git or network.
#   WHEELS=DIR    what that Python lacks, see dev/wheels.sh; default: wheels, if it is there
#   PYTHON=...    default: python3
#   COMMIT=...    names what is measured, where there is no git
#   SIZE=tiny     to rehearse without a GPU
# A step that hangs, dies or fails is noted, and the next one begins. In OUT from the first minute on: log.txt, what every
# step said; summary.txt; found.jsonl; results/, which belongs in benchmark/results. In the end at most 8 files.
set -uo pipefail
if (($# < 2)); then
  echo "usage: dev/gpu_day.sh OUT next|right|fast|long|FILE [MINUTES]" >&2
  exit 2
fi
call=$2
minutes=${3:-9}
[[ -f $call ]] && call=$(realpath "$call")
[[ -f $call ]] || case $call in
  1) call=right ;;
  2) call=fast ;;
  3) call=long ;;
  next | right | fast | long) ;;
  *)
    echo "expected next, right, fast, long or a file of steps; got $call" >&2
    exit 2
    ;;
esac
if [[ ! $minutes =~ ^[1-9][0-9]*$ ]]; then
  echo "expected whole minutes; got $minutes" >&2
  exit 2
fi
end=$((SECONDS + 60 * minutes))
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
wheels=${WHEELS:-wheels}
worst=0
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="src:test:.:$site" PYTHONUNBUFFERED=1
[[ ${SIZE:-} == tiny ]] && export OMP_NUM_THREADS=1 # other processes may hold the cores
if [[ $call == next ]]; then
  call=$("$python" -m benchmark.gpu_day next) || exit
fi
mkdir -p "$out/results"
if head=$(git rev-parse --short HEAD 2>/dev/null); then
  COMMIT=$head$([[ -z $(git status --porcelain --untracked-files=no) ]] || echo +)
fi

note() { echo "$*" | tee -a "$out/summary.txt"; }

# step NAME SECONDS COMMAND...: within that time and what is left of all; SHOW=N of its last lines go into the summary.
step() {
  local name=$1 limit=$(($2 < end - SECONDS ? $2 : end - SECONDS)) started=$SECONDS log=$out/log.txt before code said
  shift 2
  if ((limit < 2)); then
    note "$name: no time left"
    worst=1
    return
  fi
  echo "=== $name: $*" >>"$log"
  before=$(stat -c %s "$log")
  timeout --kill-after="${PATIENCE:-20}" "$limit" "$@" </dev/null >>"$log" 2>&1
  code=$?
  ((code)) && worst=1
  said=$(tail -c +$((before + 1)) "$log" | tail -n "${SHOW:-3}")
  case $code in
    0) note "$name: ended well, $((SECONDS - started)) s" ;;
    124 | 137) note "$name: time was up, or it was killed, after $((SECONDS - started)) s" ;;
    *) note "$name: ended with $code after $((SECONDS - started)) s" ;;
  esac
  sed 's/^/    /' <<<"$said" | tee -a "$out/summary.txt"
  if (($(stat -c %s "$log") > 12000000)); then # a file that is larger than 16 MiB might stay behind
    tail -c 6000000 "$log" >"$log.end" && mv "$log.end" "$log"
  fi
}

minutes_of() { printf "%d.%02d" $(($1 / 60)) $(($1 % 60 * 5 / 3)); }

bench() { # SIZE SECONDS SUBJECTS [OPTION...]: and forty more, in which it is ended
  [[ ${SIZE:-} == tiny ]] && set -- smoke "$2" "$3"
  local options=(--size "$1" --minutes "$(minutes_of "$(($2 > 1 ? $2 : 1))")" --subjects "$3" "${@:4}")
  SHOW=1 step "bench $3" $(($2 + 40)) "$python" -m benchmark.run "${options[@]}" --directory "$out/results" \
    --commit "${COMMIT:-unknown}"
}

left() { echo $((end - SECONDS)); }

call_right() {
  SHOW=40 step machine 100 "$python" -m benchmark.describe_machine "$out/found.jsonl"
  SHOW=60 step kernels 90 "$python" -m benchmark.kernel_checks "$out/found.jsonl"
  SHOW=20 step "few steps" 100 "$python" -m benchmark.few_steps "$out/found.jsonl"
  # each in a process of its own: an illegal access takes the process with it
  SHOW=10 step "attention, all heads" 100 "$python" -m benchmark.long_attention all-heads "$out/found.jsonl"
  SHOW=10 step "attention, a head group" 50 "$python" -m benchmark.long_attention head-group "$out/found.jsonl"
  local tests=(--seconds "$(($(left) - 40))")
  if (($(left) < 80)); then
    note "tests: no time left"
    worst=1
    return
  fi
  [[ ${SIZE:-} == tiny ]] && tests+=(--workers 1 --device=cpu -k "extreme_gates or offsets")
  SHOW=1 step tests $(($(left) - 10)) "$python" -m dev.gpu_tests "${tests[@]}"
  grep -aE '^(FAILED|ERROR) |^=+ .*(passed|failed|error).* in ' "$out/log.txt" | tail -n 60 | tee -a "$out/summary.txt"
}

call_fast() {
  SHOW=40 step machine 100 "$python" -m benchmark.describe_machine "$out/found.jsonl"
  bench first $(($(left) - 130)) "linear_cross_entropy gated_mlp decoder_layer"
  SHOW=20 step "kernel times" 75 "$python" -m benchmark.kernel_times "$out/found.jsonl"
}

call_long() {
  # the memory of README's picture, of which a plan reserves 1 GiB for CUDA: 63 GiB
  bench quick $(($(left) - 60)) "model_step offload" --memory-limit 67.6
}

if [[ -d $wheels ]]; then
  step wheels 60 "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$wheels"/*.whl
fi
# what would fail in every step is said at once
ready='import os, rich, torch, transformers
tiny = os.environ.get("SIZE") == "tiny"
assert tiny or torch.cuda.is_available(), "torch finds no GPU; SIZE=tiny rehearses without one"'
if [[ ! -f $call ]] && ! said=$("$python" -W ignore -c "$ready" 2>&1); then
  note "$python cannot run this: ${said##*$'\n'}"
  exit 2
fi
if [[ -f $call ]]; then
  source "$call"
else
  "call_$call"
  "$python" -m benchmark.gpu_day collect "$call" "$out" --commit "${COMMIT:-unknown}" 2>&1 | tee -a "$out/summary.txt"
fi
"$python" -m benchmark.report "$out/results" 2>&1 | tee -a "$out/summary.txt"
shopt -s nullglob
pictures=("$out"/results/*.png "$out"/results/*.gz)
if ((${#pictures[@]})); then
  tar -czf "$out/pictures.tar.gz" -C "$out/results" "${pictures[@]##*/}" && rm "${pictures[@]}"
fi
exit $worst
