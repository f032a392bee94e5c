"""The packages: built, judged by lintian, and the runbook of deploy/README.md run with them on a system of their own;
then deploy/remote.sh brings them there again, through an sshd of that system (remote_checks.sh).

usage: packages.py SOURCE_ROOT

A minimal Debian is made in a temporary folder (mmdebstrap; its packages come from the mirror that this machine uses)
and booted there with systemd in namespaces, or where that cannot be had entered without: then lines of the runbook
that begin with systemctl are left out, and the daemon is started as the unit would. Exit 77 when a tool, root or the
mirror is missing. Changes nothing outside its folder.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SKIP = 77
TOOLS = ("dpkg-buildpackage", "dh", "pybuild", "lintian", "mmdebstrap", "unshare", "pivot_root")
# what the packages depend on, which is all that they find, and what the runbook calls
SYSTEM = ("curl libcjson1 libcurl3-gnutls libgnutls30 libinih1 libmicrohttpd12 libnettle8 libsystemd0 openssh-server"
          " procps python3-httpx python3-numpy sudo systemd").split()
NAMESPACES = ("--fork", "--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--kill-child")
BOOT_S, LIMIT_S = 60, 300
SETUP = range(200, 250)  # exit codes of systemd's own, when the kernel refuses it a part of the sandbox
# What a system that had the packages keeps: the user, whose number may own files; and what is systemd's.
STAYS = re.compile(r"/etc/(?:passwd|group|shadow|gshadow)-?|/etc/\.pwd\.lock|/var/lib/private|/var/lib/systemd/.*|/etc/machine-id")

UNITS = {
    "default.target": "[Unit]\nDefaultDependencies=no\nRequires=check.service\n",
    "check.service": (
        "[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nExecStart=/bin/bash /files/check.sh\n"
        "ExecStopPost=/bin/systemctl --force --no-block exit 3\n"
        "StandardOutput=file:/files/said\nStandardError=inherit\n"
    ),
    **{f"{name}.target": "[Unit]\nDefaultDependencies=no\n" for name in ("sysinit", "basic", "shutdown", "sockets", "network")},
}

BEGIN = r"""
cat >/etc/apt/apt.conf.d/quiet <<<'Dpkg::Use-Pty "0"; quiet "1";'
export DEBIAN_FRONTEND=noninteractive HOME=/root LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin
cd /files/packages
part() {
    local status=0
    echo "@@ $1"
    bash -eo pipefail "/files/$2" </dev/null 2>&1 || status=$?
    [ $status = 0 ] || systemctl show treeverifyd.service -p ExecMainStatus
    printf '\n@@ exit %s\n' "$status"
}
everything() { find / -xdev \( -path /files -o -path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/cache -o \
    -path /var/log \) -prune -o -print | sort >"/files/$1"; }
echo "@@ booted"; echo "@@ exit 0"
echo "127.0.0.1 localhost $(hostname)" >/etc/hosts # sudo(8) looks for it
useradd --home-dir / --password '*' deployer # the user of the last part
echo 'deployer ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/deployer
everything before
"""
# what the test does beside the runbook, behind the part of that name
BESIDE = {
    "Install": r"""
getent passwd treeverify
[ "$(stat -c %U:%G:%a /var/lib/treeverify-models)" = root:treeverify:750 ]
not pgrep_treeverifyd
""",
    "Verify": r"""
apt-get install -y ./python3-treeverify_*.deb ./treeverify-kdtr_*.deb ./libtreeverify-client-dev_*.deb
treeverify-py --version
python3 -c 'import treeverify; print(treeverify.Client("http://127.0.0.1:8471").model().name)'
TV_KDTR_GEN_ARGS="--only h8_p1_b4" treeverify-kdtr
echo 'threads = 1' >>/etc/treeverify/treeverifyd.conf
before=$(grep -ls '^treeverifyd$' /proc/[0-9]*/comm)
apt-get install -y --reinstall ./treeverify-daemon_*.deb
if [ -d /run/systemd/system ]; then
    [ "$(grep -ls '^treeverifyd$' /proc/[0-9]*/comm)" != "$before" ] && systemctl is-active treeverifyd
fi
grep -q '^threads = 1' /etc/treeverify/treeverifyd.conf
treeverifyd --config /etc/treeverify/treeverifyd.conf --check-config
echo alice:verify:alice-secret-0123456789 >/etc/treeverify/api_keys
mkdir -p /etc/treeverify/treeverifyd.conf.d /var/lib/treeverify/reproducers
echo 'log_level = info' >/etc/treeverify/treeverifyd.conf.d/log.conf
touch /var/lib/treeverify/reproducers/one
""",
    "Remove": r"""
apt-get purge -y python3-treeverify treeverify-kdtr # the library took its headers with it
[ -z "$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' | grep treeverify)" ]
not pgrep_treeverifyd
""",
}
REMOTE = "deploy/remote.sh"
# no pgrep on a minimal system
PGREP = r"""pgrep_treeverifyd() { grep -qs '^treeverifyd$' /proc/[0-9]*/comm; }
not() { ! "$@"; } # errexit heeds this, and no bare !
"""
# the unit's work, where there is no systemd: ExecStart as its user until it is ready, and its stop
BY_HAND = {
    "Start": r"""
install -d -o treeverify -g treeverify /var/lib/treeverify
command=$(sed -n 's/^ExecStart=//p' /lib/systemd/system/treeverifyd.service)
STATE_DIRECTORY=/var/lib/treeverify setsid setpriv --reuid=treeverify --regid=treeverify --clear-groups --no-new-privs \
    $command >/files/daemon.log 2>&1 &
for _ in $(seq 300); do
    curl -s --fail -o /dev/null http://127.0.0.1:8472/readyz && exit 0
    sleep 0.2
done
exit 1
""",
    "Remove": r"""
pid=$(grep -ls '^treeverifyd$' /proc/[0-9]*/comm | cut -d/ -f3)
kill -TERM $pid
while [ -d "/proc/$pid" ] && ! grep -q '^State:.*Z' "/proc/$pid/status"; do sleep 0.2; done
""",
}


class Skipped(Exception):
    pass


def runbook(text):
    """[(heading, commands)] of the blocks that are marked to be run."""
    parts, heading, lines = [], "", None
    for line in text.split("\n"):
        if lines is None and line.startswith("## "):
            heading = line[3:].strip()
        elif line == "```sh run":
            lines = []
        elif line == "```" and lines is not None:
            parts.append((heading.split(",")[0], "\n".join(lines) + "\n"))
            lines = None
        elif lines is not None:
            lines.append(line)
    return parts


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def write_parts(files, parts, how):
    script = BEGIN
    for number, (heading, commands) in enumerate(parts):
        if how == "plain":
            commands = "".join(line for line in commands.splitlines(True) if not line.startswith("systemctl "))
        steps = [(heading, commands)]
        if how == "plain" and heading in BY_HAND:
            steps.insert(0, (f"{heading}, by hand", BY_HAND[heading]))
        if heading in BESIDE:
            steps.append((f"{heading}, beside it", PGREP + BESIDE[heading]))
        for at, (name, text) in enumerate(steps):
            write(os.path.join(files, f"part-{number}-{at}"), text)
            script += f'part "{name}" part-{number}-{at}\n'
    write(os.path.join(files, "part-remote"), f"bash -eo pipefail /files/remote_checks.sh {how}\n")
    script += f'part "{REMOTE}" part-remote\n'
    write(os.path.join(files, "check.sh"), script + "everything after\necho '@@ end'; echo '@@ exit 0'\n")


def said(files):
    """{part: (exit status, text)} of the parts that have ended."""
    try:
        with open(os.path.join(files, "said"), encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        text = ""
    found = re.findall(r"^@@ (?!exit )(.*)\n((?:(?!@@ ).*\n)*?)@@ exit (\d+)$", text, re.M)
    return {name: (int(status), what) for name, what, status in found}, text


def run_machine(root, files, how):
    command = ["unshare", *NAMESPACES, "bash", os.path.join(HERE, "boot_root.sh"), root, files, how]
    machine = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    error = ""
    for limit_s in (BOOT_S, LIMIT_S):
        try:
            error, _ = machine.communicate(timeout=limit_s)
            break
        except subprocess.TimeoutExpired:
            if "booted" not in said(files)[0]:
                break  # a systemd that cannot go on stands still
    if machine.poll() is None:
        machine.kill()  # and with it all that is in there
        error, _ = machine.communicate()
    return error


def mirror():
    """Where this machine has its Debian from, and the suite."""
    with open("/etc/os-release", encoding="utf-8") as file:
        release = dict(line.rstrip().split("=", 1) for line in file if "=" in line)
    if release.get("ID") != "debian" or release.get("VERSION_ID", "").strip('"') != "12":
        raise Skipped("the packages are for Debian 12")
    suite = release["VERSION_CODENAME"].strip('"')
    got = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"],
                         capture_output=True, text=True)
    sites = [line.split()[0] for line in got.stdout.splitlines() if line.split()[1:] == [suite]]
    return suite, sites[0] if sites else "http://deb.debian.org/debian"


def start_system(folder):
    suite, site = mirror()
    options = [f"--include={','.join(SYSTEM)}", "--variant=minbase", "--dpkgopt=force-unsafe-io", "--mode=root",
               "--format=directory"]
    proxy = subprocess.run(["apt-config", "dump", "Acquire::http::Proxy"], capture_output=True, text=True).stdout.strip()
    if proxy:
        options.append(f"--aptopt={proxy}")
    with open(os.path.join(folder, "mmdebstrap.log"), "w") as log:
        return subprocess.Popen(["mmdebstrap", *options, suite, os.path.join(folder, "root"), site],
                                stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def finish_system(making, folder):
    if making.wait() != 0:
        with open(os.path.join(folder, "mmdebstrap.log"), encoding="utf-8") as file:
            raise Skipped(f"no system of Debian's packages can be made: {file.read()[-500:]}")


def build(source, packages):
    env = dict(os.environ, DEB_BUILD_OPTIONS="nocheck noautodbgsym parallel=2", TV_PACKAGE_CUDA="no")
    for name in [name for name in env if name.startswith(("MESON", "NINJA", "ASAN_", "UBSAN_", "TSAN_", "CFLAGS"))]:
        del env[name]  # what the tests run under is not the packages'
    got = subprocess.run([os.path.join(source, "deploy", "package.sh"), packages], env=env, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
    if "Unmet build dependencies" in got.stdout:
        raise Skipped(re.search(r"Unmet build dependencies.*", got.stdout)[0])
    assert got.returncode == 0, got.stdout[-4000:]


def lint(packages):
    changes, = glob.glob(os.path.join(packages, "*.changes"))
    got = subprocess.run(["lintian", "--allow-root", "--fail-on", "error,warning", changes], capture_output=True, text=True)
    assert got.returncode == 0 and not re.search("^[EW]:", got.stdout, re.M), got.stdout + got.stderr


def judge(files, parts, how):
    done, text = said(files)
    tail = text[-3000:]
    for heading in [heading for heading, _ in parts] + [REMOTE]:
        assert heading in done, f"the part {heading!r} has not ended\n{tail}"
    refused = re.search(r"^ExecMainStatus=(\d+)$", done["Start"][1], re.M)
    if refused and int(refused[1]) in SETUP:
        raise Skipped(f"the kernel refuses a part of the sandbox here: exit {refused[1]}")
    for name, (status, what) in done.items():
        assert status == 0, f"{name!r}: exit {status}\n{what[-3000:]}"
    assert "end" in done, tail
    for heading, pattern in {
        "Edit": r"\A",
        "Probe": r'\{"status":"ok"\}[\s\S]*"ready":true[\s\S]*^treeverify_sessions[\s\S]*alive, ready',
        "Verify": r'"accepted":\{"nodes":\[0,1\],"tokens":\[32,119\]\},"pending":105[\s\S]*"ok":true[\s\S]*60 new tokens',
        REMOTE: r"^sudo verifies$[\s\S]*^\d deployments$",
        "Verify, beside it": r"\b0\.1\.0$[\s\S]*kjv-mla-8m",
    }.items():
        assert re.search(pattern, done[heading][1], re.M), f"{heading!r} said\n{done[heading][1]}"
    lists = []
    for name in ("before", "after"):
        with open(os.path.join(files, name), encoding="utf-8") as file:
            lists.append(set(file.read().split("\n")))
    assert len(lists[0]) > 1000, lists[0]
    left = sorted(path for path in lists[1] - lists[0] if not STAYS.fullmatch(path))
    assert not left, f"a purge leaves {left}"
    gone = sorted(lists[0] - lists[1])
    assert not gone, f"a purge takes {gone}"
    assert how == "plain" or "Created symlink" in text, text


def check(source, folder):
    times, last = {}, time.monotonic()

    def lap(name):
        nonlocal last
        times[name], last = time.monotonic() - last, time.monotonic()

    with open(os.path.join(source, "deploy", "README.md"), encoding="utf-8") as file:
        parts = runbook(file.read())
    headings = [heading for heading, _ in parts]
    assert headings == ["Install", "Edit", "Start", "Probe", "Verify", "Change", "Remove"], headings
    files = os.path.join(folder, "files")
    packages = os.path.join(files, "packages")
    os.makedirs(packages)
    os.makedirs(os.path.join(files, "units"))
    os.chmod(folder, 0o755)
    os.makedirs(os.path.join(files, "deploy"))
    shutil.copy(os.path.join(source, "deploy", "remote.sh"), os.path.join(files, "deploy"))
    shutil.copy(os.path.join(HERE, "remote_checks.sh"), files)
    for name, text in UNITS.items():
        write(os.path.join(files, "units", name), text)
    making = start_system(folder)
    try:
        build(source, packages)
        lap("build")
        lint(packages)
        lap("lintian")
        finish_system(making, folder)
        lap("system")
    finally:
        if making.poll() is None:
            making.terminate()
            making.wait()
    how = "systemd"
    write_parts(files, parts, how)
    root = os.path.join(folder, "root")
    error = run_machine(root, files, how)
    if "booted" not in said(files)[0]:
        how = "plain"
        print(f"systemd cannot be started here: {error[-300:]!r}")
        write_parts(files, parts, how)
        error = run_machine(root, files, how)
        if "booted" not in said(files)[0]:
            raise Skipped(f"no namespaces here: {error[-300:]!r}")
    lap("runbook")
    judge(files, parts, how)
    print(f"{how}: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in times.items()))


def main():
    os.environ["PATH"] = "/usr/bin:/bin:" + os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        print(f"needs root, and: {' '.join(missing)}")
        return SKIP
    try:
        with tempfile.TemporaryDirectory() as folder:
            check(sys.argv[1], folder)
    except Skipped as skipped:
        print(skipped)
        return SKIP
    return 0


if __name__ == "__main__":
    sys.exit(main())
