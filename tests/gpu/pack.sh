#!/bin/sh
# Everything that session.sh runs, in one archive that needs neither packages nor a network: programs of a build with
# their libraries, and the Python packages of the tests' contract check.
#
# usage: pack.sh BUILD_FOLDER ARCHIVE (.tar.xz)
# Programs lie where a build has them, each behind a line of shell that names the libraries; the target needs the same
# processor, a C library no older than this machine's, and python3 with numpy and yaml.
set -eu
PATH="/usr/bin:/bin:$PATH" # the system's Python has packages that any other version can read

build=$(realpath -- "$1")
mkdir -p "$(dirname -- "$2")"
archive=$(realpath -- "$2")
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
python=$(python3 -c 'import jsonschema, os; print(os.path.dirname(os.path.dirname(jsonschema.__file__)))')
mkdir -p "$out/bin" "$out/lib" "$out/python" "$out/kernels/cuda"

for program in daemon/treeverifyd clients/cli/treeverify tests/check/checkkern tests/kdtr/test_verify_attn \
    tests/bench/bench_model tests/bench/bench_sched tests/support/treeverifyd-planted tests/support/treeverifyd-fixed; do
    name=$(basename "$program")
    cp -- "$build/$program" "$out/bin/$name"
    strip -- "$out/bin/$name"
    mkdir -p "$out/$(dirname "$program")"
    up=$(dirname "$program" | sed 's,[^/][^/]*,..,g')
    {
        echo '#!/bin/sh'
        echo "here=\$(cd -- \"\$(dirname -- \"\$0\")/$up\" && pwd)"
        echo "LD_LIBRARY_PATH=\$here/lib exec \"\$here/bin/$name\" \"\$@\""
    } > "$out/$program"
    chmod +x "$out/$program"
    # all but the C library's own, which must be the target's; asked where the program was built, since that is
    # where it finds our own
    ldd "$build/$program" | awk '$3 ~ "^/" { print $3 }' |
        grep -v -E '/(libc|libm|libdl|librt|libpthread|libresolv|ld-linux[^/]*)\.so' |
        while read -r library; do cp -L -- "$library" "$out/lib/"; done
done
if [ -e "$build/kernels/cuda/libtreeverify-cuda.so" ]; then
    # as it is installed, with header, pkg-config file and example; the daemon loads the same object
    DESTDIR=$out/stage meson install -C "$build" --quiet --no-rebuild
    prefix=$(find "$out/stage" -name cuda.h | sed 's,/include/.*,,')
    library=$(cd "$prefix" && find . -type f -name 'libtreeverify-cuda.so*')
    strip -- "$prefix/$library"
    mkdir "$out/usr"
    (cd "$prefix" && cp -r --parents -- include/treeverify share/treeverify/examples "$(dirname "$library")" "$out/usr")
    rm -r "$out/stage"
    ln -s "../../usr/$library" "$out/kernels/cuda/libtreeverify-cuda.so"
fi
for package in jsonschema attr attrs pyrsistent _pyrsistent_version.py; do
    [ ! -e "$python/$package" ] || cp -r -- "$python/$package" "$out/python/"
done
find "$out/python" -name '*.so' -o -name __pycache__ | xargs rm -rf
XZ_OPT=-T0 tar -C "$out" -cJf "$archive" .
ls -l "$archive"
