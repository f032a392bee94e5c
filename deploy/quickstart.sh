#!/usr/bin/env bash
# quickstart.sh - build treeverify, serve the bundled model on loopback, continue one text.
#
# usage: deploy/quickstart.sh [PROMPT]
# Installs missing packages, builds in build/quickstart, takes a free port and stops the daemon at
# the end. Changes nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/packages.sh

prompt="${1:-Re22:16 I Jesus have sent mine angel to testify unto you these things in the churches. I am}"
build=build/quickstart

tv_packages_install $tv_packages_build
if [ ! -f $build/build.ninja ]; then
    meson setup $build -Dtests=false -Dcuda=disabled >/dev/null
fi
ninja -C $build --quiet

run=$(mktemp -d)
daemon=""
stop() {
    if [ -n "$daemon" ]; then
        kill -TERM "$daemon" 2>/dev/null || true
        wait "$daemon" || true
    fi
    rm -rf "$run"
}
trap stop EXIT

mkfifo "$run/out"
$build/daemon/treeverifyd --model tests/models/kjv-mla-8m --listen 127.0.0.1:0 \
    >"$run/out" 2>"$run/log" &
daemon=$!
exec 3<"$run/out"
if ! read -r -t 120 word url rest <&3 || [ "$word" != listening ]; then
    echo "treeverifyd did not start:" >&2
    cat "$run/log" >&2
    exit 1
fi

client="$build/clients/cli/treeverify"
export TREEVERIFY_URL="$url"
$client health
echo
$client generate --store clients/cli/data/kjv-store.txt --nodes 33 --max-tokens 200 "$prompt"
