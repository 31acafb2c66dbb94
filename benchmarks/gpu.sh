#!/bin/sh
# Usage: benchmarks/gpu.sh [OUT]
#
# All that a GPU is to show, in one call of less than eight minutes: what tokamax and XLA make of the layer (correctness
# against the float64 oracle, float32 and bfloat16, against the dense limit, the shape of one expert-parallel rank of
# DeepSeek-V3 included), and the training step with retry on and off. Writes tables and JSON to OUT, benchmarks/gpu if
# not given. Needs a python3 with jax for CUDA and tokamax, or a network to install them from.
set -u
cd "$(dirname "$0")/.."
out=${1:-benchmarks/gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
if ! "$python" -c 'import jax, flax, optax, tokamax' 2>/dev/null; then
    sh .ci/install "$python" .venv-gpu gpu,train || exit 1
    python=.venv-gpu/bin/python
fi
"$python" -c 'import jax; print(jax.devices())' || exit 1

status=0
run() {  # NAME SECONDS ARGUMENT...
    name=$1 seconds=$2
    shift 2
    echo "== $*"
    timeout "$seconds" "$python" -m "$@" --json "$out/$name.json" >"$out/$name.txt" 2>&1 || { status=1; echo "failed: $?"; }
    cat "$out/$name.txt"
}
run layer_float32 110 benchmarks.layer --tables race --shapes A,B --rounds 15 --peers gshard
run layer_bfloat16 90 benchmarks.layer --tables race --shapes A,B --rounds 15 --peers gshard --dtype bfloat16
run layer_deepseek 150 benchmarks.layer --tables race --shapes rank --rounds 7 --peers ragged_dot --dtype bfloat16
run runner 90 benchmarks.runner --rounds 20
exit $status
