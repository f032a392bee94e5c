#!/usr/bin/env bash
# container.sh - deploy/containers built and run for real, and the manifest of deploy/kubernetes run without Kubernetes.
#
# usage: container.sh cpu|cuda      as root, by hand: buildah, podman, crun, debootstrap (Debian 12), a mirror, 10 minutes
#
# An image that the Dockerfile is FROM and that is not here yet stands in for itself: Debian 12 out of debootstrap, below
# the same name. Pull the real one first to have that. BUILDAH_OPTIONS go to the build: "--build-arg GPU_ARCHS=90". cpu
# then starts the image as its head says and as the manifest does, on the bundled model, in namespaces of its own (no port
# or mount of the host changes): probes, health check, a tree, keys, user, read-only root, stop. cuda is started for
# --version and, without a device, for the exit of --check-gpu alone. Leaves the images.
set -euo pipefail
cd "$(dirname "$0")/../.."
kind=${1:-}
dockerfile=deploy/containers/Dockerfile.$kind
image=localhost/treeverify:$kind
secret=alice-secret-0123456789
[ -f "$dockerfile" ] || { sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 64; }
# without systemd podman has words for its missing timers of health checks
export PATH=/usr/sbin:/usr/bin:/sbin:/bin

say() { echo "container.sh: $*"; }
fail() { say "FAILED: $*"; exit 1; }

stand_in() { # NAME
    local folder working
    folder=$(mktemp -d)
    debootstrap --variant=minbase bookworm "$folder" >/dev/null
    working=$(buildah from scratch)
    buildah add --quiet "$working" "$folder" / >/dev/null
    rm -r "$folder"
    buildah commit --quiet --rm "$working" "docker.io/library/$1" >/dev/null
    say "$1 is not here: Debian 12 stands in for it"
}

build() {
    local name
    for name in $(sed -n 's/^FROM \([^ ]*\).*/\1/p' "$dockerfile" | sort -u); do
        buildah inspect --type image "$name" >/dev/null 2>&1 || stand_in "$name"
    done
    # shellcheck disable=SC2086
    buildah bud ${BUILDAH_OPTIONS:-} --isolation chroot --pull-never --layers --format docker -f "$dockerfile" -t "$image" .
}

curl_() { curl -sS --max-time 10 "$@"; }

# until the probe of the manifest says so
wait_ready() {
    for _ in $(seq 600); do
        curl_ --fail -o /dev/null http://127.0.0.1:8472/readyz 2>/dev/null && return
        [ "$(podman inspect -f '{{.State.Running}}' tv)" = true ] || break
        sleep 0.2
    done
    podman logs tv
    fail "not ready"
}

start() { # PODMAN-OPTION... -- ARGUMENT...
    local options=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    podman rm -f tv >/dev/null 2>&1 || true
    podman run --detach --name tv --network host --cgroups=disabled --ulimit nofile=4096:4096 --ulimit nproc=4096:4096 \
        --health-interval disable --cap-drop ALL --security-opt no-new-privileges --read-only --read-only-tmpfs=false \
        -v "$PWD/tests/models/kjv-mla-8m:/model:ro" "${options[@]}" "$image" "${@:2}" >/dev/null 2>"$work/podman.log" ||
        { cat "$work/podman.log"; fail "podman"; }
}

check_running() {
    local pid status code
    pid=$(podman inspect -f '{{.State.Pid}}' tv)
    status=$(cat "/proc/$pid/status")
    grep -q $'^Uid:\t65532\t65532\t65532\t65532$' <<<"$status" || fail "its user: $(grep ^Uid <<<"$status")"
    grep -q $'^CapEff:\t0000000000000000$' <<<"$status" || fail "it has capabilities"
    [ "$(cat "/proc/$pid/comm")" = treeverifyd ] || fail "the first process is $(cat "/proc/$pid/comm")"
    ! podman exec tv touch /usr/written /written 2>/dev/null || fail "its root can be written to"
    podman healthcheck run tv || fail "its health check"
    code=$(curl_ -o /dev/null -w '%{http_code}' --json '{}' http://127.0.0.1:8471/v1/sessions)
    [ "$code" = 401 ] || fail "without a key: $code"
    curl_ --fail -H "Authorization: Bearer $secret" --json '{"tokens":[73,110,32,116,104,101,32,98,101,103,105,110,110,105,
        110,103,32,71,111,100],"tree":{"tokens":[32,119,97,115,104],"parents":[-1,0,1,2,0]},"sampling":{"rule":"greedy"}}' \
        http://127.0.0.1:8471/v1/verify >"$work/answer"
    grep -q '"accepted":{"nodes":\[0,1\],"tokens":\[32,119\]},"pending":105' "$work/answer" ||
        fail "the tree: $(cat "$work/answer")"
}

stop() { # SECONDS
    local code began=$SECONDS
    podman stop --time "$1" tv >/dev/null 2>&1
    code=$(podman inspect -f '{{.State.ExitCode}}' tv)
    [ "$code" = 0 ] || { podman logs tv; fail "stopped with exit $code"; }
    say "stopped after $((SECONDS - began)) s, exit 0"
}

as_its_head_says() {
    start --tmpfs /tmp -v "$work/keys:/run/secrets/keys:ro" --
    wait_ready
    check_running
    stop 60
    podman logs tv 2>&1 | grep -q 'api_key_file: others' && fail "a warning of the keys"
    start --tmpfs /tmp --
    [ "$(podman wait tv)" = 78 ] || fail "a start without keys"
    say "as its head says: good; without keys it does not start"
}

# The arguments, mounts and probes of the manifest: a secret is links into a folder, group-readable by fsGroup; an
# emptyDir is its group's; a kubelet calls the pod's address.
as_the_manifest_says() {
    local arguments grace
    arguments=$(/usr/bin/python3 - <<'PY'
import yaml
documents = list(yaml.safe_load_all(open("deploy/kubernetes/treeverify.yaml", encoding="utf-8")))
pod = documents[0]["spec"]["template"]["spec"]
print(pod["terminationGracePeriodSeconds"], *pod["containers"][0]["args"])
PY
)
    grace=${arguments%% *}
    arguments=$(sed 's/--backend=cuda/--backend=cpu/' <<<"${arguments#* }")
    mkdir -p "$work/secret/..2026" "$work/state"
    cp "$work/keys" "$work/secret/..2026/keys"
    chown -R root:65532 "$work/secret" "$work/state"
    chmod 440 "$work/secret/..2026/keys"
    chmod 2777 "$work/state"
    ln -sfn ..2026 "$work/secret/..data"
    ln -sfn ..data/keys "$work/secret/keys"
    # shellcheck disable=SC2086
    start -v "$work/secret:/run/secrets/treeverify:ro" -v "$work/state:/state" -- $arguments
    wait_ready
    curl_ --fail -o /dev/null -H 'Host: 10.1.2.3:8472' http://127.0.0.1:8472/healthz || fail "a probe by the pod's address"
    curl_ --fail -o /dev/null -H 'Host: 10.1.2.3:8472' http://127.0.0.1:8472/readyz || fail "a probe by the pod's address"
    check_running
    curl_ --fail -o /dev/null -H "Authorization: Bearer $secret" --json '{"tokens":[73,110]}' http://127.0.0.1:8471/v1/sessions
    stop "$grace"
    [ -s "$work/state/sessions.snapshot" ] || fail "no sessions were kept"
    say "as the manifest says: good"
}

inside() { # in namespaces: loopback and a control group of its own
    mount --make-rprivate /
    mount -t tmpfs tmpfs /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup
    /usr/bin/python3 -c 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 1))'
    work=$(mktemp -d)
    trap 'podman rm -f tv >/dev/null 2>&1; rm -r "$work"' EXIT
    echo "alice:verify,metrics,admin:$secret" >"$work/keys"
    chown 65532:65532 "$work/keys"
    chmod 400 "$work/keys"
    if [ "$kind" = cpu ]; then
        as_its_head_says
        as_the_manifest_says
    else
        start -- --version
        [ "$(podman wait tv)" = 0 ] || fail "--version"
        podman logs tv
        start -- --check-gpu
        [ -e /dev/nvidiactl ] || [ "$(podman wait tv)" = 69 ] || fail "--check-gpu without a device"
        podman logs tv
    fi
    say "$kind: good, $(podman image inspect -f '{{.Size}}' "$image") bytes"
}

if [ "${2:-}" = inside ]; then
    inside
else
    [ "$(id -u)" = 0 ] || fail "needs root"
    build
    exec unshare --mount --net --cgroup bash tests/packages/container.sh "$kind" inside
fi
