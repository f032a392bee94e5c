#!/usr/bin/env bash
# remote.sh - puts treeverifyd onto another host over ssh, tries that host's arithmetic, and starts it there.
#
# usage: deploy/remote.sh HOST [OPTION...]
#   --packages DIR  the packages, of one version (default: deploy/package.sh builds them into build/packages)
#   --backend B     cuda (default), or cpu, where no GPU is looked for
#   --model DIR     checkpoint on the host (default: what its configuration names, or treeverify-model-kjv)
#   --config FILE   becomes /etc/treeverify/treeverifyd.conf (default: the host's stays)
#   --keys FILE     becomes /etc/treeverify/api_keys, mode 0600; its first verify key calls /v1/verify here
#   --bundles WORD  of the reference bundles those with WORD in their names (default: all)
#   --wait S        longest wait for a daemon that loads (1800)
#   -F FILE         configuration of ssh(1): port, user, key, jump hosts
# Steps: connect, copy, install, check-gpu, kdtr, configure, start, healthz, readyz, verify. The first that fails is
# named with its reason (exit 1), and the host is left as it was before that step. HOST is Debian 12; the user there is
# root or may use sudo without a password. One connection carries everything; secrets are in no argument of a program.
set -uo pipefail
unit=treeverifyd.service etc=/etc/treeverify
gpu_conf=/etc/systemd/system/$unit.d/gpu.conf

# ---- there: each step is there_STEP, run as root with errexit; undo_STEP when it fails ----

# there DIR STEP: what the step says goes to DIR/log, and through descriptor 3 at once to whom runs this script
there() {
    dir=$1 step=$2
    export PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
    # shellcheck source=/dev/null
    . "$dir/settings"
    exec 3>&1 9>"$dir/lock"
    flock 9 # who takes the folder away waits for this
    (set -e; "there_$step") >"$dir/log" 2>&1 9>&-
    local status=$?
    [ $status != 0 ] || return 0
    if declare -F "undo_$step" >/dev/null; then
        ("undo_$step") >>"$dir/undo.log" 2>&1 9>&-
    fi
    tail -n 20 "$dir/log"
    return 1
}

stop_with() {
    echo "$*"
    return 1
}

there_connect() {
    command -v apt-get dpkg-query flock >/dev/null || stop_with "no Debian: apt-get, dpkg-query or flock is missing"
}

installed() { dpkg-query -W -f '${db:Status-Abbrev} ${Package} ${Version}\n' | sed -n 's/^ii *//p' | sort; }

keep_etc() {
    rm -rf "${dir:?}/etc"
    [ ! -d $etc ] || cp -a $etc "$dir/etc"
}

restore_etc() {
    rm -rf $etc
    [ ! -d "$dir/etc" ] || cp -a "$dir/etc" $etc
}

there_install() {
    local how=(-y -q -o DPkg::Lock::Timeout=120 -o Dpkg::Options::=--force-confold --no-install-recommends) folder
    installed >"$dir/before"
    keep_etc
    for folder in /var/lib/treeverify /var/lib/private/treeverify /var/lib/treeverify-models; do
        [ ! -e $folder ] || touch "$dir/had-state"
    done
    # whether it can be done at all is known before anything changes
    apt-get "${how[@]}" -s install curl "$dir"/*.deb || {
        apt-get -q update || true
        apt-get "${how[@]}" -s install curl "$dir"/*.deb
    }
    touch "$dir/changing"
    command -v curl || apt-get "${how[@]}" install curl
    apt-get "${how[@]}" --reinstall install "$dir"/*.deb
}

# What is new goes, and what the step said of it too. Packages of which there was another version stay and are named:
# that version's file may be nowhere.
undo_install() {
    [ -e "$dir/changing" ] || return 0
    local away=purge new
    [ ! -e "$dir/had-state" ] || away=remove # a purge would take it
    new=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' | sed -n '/^config-files /d;/^not-installed /d;s/^.* //p' |
        sort | comm -13 <(cut -d' ' -f1 "$dir/before") -)
    # shellcheck disable=SC2086 # names hold no spaces
    [ -z "$new" ] || dpkg --$away $new
    restore_etc
    installed | comm -13 "$dir/before" - | sed 's/^/stays: /' >&3
}

there_check-gpu() { treeverifyd --backend "$backend" --check-gpu; }

# the plain (naive) form over all bundles, and where that passed the fast one (flash)
there_kdtr() {
    TV_KDTR_GEN_ARGS=${bundles:+--only $bundles} TMPDIR=$dir treeverify-kdtr -- --backend "$backend"
}

value() { sed -n "s/^$1 = //p" "$dir/effective"; }

# configuration OPTION: with credentials as the unit gives them
configuration() {
    mkdir -p "$dir/credentials"
    ln -sfn $etc/api_keys "$dir/credentials/api_keys"
    ln -sfn $etc/tls.crt "$dir/credentials/tls_cert"
    ln -sfn $etc/tls.key "$dir/credentials/tls_key"
    CREDENTIALS_DIRECTORY=$dir/credentials treeverifyd --config $etc/treeverifyd.conf "$1"
}

read_configuration() { configuration --print-config >"$dir/effective"; }

there_configure() {
    local ours=$etc/treeverifyd.conf.d/remote.conf keys=$etc/api_keys
    keep_etc
    [ ! -e $gpu_conf ] || touch "$dir/had-gpu-conf"
    [ ! -e "$dir/treeverifyd.conf" ] || install -m 644 "$dir/treeverifyd.conf" $etc/treeverifyd.conf
    read_configuration
    if [ -n "$model" ] || [ -z "$(value model)" ]; then
        install -d -m 755 $etc/treeverifyd.conf.d
        printf '# by deploy/remote.sh\nmodel = %s\nbackend = %s\n' \
            "${model:-/usr/share/treeverify/models/kjv-mla-8m}" "$backend" >"$dir/remote.conf"
        install -m 644 "$dir/remote.conf" $ours
    fi
    if [ -e "$dir/keys" ]; then
        install -m 600 "$dir/keys" $keys
        if [ -z "$(value api_key_file)" ]; then
            install -d -m 755 $etc/treeverifyd.conf.d
            [ ! -d /run/systemd/system ] || keys=credential:api_keys
            echo "api_key_file = $keys" >>$ours
            chmod 644 $ours
        fi
    fi
    read_configuration
    [ "$(value backend)" = "$backend" ] || stop_with "the host's configuration says backend = $(value backend)"
    [ -z "$model" ] || [ "$(value model)" = "$model" ] || stop_with "another file says model = $(value model)"
    configuration --check-config
    [ "$backend" != cuda ] || [ -e $gpu_conf ] ||
        install -D -m 644 /usr/share/treeverify/systemd/gpu.conf $gpu_conf
}

undo_configure() {
    restore_etc
    [ -e "$dir/had-gpu-conf" ] || rm -f $gpu_conf
}

there_start() {
    read_configuration
    if [ -d /run/systemd/system ]; then
        systemctl is-enabled --quiet $unit && touch "$dir/was-enabled"
        systemctl is-active --quiet $unit && touch "$dir/was-active"
        systemctl daemon-reload
        systemctl enable $unit
        timeout "$wait" systemctl restart $unit || {
            journalctl -q --no-pager -n 5 -o cat -u $unit || true
            stop_with "$unit does not start: exit $(systemctl show -P ExecMainStatus $unit), see journalctl -u $unit"
        }
        return 0
    fi
    echo "no systemd runs on the host; waiting for: $(sed -n 's/^ExecStart=//p' /lib/systemd/system/$unit)" >&3
    local waited=0
    until curl_there "$(url listen_admin)/readyz" -o "$dir/ready"; do
        [ $((waited += 1)) -le "$wait" ] || stop_with "nobody is ready at $(url listen_admin) after $wait s"
        sleep 1
    done
}

# a service that ran before the step runs again, with the configuration of before
undo_start() {
    [ -d /run/systemd/system ] || return 0
    [ -e "$dir/was-enabled" ] || systemctl disable $unit
    systemctl stop $unit
    systemctl reset-failed $unit
    if [ -e "$dir/was-active" ]; then
        undo_configure
        systemctl daemon-reload
        systemctl start $unit
    fi
}

# url OPTION: where the host itself reaches that listener
url() {
    local at
    at=$(value "$1")
    [ "$at" != off ] || at=$(value listen)
    at=${at/#0.0.0.0:/127.0.0.1:}
    [ -n "$(value tls_cert)" ] && printf 'https://' || printf 'http://'
    printf '%s' "${at/#\[::\]:/[::1]:}"
}

# --insecure: the certificate has the name that others use, not that of loopback
curl_there() { curl -sS --fail-with-body --insecure --max-time 60 "$@"; }

there_healthz() { read_configuration; curl_there "$(url listen_admin)/healthz"; }

there_readyz() { read_configuration; curl_there "$(url listen_admin)/readyz"; }

there_verify() {
    read_configuration
    local secret=""
    [ ! -e "$dir/keys" ] || secret=$(sed -n 's/^[^#:]*:[^:]*verify[^:]*:\([^:]*\)$/\1/p' "$dir/keys" | head -n 1)
    # builtins alone see the secret
    { [ -z "$secret" ] || printf 'header = "Authorization: Bearer %s"\n' "$secret"; } |
        curl_there -K - -o "$dir/verified" -H 'Content-Type: application/json' -d \
            '{"tokens":[1,2,3],"tree":{"tokens":[4,5],"parents":[-1,0]},"sampling":{"rule":"greedy"}}' \
            "$(url listen)/v1/verify" || {
        stop_with "POST $(url listen)/v1/verify: $(head -c 400 "$dir/verified")"
    }
    grep -q '"accepted":' "$dir/verified" || stop_with "not an answer: $(head -c 200 "$dir/verified")"
}

if [ "${1:-}" = --there ]; then
    there "$2" "$3"
    exit
fi

# ---- here ----

die() {
    echo "remote.sh: $*" >&2
    exit 1
}

usage() {
    sed -n '3,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
    exit 64
}

read_options() {
    host=${1:-} backend=cuda model="" bundles="" wait=1800 packages="" config="" keys="" ssh_config=()
    case $host in
    "" | -*) usage ;;
    esac
    shift
    while [ $# -gt 0 ]; do
        [ $# -gt 1 ] || usage
        case $1 in
        --packages | --backend | --model | --config | --keys | --bundles | --wait) declare -g "${1#--}=$2" ;;
        -F) ssh_config=(-F "$2") ;;
        *) usage ;;
        esac
        shift 2
    done
    case $backend in
    cpu | cuda) ;;
    *) usage ;;
    esac
    [[ $wait =~ ^[0-9]+$ && $bundles =~ ^[a-zA-Z0-9_]*$ ]] || usage
    for file in "$config" "$keys"; do
        [ -z "$file" ] || [ -r "$file" ] || die "packages: $file cannot be read"
    done
}

# load has what goes over: packages, this script, and what the steps are to know
gather() {
    local name found
    if [ -z "$packages" ]; then
        packages=$top/build/packages
        "$top/deploy/package.sh" "$packages" >"$work/package.log" 2>&1 ||
            die "packages: $(tail -n 1 "$work/package.log") (deploy/package.sh)"
    fi
    local names=(treeverify-daemon treeverify-kdtr)
    [ "$backend" != cuda ] || names+=(treeverify-cuda)
    [ -n "$model" ] || names+=(treeverify-model-kjv)
    mkdir "$work/load"
    for name in "${names[@]}"; do
        found=("$packages/${name}"_*.deb)
        if [ ${#found[@]} != 1 ] || ! cp "${found[0]}" "$work/load" 2>/dev/null; then
            die "packages: not one ${name}_*.deb in $packages"
        fi
    done
    [ -z "$config" ] || cp "$config" "$work/load/treeverifyd.conf"
    [ -z "$keys" ] || install -m 600 "$keys" "$work/load/keys"
    cp "$top/deploy/remote.sh" "$work/load"
    for name in backend model bundles wait; do
        printf '%s=%q\n' "$name" "${!name}"
    done >"$work/load/settings"
}

# through the connection that is there, and never another one
remote() { ssh "${ssh_config[@]}" -S "$work/c" -o ControlMaster=no -o ProxyCommand=false "$host" "$@"; }

leave() {
    if [ -n "$there" ]; then
        remote "$as_root flock $there/lock true; $as_root rm -rf $there" </dev/null >/dev/null 2>&1
    fi
    [ ! -S "$work/c" ] || ssh "${ssh_config[@]}" -S "$work/c" -O exit "$host" 2>/dev/null
    rm -rf "$work"
}

connect() {
    ssh "${ssh_config[@]}" -M -S "$work/c" -o ControlPersist=no -o ServerAliveInterval=15 -N -f "$host" \
        >"$work/ssh.log" 2>&1 || die "$host: connect: $(tail -n 1 "$work/ssh.log")"
    local id
    id=$(remote id -u </dev/null 2>"$work/ssh.log") || die "$host: connect: $(tail -n 1 "$work/ssh.log")"
    if [ "$id" != 0 ]; then
        as_root="sudo -n"
        remote sudo -n true </dev/null >"$work/ssh.log" 2>&1 ||
            die "$host: connect: neither root, nor sudo: $(tail -n 1 "$work/ssh.log")"
    fi
}

copy() {
    there=$(remote mktemp -d /tmp/treeverify.XXXXXXXX </dev/null) || die "$host: copy: no folder can be made in /tmp"
    [[ $there =~ ^/tmp/treeverify\.[a-zA-Z0-9]{8}$ ]] || die "$host: copy: mktemp says ${there@Q}"
    tar -c -C "$work/load" . | remote "tar -x --no-same-owner -C $there" 2>"$work/ssh.log" ||
        die "$host: copy: $(tail -n 1 "$work/ssh.log")"
}

top=$(cd "$(dirname "$0")/.." && pwd)
read_options "$@"
work=$(mktemp -d)
there="" as_root=""
trap leave EXIT
trap 'exit 130' INT TERM HUP
gather
connect
copy
for step in connect install check-gpu kdtr configure start healthz readyz verify; do
    if [ "$step $backend" = "check-gpu cpu" ]; then
        echo "$step: skipped, backend cpu"
        continue
    fi
    remote "$as_root bash $there/remote.sh --there $there $step" </dev/null 2>&1 | tee "$work/said" >&2 ||
        die "$host: $step: $(sed -n '/[^ ]/h;${x;s/^<[0-9]>//;p}' "$work/said")"
    echo "$step: done"
done
echo "$host verifies"
