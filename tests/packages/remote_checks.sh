# remote_checks.sh - deploy/remote.sh against an sshd of this system, which has none of the packages.
#
# usage: bash -eo pipefail remote_checks.sh systemd|plain    in the system that packages.py makes
# /files/packages has the packages, /files/deploy the script. Connections are counted: each deployment makes one.
# What it makes is in /files/remote; the packages are purged at the end.
how=$1
here=/files/remote
say=$here/said
not() { ! "$@"; } # errexit heeds this, and no bare !
unit=treeverifyd.service
export HOME=/root
mkdir -p $here/late $here/gpu /run/sshd
cd $here || exit 1

ssh-keygen -q -t ed25519 -N '' -f host
ssh-keygen -q -t ed25519 -N '' -f user
port=$((20000 + RANDOM % 20000))
/usr/sbin/sshd -D -e -f /dev/null -p $port -h $here/host -o ListenAddress=127.0.0.1 -o PidFile=none -o UsePAM=no \
    -o AuthorizedKeysFile=$here/user.pub -o StrictModes=no -o PermitRootLogin=prohibit-password 2>sshd.log &
echo "[127.0.0.1]:$port $(cut -d' ' -f1,2 host.pub)" >known
cat >config <<END
Host root sudo
    HostName 127.0.0.1
    Port $port
    IdentityFile $here/user
    IdentitiesOnly yes
    UserKnownHostsFile $here/known
    BatchMode yes
Host root
    User root
Host sudo
    User deployer
END
until grep -q '^Server listening' sshd.log; do sleep 0.1; done

deployments=0
# deploy HOST OPTION...: $status and $say are its exit status and what it says
deploy() {
    local host=$1
    shift
    status=0
    bash /files/deploy/remote.sh "$host" -F $here/config --bundles h8_p1_b4 --wait 60 "$@" >$say 2>&1 || status=$?
    echo "-- $host $*"
    cat $say
    deployments=$((deployments + 1))
    [ "$(grep -c 'Accepted publickey' sshd.log)" = $deployments ] # one connection each
    [ -z "$(find /tmp -maxdepth 1 -name 'treeverify.*')" ]
}
# stopped STEP REASON HOST OPTION...: fails there, with that reason in its last line, and does no later step
stopped() {
    local step=$1 reason=$2
    shift 2
    deploy "$@"
    [ $status = 1 ]
    tail -n 1 $say | grep "^remote.sh: $1: $step: .*$reason"
    not grep "^\(verify\|$step\): done" $say
}
packages() { dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\n'; }

# not even a connection
not bash /files/deploy/remote.sh root -F $here/config --packages $here/late --backend cpu >$say 2>&1
grep -q '^remote.sh: packages: not one treeverify-daemon_' $say
not grep -q Accepted sshd.log

# an installation that fails half-way leaves nothing of itself
cp /files/packages/*.deb late
dpkg-deb -R late/treeverify-kdtr_*.deb broken
printf '#!/bin/sh\nexit 1\n' >broken/DEBIAN/postinst
chmod 755 broken/DEBIAN/postinst
dpkg-deb --root-owner-group -b broken late/treeverify-kdtr_0.1.0_*.deb >/dev/null
mkdir -p /etc/treeverify
echo mine >/etc/treeverify/api_keys
packages >before
stopped install 'E: Sub-process' root --packages late --backend cpu
packages | diff before -
[ "$(find /etc/treeverify)" = "$(printf '/etc/treeverify\n/etc/treeverify/api_keys')" ]
rm -r /etc/treeverify

# a host without what the backend needs: installed, tried, and nothing else
cp /files/packages/*.deb gpu
mkdir -p empty/DEBIAN
printf 'Package: treeverify-cuda\nVersion: 0.1.0\nArchitecture: all\nMaintainer: none <none@treeverify.example>\nDescription: no library\n' \
    >empty/DEBIAN/control
dpkg-deb --root-owner-group -b empty gpu/treeverify-cuda_0.1.0_all.deb >/dev/null
stopped check-gpu 'libtreeverify-cuda.so.0: cannot open' root --packages gpu --backend cuda
packages | grep -q '^treeverify-daemon .* installed'
[ ! -e /etc/treeverify/treeverifyd.conf.d ]
not grep -qs '^treeverifyd$' /proc/[0-9]*/comm

# a configuration that the daemon refuses is taken back
cp /etc/treeverify/treeverifyd.conf kept
echo 'no_such_key = 1' >wrong.conf
stopped configure no_such_key sudo --packages /files/packages --backend cpu --config wrong.conf
cmp kept /etc/treeverify/treeverifyd.conf

# of the last one, which went through
went_through() {
    for step in connect install kdtr configure start healthz readyz verify; do grep "^$step: done$" $say; done
    grep '^check-gpu: skipped, backend cpu$' $say
    tail -n 1 $say | grep '^sudo verifies$'
    grep '^model = /usr/share/treeverify/models/kjv-mla-8m$' /etc/treeverify/treeverifyd.conf.d/remote.conf
}

good=(sudo --packages /files/packages --backend cpu --model /usr/share/treeverify/models/kjv-mla-8m)
if [ "$how" = systemd ]; then
    stopped start 'exit 65' sudo --packages /files/packages --backend cpu --model /nowhere
    not systemctl is-enabled --quiet $unit
    not systemctl is-active --quiet $unit
    echo operator:verify:operator-secret-0123456789 >keys
    deploy "${good[@]}" --keys keys
    [ $status = 0 ]
    systemctl is-enabled --quiet $unit && systemctl is-active --quiet $unit
    [ "$(stat -c %U:%a /etc/treeverify/api_keys)" = root:600 ]
    went_through
    # a key is needed now, and this deployment has none; all else is as it was
    stopped verify unauthenticated sudo --packages /files/packages --backend cpu
    systemctl is-active --quiet $unit
else
    (
        until grep -qs '^no systemd runs on the host; waiting for: ' $say; do sleep 0.2; done
        exec $(sed -n 's/^no systemd runs on the host; waiting for: //p' $say) >daemon.log 2>&1
    ) &
    daemon=$!
    deploy "${good[@]}"
    [ $status = 0 ]
    kill -TERM $daemon
    wait $daemon
    went_through
fi
apt-get purge -y treeverify-daemon treeverify-kdtr treeverify-model-kjv treeverify-cuda
kill %1 # sshd
echo "$deployments deployments"
