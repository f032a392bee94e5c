#!/bin/sh
# The model on a GPU, in one command: every slot against the reference, every bundled checkpoint through the
# daemon against the third-party logits, rounds in company, sanitizers, and what a pass costs.
#
# usage: run_model.sh BUILD_FOLDER [OUTPUT_FOLDER]
# Needs python3 with numpy, jsonschema and yaml; exit 77 without a device. Logs go to OUTPUT_FOLDER (default:
# a temporary folder, which is kept). TV_BENCH_LAYERS=N also measures N layers of Moonlight's dimensions.
set -eu

here=$(cd -- "$(dirname -- "$0")" && pwd)
source=$(cd -- "$here/../.." && pwd)
build=$(realpath -- "$1")
out=${2:-$(mktemp -d)}
status=0
mkdir -p "$out"
out=$(realpath -- "$out")
TREEVERIFY_CUDA_LIB=${TREEVERIFY_CUDA_LIB:-$build/kernels/cuda/libtreeverify-cuda.so}
export TREEVERIFY_CUDA_LIB
check=$build/tests/check/checkkern
daemon=$build/daemon/treeverifyd
parity=$source/tests/parity
models=$source/tests/models

# step NAME COMMAND...: run it, keep its output, and go on whatever it says
step() {
    name=$1
    shift
    if "$@" > "$out/$name.log" 2>&1; then
        echo "PASS $name"
    else
        code=$?
        [ "$code" -ne 77 ] || { echo "no device"; exit 77; }
        status=1
        echo "FAIL $name"
        tail -n 5 "$out/$name.log"
    fi
}

for seed in 1 2 3; do
    step "slots_$seed" "$check" --backend cuda --seed "$seed"
done
for dtype in f32 bf16; do
    step "refs_$dtype" python3 "$parity/refs.py" "$daemon" "$models" --backend cuda --kv-dtype "$dtype"
    step "batch_$dtype" python3 "$parity/batch.py" "$daemon" "$models/kjv-mla-8m" --backend cuda \
        --kv-dtype "$dtype"
    step "shared_$dtype" python3 "$parity/shared.py" "$daemon" "$models/kjv-mla-8m" --backend cuda \
        --kv-dtype "$dtype"
done
step refs_products python3 "$parity/refs.py" "$daemon" "$models" --backend cuda --kv-dtype bf16 --products bf16
# the sanitizers read every access; racecheck of the rows of 30,000 logits would take minutes
for part in dense experts fused prefill draw; do
    step "memcheck_$part" compute-sanitizer --tool memcheck --error-exitcode 9 "$check" --backend cuda --only "$part"
    [ "$part" = draw ] ||
        step "racecheck_$part" compute-sanitizer --tool racecheck --error-exitcode 9 "$check" --backend cuda --only "$part"
done
step bench "$check" --backend cuda --bench
step bench_model "$build/tests/bench/bench_model" "$models/kjv-mla-8m" 1 512 cuda
cat "$out/bench.log" "$out/bench_model.log"
if [ -n "${TV_BENCH_LAYERS:-}" ]; then
    step make_checkpoint python3 "$source/tests/bench/make_checkpoint.py" \
        "$source/tests/bench/configs/moonlight-16b-a3b/config.json" "$out/moonlight" --layers "$TV_BENCH_LAYERS"
    step bench_moonlight "$build/tests/bench/bench_model" "$out/moonlight" 1 2048 cuda
    rm -rf "$out/moonlight"
    cat "$out/bench_moonlight.log"
fi
exit $status
