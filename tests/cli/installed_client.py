"""The client library as an installed one: its files, symbols and version, and a drafter built with nothing but pkg-config.

usage: installed_client.py MESON BUILD_ROOT SOURCE_ROOT TREEVERIFYD SANITIZE CC...   (SANITIZE: the build's, or none)
Installs below a temporary folder; nothing outside it changes.
"""

import os
import re
import subprocess
import sys
import tempfile

MESON, BUILD, ROOT, SERVER, SANITIZE = sys.argv[1:6]
CC = sys.argv[6:]
sys.path.insert(0, os.path.join(ROOT, "tests", "support"))
from daemon import Daemon

MODEL = os.path.join(ROOT, "tests", "models", "kjv-mla-8m")
HEADER = os.path.join(ROOT, "clients", "c", "treeverify-client.h")
EXAMPLE = os.path.join(ROOT, "clients", "c", "examples", "drafter.c")
PROMPT = "Holy, holy, holy, holy"
USES = """#include <treeverify-client.h>
#include <stdio.h>
int main(void)
{
    const struct tv_client_value *none = NULL; /* a value like any other that is not there */
    if (tv_client_value_first(none) != NULL || tv_client_value_next(none) != NULL || tv_client_value_name(none) != NULL ||
        tv_client_value_text(none) != NULL || tv_client_value_type(none) != TV_CLIENT_NULL) {
        return 1;
    }
    return printf("%d %s\\n", TV_CLIENT_VERSION, tv_client_version()) < 0;
}
"""


def run(command, **options):
    got = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert got.returncode == 0, f"{command}: exit {got.returncode}\n{got.stdout}{got.stderr}"
    return got.stdout


class Installed:
    """The prefix below a stage, as a user without it would see it."""

    def __init__(self, stage):
        run([MESON, "install", "-C", BUILD, "--no-rebuild", "--quiet", "--destdir", stage])
        found = [os.path.join(folder, leaf) for folder, _, leaves in os.walk(stage) for leaf in leaves]
        (self.pc,) = [path for path in found if path.endswith("/treeverify-client.pc")]
        self.lib = os.path.dirname(os.path.dirname(self.pc))
        (self.header,) = [path for path in found if path.endswith("/treeverify-client.h")]
        (self.program,) = [path for path in found if path.endswith("/bin/treeverify")]
        self.env = dict(os.environ, PKG_CONFIG_PATH=os.path.dirname(self.pc), PKG_CONFIG_SYSROOT_DIR=stage)

    def pkg_config(self, *words):
        return run(["pkg-config", *words, "treeverify-client"], env=self.env).split()

    def build(self, source, program):
        flags = [] if SANITIZE == "none" else [f"-fsanitize={SANITIZE}"]
        flags += ["-std=c17", "-Wall", "-Wextra", "-Werror", source, "-o", program]
        run([*CC, *flags, *self.pkg_config("--cflags", "--libs")])
        return dict(os.environ, LD_LIBRARY_PATH=self.lib)


def check_symbols(installed):
    """Exactly what the header declares is exported; the soname is the one that programs ask for."""
    library = os.path.join(installed.lib, "libtreeverify-client.so")
    with open(installed.header, encoding="utf-8") as file:
        text = file.read()
    declared = set(re.findall(r"TV_CLIENT_API[^;(]*?\b(tv_client_\w+)\(", text))
    assert len(declared) > 25 and text.count("TV_CLIENT_API ") == len(declared) + 1, declared  # and the macro itself
    names = run(["nm", "--dynamic", "--defined-only", "--portability", library]).split("\n")
    exported = {line.split()[0].split("@")[0] for line in names if line and line.split()[1] in "TDBRVW"}
    if SANITIZE == "none":
        assert exported == declared, exported ^ declared
    else:
        assert declared <= exported, declared - exported
    dynamic = run(["readelf", "--dynamic", "--wide", library])
    assert "Library soname: [libtreeverify-client.so.0]" in dynamic, dynamic
    assert "libtreeverify-client.so.0" in run(["readelf", "--dynamic", installed.program])


def check_version(installed, folder):
    source, program = os.path.join(folder, "uses.c"), os.path.join(folder, "uses")
    with open(source, "w", encoding="utf-8") as file:
        file.write(USES)
    number, text = run([program], env=installed.build(source, program)).split()
    assert [text] == installed.pkg_config("--modversion"), text
    major, minor, patch = map(int, text.split("."))
    assert int(number) == major * 10000 + minor * 100 + patch


def check_cplusplus(installed, folder):
    """The header is C++ too, where there is a compiler for it."""
    try:
        subprocess.run(["c++", "--version"], capture_output=True, check=True)
    except OSError:
        print("no C++ compiler: the header was not tried as C++")
        return
    run(["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++", installed.header])


def check_drafter(installed, folder):
    """The text of the drafter is what the server decodes alone."""
    program = os.path.join(folder, "drafter")
    env = installed.build(EXAMPLE, program)
    with Daemon(SERVER, MODEL) as daemon:
        url = f"http://{daemon.host}:{daemon.port}"
        said = run([program, url, PROMPT], env=env).encode()
        client = daemon.client()
        state = client.post("/v1/sessions", {"tokens": list(PROMPT.encode()), "sampling": {"rule": "greedy"}})
        body = {"seq": 1, "epoch": state["epoch"], "expected_len": len(PROMPT), "max_tokens": len(said)}
        plain = client.post(f"/v1/sessions/{state['session']}/decode", body)["new_tokens"]
        client.call("DELETE", f"/v1/sessions/{state['session']}")
        assert len(said) >= 60 and said == bytes(plain), (said, bytes(plain))
        assert client.get("/v1/sessions")["sessions"] == []
        assert "alive, ready" in run([installed.program, "health", "--url", url])  # finds the library beside itself
        client.close()
    refused = subprocess.run([program, "ftp://x"], env=env, capture_output=True, text=True)
    assert refused.returncode == 1 and "the URL" in refused.stderr, refused


def main():
    with tempfile.TemporaryDirectory() as stage, tempfile.TemporaryDirectory() as folder:
        installed = Installed(stage)
        check_symbols(installed)
        check_version(installed, folder)
        check_cplusplus(installed, folder)
        check_drafter(installed, folder)
    print("the installed library is as its header says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
