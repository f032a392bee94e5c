"""What `meson install` puts on a machine: exactly these files, and they work from where they lie.

usage: installed.py MESON BUILD_ROOT yes|no CC...    (yes: the build has the CUDA library)
Installs below a temporary folder; nothing outside it changes. A new file of the install is added to EXPECTED
here in the same commit.
"""

import os
import subprocess
import sys
import tempfile

# path below the prefix (LIB: the library folder) -> what it is
EXPECTED = {
    "bin/treeverifyd": "program",
    "bin/treeverify": "program",
    "bin/test_verify_attn": "program",
    "bin/treeverify-kdtr": "script",
    "share/treeverify/gen_verify_attn_refs.py": "script",
    "share/treeverify/kjv-store.txt": "text",
    "share/man/man1/treeverify.1": "text",
    "share/man/man3/treeverify-client.3": "text",
    "share/man/man8/treeverifyd.8": "text",
    "share/man/man5/treeverifyd.conf.5": "text",
    "share/bash-completion/completions/treeverify": "text",
    "share/bash-completion/completions/treeverifyd": "text",
    "share/zsh/site-functions/_treeverify": "text",
    "share/zsh/site-functions/_treeverifyd": "text",
    "include/treeverify-client.h": "text",
    "LIB/libtreeverify-client.so": "link",
    "LIB/libtreeverify-client.so.0": "link",
    "LIB/libtreeverify-client.so.0.1.0": "library",
    "LIB/pkgconfig/treeverify-client.pc": "text",
    "share/treeverify/treeverifyd.conf": "text",
    "share/treeverify/grafana/treeverify.json": "text",
    "share/treeverify/prometheus/prometheus.yaml": "text",
    "share/treeverify/prometheus/treeverify.rules.yaml": "text",
    "lib/systemd/system/treeverifyd.service": "text",
    "lib/systemd/system/treeverifyd.socket": "text",
    "lib/systemd/system/treeverifyd-admin.socket": "text",
    "share/treeverify/systemd/gpu.conf": "text",
    "lib/sysusers.d/treeverify.conf": "text",
    "lib/tmpfiles.d/treeverify.conf": "text",
}
EXPECTED_CUDA = {
    "include/treeverify/kernels.h": "text",
    "include/treeverify/types.h": "text",
    "include/treeverify/cuda/cuda.h": "text",
    "LIB/libtreeverify-cuda.so": "link",
    "LIB/libtreeverify-cuda.so.0": "link",
    "LIB/libtreeverify-cuda.so.0.1.0": "library",
    "LIB/pkgconfig/treeverify-cuda.pc": "text",
    "share/treeverify/examples/example_torch.py": "script",
    "share/treeverify/examples/tvcuda.py": "text",
}
USES_CUDA = "#include <cuda/cuda.h>\nint main(void)\n{\n    return tv_cuda_abi() == 0;\n}\n"


def run(command, **options):
    got = subprocess.run(command, capture_output=True, text=True, **options)
    assert got.returncode == 0, f"{command}: exit {got.returncode}\n{got.stdout}{got.stderr}"
    return got.stdout


def install(meson, build, stage):
    """The prefix below stage, and its library folder relative to it."""
    run([meson, "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", stage])
    prefixes = [folder for folder, names, _ in os.walk(stage) if "bin" in names]
    assert len(prefixes) == 1, prefixes
    for folder, names, _ in os.walk(prefixes[0]):
        if "pkgconfig" in names:
            return prefixes[0], os.path.relpath(folder, prefixes[0])
    return prefixes[0], "lib"


def check_list(prefix, lib, expected):
    found = set()
    for folder, _, leaves in os.walk(prefix):
        found |= {os.path.relpath(os.path.join(folder, leaf), prefix) for leaf in leaves}
    wanted = {path.replace("LIB", lib): kind for path, kind in expected.items()}
    assert found == set(wanted), f"missing {set(wanted) - found}, not expected {found - set(wanted)}"
    for path, kind in wanted.items():
        full = os.path.join(prefix, path)
        mode = os.stat(full).st_mode & 0o777
        assert os.path.getsize(full) > 0, f"{path} is empty"
        assert os.path.islink(full) == (kind == "link"), path
        assert mode == (0o644 if kind == "text" else 0o755), f"{path}: mode {mode:o}"
        if kind in ("program", "library"):
            with open(full, "rb") as file:
                assert file.read(4) == b"\x7fELF", path


def check_programs(prefix):
    """From an empty folder, with nothing of the build in the environment."""
    path = os.path.join(prefix, "bin") + ":/usr/bin:/bin"
    with tempfile.TemporaryDirectory() as empty:
        options = dict(cwd=empty, env={"PATH": path, "TV_KDTR_GEN_ARGS": "--only h8_p1_b4"})
        assert "treeverifyd" in run(["treeverifyd", "--version"], **options)
        assert "usage: treeverify" in run(["treeverify", "--help"], **options)
        options["env"]["PYTHON"] = "/usr/bin/python3"
        text = run(["treeverify-kdtr"], **options)
        assert "PASS [naive]" in text and "PASS [flash]" in text, text


def check_library(prefix, lib, stage, compiler):
    """A program that knows pkg-config alone compiles, links and starts."""
    env = dict(os.environ, PKG_CONFIG_PATH=os.path.join(prefix, lib, "pkgconfig"), PKG_CONFIG_SYSROOT_DIR=stage)
    flags = run(["pkg-config", "--cflags", "--libs", "treeverify-cuda"], env=env).split()
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "uses.c"), os.path.join(folder, "uses")
        with open(source, "w", encoding="utf-8") as file:
            file.write(USES_CUDA)
        run([*compiler, "-std=c17", "-Wall", "-Werror", source, "-o", program, *flags])
        run([program], env=dict(os.environ, LD_LIBRARY_PATH=os.path.join(prefix, lib)))


def main():
    meson, build, cuda, compiler = sys.argv[1], sys.argv[2], sys.argv[3] == "yes", sys.argv[4:]
    with tempfile.TemporaryDirectory() as stage:
        prefix, lib = install(meson, build, stage)
        check_list(prefix, lib, dict(EXPECTED, **(EXPECTED_CUDA if cuda else {})))
        check_programs(prefix)
        if cuda:
            check_library(prefix, lib, stage, compiler)
    print("the install is as listed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
