#!/usr/bin/env bash
# run-all.sh - build and run every test; the last line is "N passed, N failed".
#
# usage: tests/run-all.sh [BUILD...]    of: plain address thread fuzz cuda (default: all that apply)
# Installs missing packages; a browser and its like, which a test or two start, may be missing still, and those say so.
# plain is the whole suite; address (ASan, UBSan) and thread (TSan) repeat it with loops shortened by TV_TEST_SCALE,
# without the checks of the sources and of the clients' own ways and, under TSan, without what has no threads to race
# (tests/meson.build); fuzz runs every libFuzzer target (clang, ASan, UBSan) for TV_FUZZ_SECONDS (60) each, from its
# corpus; cuda compiles the CUDA library where nvcc is found. A compiler's warning fails its build. plain and address run
# on a KV pool filled with NaN wherever nothing is held (TREEVERIFY_POISON, read by fixtures and daemons), thread on the
# pool as shipped. A test that is skipped counts as neither. Exit 1 when anything failed or nothing ran.
set -uo pipefail
cd "$(dirname "$0")/.."
. deploy/packages.sh

# the system's programs, whose packages are installed below, before any others in the path
PATH="/usr/bin:/bin:$PATH"
wanted="${*:-plain address thread fuzz cuda}"
jobs=$(nproc)
tests=$((jobs + 1)) # at a time: many of them wait for a clock
logs=()
failed_builds=0

# build NAME SCALE MESON-OPTION...
build() {
    local name=$1 scale=$2
    shift 2
    local dir=build/test-$name targets=${build_targets:-all}
    echo "== $name"
    if { [ -f $dir/build.ninja ] || meson setup $dir -Dwerror=true "$@" >$dir.setup.log 2>&1 ||
         { cat $dir.setup.log; false; }; } && ninja -C $dir -j "$jobs" --quiet $targets; then
        rm -f $dir/meson-logs/testlog.json
        if [ -z "$(meson test -C $dir --no-rebuild --list "${test_options[@]}" 2>/dev/null)" ]; then
            echo "$name: built, and nothing to run in it"
            return
        fi
        TV_TEST_SCALE=$scale meson test -C $dir --no-rebuild --num-processes "$tests" --print-errorlogs \
            "${test_options[@]}"
        logs+=("$dir/meson-logs/testlog.json")
    else
        echo "$name does not build"
        failed_builds=$((failed_builds + 1))
    fi
}

count() {
    python3 - "$failed_builds" "${logs[@]}" <<'PY'
import json, re, sys
passed, failed, skipped = 0, int(sys.argv[1]), 0
for path in sys.argv[2:]:
    try:
        lines = open(path, encoding="utf-8").read().splitlines()
    except OSError:
        print(f"{path}: no test ran")
        failed += 1
        continue
    for line in lines:
        test = json.loads(line)
        if test["result"] in ("OK", "EXPECTEDFAIL"):
            passed += 1
            # the last lines of unittest ("OK (skipped=2)") and of pytest ("5 passed, 2 skipped in 1.20s")
            said = (test.get("stdout") or "") + "\n" + (test.get("stderr") or "")
            parts = re.search(r"^OK \(skipped=(\d+)\)$|^\d+ passed, (\d+) skipped\b.* in [0-9.]+s", said, re.M)
            if parts:
                print(f"skipped: {path.split('/')[1]}: {parts[1] or parts[2]} of the parts of {test['name']}")
        elif test["result"] in ("SKIP", "IGNORED"):
            skipped += 1
            print(f"skipped: {path.split('/')[1]}: {test['name']}")
        else:
            failed += 1
            print(f"failed: {path.split('/')[1]}: {test['name']} ({test['result']})")
print(f"{passed} passed, {failed} failed")
sys.exit(1 if failed or not passed else 0)
PY
}

if ! tv_packages_install $tv_packages_build $tv_packages_test $tv_packages_package; then
    failed_builds=$((failed_builds + 1))
fi
if ! tv_packages_install $tv_packages_programs; then
    echo "not installed: $tv_packages_programs"
fi
mkdir -p build
# what Debian does not have, from PyPI in a folder of its own; its tests are skipped where it cannot be had
extras=$PWD/build/extras
if [ ! -e "$extras/complete" ]; then
    python3 -m venv --system-site-packages "$extras" &&
        timeout 300 "$extras/bin/pip" install --quiet --disable-pip-version-check $tv_python_test &&
        timeout 60 "$extras/bin/pip" install --quiet --disable-pip-version-check --no-deps $tv_python_test_alone &&
        touch "$extras/complete" || echo "not from PyPI: $tv_python_test $tv_python_test_alone"
fi
if [ ! -e "$extras/unpacked" ] && [ ! -x /usr/bin/promtool ]; then
    tv_packages_unpack "$extras/unpacked" $tv_packages_unpacked || echo "not unpacked: $tv_packages_unpacked"
fi
# and what must not meet Debian's modules, which it has in other versions: alone in another
contract=$PWD/build/contract
if [ ! -e "$contract/complete" ]; then
    python3 -m venv "$contract" &&
        timeout 300 "$contract/bin/pip" install --quiet --disable-pip-version-check $tv_python_contract &&
        touch "$contract/complete" || echo "not from PyPI: $tv_python_contract"
fi
[ -e "$contract/complete" ] && export TV_SCHEMATHESIS="$contract/bin/schemathesis"
PYTHONPATH=$("$extras/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
PATH="$PATH:$extras/bin:$extras/unpacked/usr/bin"
export PYTHONPATH
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0
export TSAN_OPTIONS=halt_on_error=1

for name in $wanted; do
    test_options=()
    build_targets=
    case $name in
    plain)
        export TREEVERIFY_POISON=on
        build plain "${TV_TEST_SCALE:-1}" -Dcuda=disabled
        ;;
    address)
        export TREEVERIFY_POISON=on
        export TV_KDTR_GEN_ARGS="--only h8_" # the small bundles
        test_options=(--timeout-multiplier 4 --no-suite fence --no-suite client)
        build address 0.1 -Dcuda=disabled -Db_sanitize=address,undefined -Db_lundef=false
        ;;
    thread)
        export TREEVERIFY_POISON=off
        export TV_KDTR_GEN_ARGS="--only h8_"
        test_options=(--timeout-multiplier 6 --no-suite fence --no-suite client --no-suite alone)
        build thread 0.1 -Dcuda=disabled -Db_sanitize=thread -Db_lundef=false
        ;;
    fuzz)
        if echo 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d && n > 99 ? 0 : 0; }' |
            clang-14 -fsanitize=fuzzer,address,undefined -x c - -o build/fuzzer-probe 2>/dev/null; then
            test_options=(--suite fuzz)
            build_targets=fuzzers
            CC=clang-14 build fuzz "${TV_TEST_SCALE:-1}" -Dcuda=disabled -Dfuzzing=true -Doptimization=1 \
                -Db_sanitize=address,undefined -Db_lundef=false
        else
            echo "== fuzz: no clang-14 with libFuzzer; the corpora are replayed by the other builds"
        fi
        ;;
    cuda)
        unset TV_KDTR_GEN_ARGS
        if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
            test_options=(--suite gpu)
            build cuda "${TV_TEST_SCALE:-1}" -Dcuda=enabled
        else
            echo "== cuda: no nvcc, nothing is built"
        fi
        ;;
    *)
        echo "no build called $name" >&2
        failed_builds=$((failed_builds + 1))
        ;;
    esac
done
count
