#!/usr/bin/env bash
# package.sh - builds the Debian packages of this tree.
#
# usage: deploy/package.sh [OUT [DPKG-BUILDPACKAGE-OPTION...]]      (OUT: build/packages)
# Copies what git knows (without git: all but build folders), puts deploy/debian where dpkg-buildpackage looks for it,
# and leaves the packages in OUT. With nvcc the CUDA packages are built too (TV_PACKAGE_CUDA=no: they are not).
# Installs nothing: dpkg-buildpackage names what is missing. ccache is used when it is there.
set -euo pipefail
top=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$top/build/packages}
[ $# = 0 ] || shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
# the system's python3 and meson, which the packages are built with
PATH="/usr/bin:/bin:$PATH"

# the same path each time, for ccache
work=$out/work
rm -rf "$work"
trap 'rm -rf "$work"' EXIT
tree=$work/treeverify
mkdir -p "$tree"
cd "$top"
if git ls-files -z >"$work/files" 2>/dev/null && [ -s "$work/files" ]; then
    tar -c --null --ignore-failed-read -T "$work/files" | tar -x -C "$tree"
else
    tar -c --exclude='./build*' --exclude=./.git --exclude=__pycache__ . | tar -x -C "$tree"
fi
cp -r deploy/debian "$tree/debian"

profiles=()
if [ "${TV_PACKAGE_CUDA:-yes}" = yes ] && { command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; }; then
    profiles=(--build-profiles=pkg.treeverify.cuda)
fi
if [ -d /usr/lib/ccache ] && command -v ccache >/dev/null; then
    CCACHE_DIR=${CCACHE_DIR:-$(ccache --get-config cache_dir)}
    export CCACHE_DIR CCACHE_BASEDIR=$tree CCACHE_NOHASHDIR=1 PATH="/usr/lib/ccache:$PATH"
fi
cd "$tree"
dpkg-buildpackage --build=binary --no-sign "${profiles[@]}" "$@"
mv "$work"/*.deb "$work"/*.changes "$work"/*.buildinfo "$out"
ls "$out"/*.deb
