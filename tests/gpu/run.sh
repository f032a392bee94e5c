#!/bin/sh
# Everything that needs a GPU, in one command: example, reference bundles, random shapes and
# properties, sanitizers on small shapes, and the benchmark.
#
# usage: run.sh LIBRARY [TEST_VERIFY_ATTN BUNDLE_FOLDER] [OUTPUT_FOLDER]
#   LIBRARY is libtreeverify-cuda.so; bundles come from gen_verify_attn_refs.py.
# Needs python3 with torch and numpy; exit 77 without a device. Logs go to OUTPUT_FOLDER (default:
# a temporary folder, which is kept).
set -eu

here=$(cd -- "$(dirname -- "$0")" && pwd)
library=$(realpath -- "$1")
program=${2:-}
bundles=${3:-}
out=${4:-$(mktemp -d)}
status=0
mkdir -p "$out"
out=$(realpath -- "$out")
if [ -n "$program" ]; then
    program=$(realpath -- "$program")
    bundles=$(realpath -- "$bundles")
fi
cd "$here"
python3 -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 77)'

# step NAME COMMAND...: run it, keep its output, and go on whatever it says
step() {
    name=$1
    shift
    if "$@" > "$out/$name.log" 2>&1; then
        echo "PASS $name"
    else
        status=1
        echo "FAIL $name"
        tail -n 5 "$out/$name.log"
    fi
}

step example python3 example_torch.py "$library"
if [ -n "$program" ]; then
    export TREEVERIFY_CUDA_LIB="$library"
    step bundles_naive sh -c 'cd "$1" && "$2" *.kdtr --backend cuda' sh "$bundles" "$program"
    step bundles_flash sh -c 'cd "$1" && "$2" *.kdtr --backend cuda --flash' sh "$bundles" "$program"
fi
step shapes python3 check_verify_attn.py "$library"
# the sanitizers read every access, so they get all bundles but those of the longest prefixes
if [ -n "$program" ]; then
    for tool in memcheck racecheck initcheck synccheck; do
        step "$tool" sh -c 'cd "$1" && short=$(ls *.kdtr | grep -v -e _p30000_ -e _p185000_)
        for form in "" --flash; do
            compute-sanitizer --tool "$3" --error-exitcode 9 "$2" $short --backend cuda $form || exit 1
        done' sh "$bundles" "$program" "$tool"
    done
fi
step bench python3 bench_verify_attn.py "$library" --extra --json "$out/bench.json"
cat "$out/bench.log"
exit $status
