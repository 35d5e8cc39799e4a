#!/usr/bin/env bash
# A borrowed GPU's time, in three calls of MINUTES each (default 9; from 20 on the contests and the ladder are in full):
#   dev/gpu_day.sh OUT 1 [MINUTES]   the machine, each kernel once, how long the parts of a tile take, loss, MLP and layer
#                                    beside Hugging Face and Liger, the tests
#   dev/gpu_day.sh OUT 2 [MINUTES]   the contests of loss, MLP, layer and offload
#   dev/gpu_day.sh OUT 3 [MINUTES]   the ladder
# or, instead of the number, a file with steps of its own. It needs bash and python3, no make, git or network.
#   WHEELS=DIR    what that Python lacks, see dev/wheels.sh; default: wheels, if it is there
#   COMMIT=...    names what is measured, where there is no git
#   SIZE=tiny     to rehearse without a GPU
# A step that hangs, dies or fails is noted, and the next one begins. In OUT from the first minute on: log.txt, what every
# step said; summary.txt; found.jsonl; results/. In the end at most 8 files.
set -uo pipefail
call=${2:?expected a directory, and 1, 2, 3 or a file of steps}
minutes=${3:-9}
if [[ -f $call ]]; then
  call=$(realpath "$call")
elif [[ $call != [123] ]]; then
  echo "expected 1, 2, 3 or a file of steps; got $call" >&2
  exit 2
fi
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
mkdir -p "$out/results"

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

bench() { # SIZE SECONDS SUBJECTS: and forty more, in which it is ended
  [[ ${SIZE:-} == tiny ]] && set -- smoke "$2" "$3"
  local options=(--size "$1" --minutes "$(minutes_of "$2")" --subjects "$3" --directory "$out/results")
  SHOW=1 step "bench $3" $(($2 + 40)) "$python" -m benchmark.run "${options[@]}" ${COMMIT:+--commit "$COMMIT"}
}

call_1() {
  SHOW=40 step probe 60 "$python" -m benchmark.probe "$out/found.jsonl"
  SHOW=40 step canary 90 "$python" -m benchmark.canary "$out/found.jsonl"
  SHOW=20 step "kernel times" 75 "$python" -m benchmark.kernel_times "$out/found.jsonl"
  bench first $((20 * minutes)) "linear_cross_entropy gated_mlp decoder_layer"
  local left=$((end - SECONDS - 30))
  if ((left < 40)); then
    note "tests: no time left"
    worst=1
    return
  fi
  local tests=(--seconds "$left")
  [[ ${SIZE:-} == tiny ]] && tests+=(--workers 1 --device=cpu -k "extreme_gates or offsets")
  SHOW=1 step tests $((left + 30)) "$python" -m dev.gpu_tests "${tests[@]}"
  grep -aE '^(FAILED|ERROR) |^=+ .*(passed|failed|error).* in ' "$out/log.txt" | tail -n 60 | tee -a "$out/summary.txt"
}

rest() { # SUBJECTS: in all that is left
  local size=quick left=$((end - SECONDS - 60))
  ((minutes < 20)) || size=full
  bench $size $((left > 1 ? left : 1)) "$1"
}

call_2() { rest "linear_cross_entropy gated_mlp decoder_layer offload"; }

call_3() { rest model_step; }

if [[ -d $wheels ]]; then
  step wheels 60 "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$wheels"/*.whl
fi
if [[ -f $call ]]; then
  source "$call"
else
  "call_$call"
fi
"$python" -m benchmark.summary "$out/results" 2>&1 | tee -a "$out/summary.txt"
shopt -s nullglob
pictures=("$out"/results/*.png "$out"/results/*.gz)
if ((${#pictures[@]})); then
  tar -czf "$out/pictures.tar.gz" -C "$out/results" "${pictures[@]##*/}" && rm "${pictures[@]}"
fi
exit $worst
