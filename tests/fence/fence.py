"""House rules that a machine can check. One check a run: fence.py CHECK SOURCE_ROOT [BUILD_ROOT [CC ...]]

The rules are CONTRIBUTING.md's; a new edge between modules is added there and here in one commit.
Exit 0: kept; 1: every violation is listed; 77: a tool is missing (skip). Reads files, changes none.
"""

import os
import platform
import re
import subprocess
import sys

C_ENDS = (".c", ".h", ".cu", ".cuh")
TEXT_ENDS = C_ENDS + (".py", ".sh", ".md", ".build", ".txt", ".yaml", ".yml", ".json", ".conf")
SKIP = 77

# --- what may include what -------------------------------------------------------------------

EVERY_DAEMON_MODULE_MAY = {"daemon/base", "daemon/config", "daemon/stats"}
EDGES = {
    "proto": set(),
    "kernels": set(),
    "daemon/base": set(),
    "daemon/config": {"proto/limits.h", "kernels/types.h"},
    "daemon/stats": set(),
    "daemon/cache": {"kernels"},
    "daemon/model": {"daemon/cache", "kernels", "proto/json_read.h"},
    "daemon/verify": {"daemon/model", "daemon/cache", "proto", "kernels"},
    "daemon/shadow": {"daemon/verify", "daemon/cache", "daemon/model", "kernels", "proto/request.h",
                      "proto/response.h", "proto/tree.h"},
    "daemon/session": {"proto"},
    "daemon/sched": {"daemon/verify", "daemon/session", "daemon/shadow", "proto"},
    "daemon/http": {"daemon/sched", "proto"},
    "clients/c": {"proto"},
    "clients/cli": {"clients/c"},
}
# daemon/main.c starts and stops every module
EDGES["daemon"] = {name for name in EDGES if name.startswith("daemon/")} | {"proto", "kernels"}
KERNEL_HEADERS = {"kernels/kernels.h", "kernels/types.h"}

# module -> what none of its files may reach, through whatever headers
OUT_OF_SIGHT = {
    "daemon/http": ("daemon/cache/", "daemon/model/", "daemon/verify/", "daemon/shadow/", "kernels/kernels.h"),
}
# module -> members of another module's struct that are not its to follow
OPAQUE = {
    module: ("kernels", "cache", "model") for module in ("daemon/http", "daemon/sched", "daemon/session")
}

# library header -> who may include it
OWNERS = {
    "microhttpd.h": ("daemon/http/",),
    "gnutls/": ("daemon/http/tls.c",),
    "cjson/": ("proto/json_read.c",),
    "nettle/sha": ("daemon/base/", "proto/", "clients/c/digest.c"),
    "nettle/base64.h": ("proto/", "clients/c/rows.c"),
    "ini.h": ("daemon/config/",),
    "systemd/": ("daemon/notify.c", "daemon/base/log.c"),
    "curl/": ("clients/c/",),
    "cmocka.h": ("tests/",),
    "cuda": ("kernels/cuda/", "tests/gpu/"),
    "cublas": ("kernels/cuda/",),
}

# --- calls ------------------------------------------------------------------------------------

BANNED = "strcpy strcat sprintf vsprintf gets atoi atol atoll atof system popen alloca tmpnam mktemp".split()
BANNED_IN_TESTS = "gets system popen alloca tmpnam mktemp".split()
ENDS_PROCESS = "exit _exit quick_exit abort".split()
PRINTS = "printf fprintf vfprintf puts fputs perror syslog".split()

# What marks work that was put off. In two pieces, so that this file is not its own finding.
PUT_OFF = ["TO" + "DO", "FIX" + "ME", "X" + "XX", "(?i:for" + " now)", "(?i:not" + " implemented)"]
# Texts that others wrote.
DATA = ("tests/golden/", "tests/models/", "tests/fuzz/corpus/", "clients/cli/data/")

LINES_MAX = 600
FUNCTION_LINES_MAX = 70
# path -> why it may be longer (generated or data tables only)
LONG_FILES = {}
# Headers that are templates: included with macros set by the file that includes them.
NOT_ALONE = {"kernels/cpu/micro_body.h"}
# headers of one processor's instructions: the flags of the files that include them
X86_FLAGS = {"kernels/cpu/amx_tiles.h": ["-mavx512f", "-mavx512bw", "-mamx-tile", "-mamx-bf16"]}


def files(root, ends, under=("",)):
    """Paths relative to root, '/'-separated, of the tree without build folders and hidden ones."""
    found = []
    for folder, names, leaves in os.walk(root):
        at = os.path.relpath(folder, root)
        if at != "." and "build.ninja" in leaves:
            names[:] = []
            continue
        names[:] = sorted(
            n for n in names
            if not n.startswith(".") and n != "__pycache__" and not (at == "." and n.startswith("build"))
        )
        for leaf in sorted(leaves):
            path = os.path.normpath(os.path.join(at, leaf)).replace(os.sep, "/")
            if leaf.endswith(ends) and path.startswith(under):
                found.append(path)
    return found


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8", errors="replace") as file:
        return file.read()


def code_of(text):
    """Comments and literals blanked, line breaks kept."""
    pattern = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group(0)), text)


def includes(text):
    without = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.S)
    for number, line in enumerate(without.split("\n"), 1):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if match:
            yield number, match.group(1), match.group(2)


def module_of(path):
    parts = path.split("/")
    if parts[0] in ("daemon", "clients") and len(parts) > 2:
        return "/".join(parts[:2])
    return parts[0]


def resolve(roots, path, kind, name):
    """The file of ours that an include names (roots: the sources, the build folder), or None."""
    own = (os.path.dirname(path),) if kind == '"' else ()
    for base in (*own, "", "daemon"):
        candidate = os.path.normpath(os.path.join(base, name)).replace(os.sep, "/")
        if any(os.path.isfile(os.path.join(root, candidate)) for root in roots):
            return candidate
    return None


def edge_error(module, target):
    """Why a file of `module` may not include `target` of another module; None when it may."""
    other = module_of(target)
    if other == module:
        return None
    if other == "tests":
        return "nothing includes tests/"
    if module == "tests":
        return None
    allowed = EDGES.get(module, set())
    if module.startswith("daemon"):
        allowed = allowed | EVERY_DAEMON_MODULE_MAY
    if other not in allowed and target not in allowed:
        return f"no edge {module} -> {other}"
    if other == "kernels" and target not in KERNEL_HEADERS:
        return "kernels/ is seen through kernels.h and types.h only"
    if other.startswith("daemon/") and other != "daemon/base":
        name = other.split("/")[1]
        if target != f"{other}/{name}.h":
            return f"{other} is seen through {name}.h only"
    if other == "clients/c" and target != "clients/c/treeverify-client.h":
        return "clients/c is seen through treeverify-client.h only"
    return None


def layering(root, build):
    errors = []
    edges = 0
    for path in files(root, C_ENDS):
        module = module_of(path)
        if module != "tests" and module not in EDGES:
            errors.append(f"{path}: module {module} has no rule")
            continue
        for number, kind, name in includes(read(root, path)):
            target = resolve((root, build), path, kind, name)
            if target is not None:
                if kind == "<" and module != "tests":
                    errors.append(f"{path}:{number}: <{name}>: a header of ours stands in quotes")
                edges += 1
                why = edge_error(module, target)
                if why:
                    errors.append(f"{path}:{number}: {name}: {why}")
            elif kind == '"' and module != "tests":
                errors.append(f"{path}:{number}: {name}: no such file of ours")
            for header, owners in OWNERS.items():
                if kind == "<" and name.startswith(header) and not path.startswith(owners + ("tests/",)):
                    errors.append(f"{path}:{number}: <{name}> belongs to {' and '.join(owners)}")
    if edges < 50:
        errors.append(f"only {edges} include lines found: the check looks at the wrong tree")
    for path in files(root, C_ENDS, ("deploy/",)):
        errors.append(f"{path}: deploy/ has no C code")
    return errors


def closures(root, build):
    """What a file sees through other headers, and whose parts it follows."""
    errors = []
    seen = {}

    def reach(path):
        if path not in seen:
            seen[path] = set()  # a circle of headers ends here
            for _, kind, name in includes(read(build if not os.path.isfile(os.path.join(root, path)) else root, path)):
                target = resolve((root, build), path, kind, name)
                if target is not None:
                    seen[path] |= {target} | reach(target)
        return seen[path]

    for path in files(root, C_ENDS):
        module = module_of(path)
        for far in sorted(reach(path)) if module in OUT_OF_SIGHT else ():
            if far.startswith(OUT_OF_SIGHT[module]):
                errors.append(f"{path}: sees {far} through its headers")
        for member in OPAQUE.get(module, ()):
            if re.search(rf"engine\s*->\s*{member}\b", code_of(read(root, path))):
                errors.append(f"{path}: engine->{member} is verify's own")
    return errors


def source_of(root, build, objects):
    """The source of an object file, as Meson names it: its path below the target's folder, '_' for '/'."""
    folder = os.path.dirname(os.path.dirname(objects))
    name = os.path.basename(objects)[: -len(".o")]
    while True:
        candidate = f"{folder}/{name}"
        if os.path.isfile(os.path.join(root, candidate)) or "_" not in name:
            return candidate
        name = name.replace("_", "/", 1)


def symbols_of(path):
    """(defined, undefined) global names of an object file."""
    run = subprocess.run(["nm", "--extern-only", "--portability", path], capture_output=True, text=True, check=True)
    names = [line.split()[:2] for line in run.stdout.split("\n") if len(line.split()) >= 2]
    return {name for name, kind in names if kind not in "Uwv"}, {name for name, kind in names if kind == "U"}


def calls(root, build):
    """Who uses whose functions, as the linker sees it: includes tell only what is seen."""
    errors = []
    owner, uses = {}, {}
    for path in files(build, (".o",), ("proto/", "kernels/", "daemon/", "clients/")):
        source = source_of(root, build, path)
        defined, uses[source] = symbols_of(os.path.join(build, path))
        owner.update({name: source for name in defined})
    crossings = 0
    for source in sorted(uses):
        module = module_of(source)
        for name in sorted(uses[source] & owner.keys()):
            other = module_of(owner[name])
            if other == module:
                continue
            crossings += 1
            allowed = EDGES.get(module, set()) | (EVERY_DAEMON_MODULE_MAY if module.startswith("daemon") else set())
            shown = [header for header in allowed if module_of(header) == other and header.endswith(".h")]
            if other in allowed or any(re.search(rf"\b{name}\b", read(root, header)) for header in shown):
                continue
            errors.append(f"{source}: {name}() of {owner[name]}: no edge {module} -> {other}")
    if crossings < 20:
        errors.append(f"only {crossings} calls between modules found: the check looks at the wrong build folder")
    return errors


def headers(root, build, compiler):
    errors = []
    done = 0
    for path in files(root, (".h",), ("proto/", "kernels/", "daemon/", "clients/", "tests/")):
        text = read(root, path)
        if path in NOT_ALONE or re.search(r"#\s*include\s*<cuda", text):
            continue
        if path in X86_FLAGS and platform.machine() != "x86_64":
            continue
        command = [*compiler, *X86_FLAGS.get(path, []), "-std=c17", "-D_GNU_SOURCE", "-Wall", "-Werror", "-fsyntax-only", "-x", "c"]
        command += ["-I", root, "-I", os.path.join(root, "daemon"), "-I", os.path.join(root, "tests", "support")]
        command += ["-I", build, "-"]
        source = f'#include "{os.path.join(root, path)}"\nint tv_fence_unit;\n'
        run = subprocess.run(command, input=source, capture_output=True, text=True)
        if "fatal error: cuda" in run.stderr:
            continue  # no toolkit here; with one, the suite gpu compiles what needs it
        done += 1
        if run.returncode != 0:
            errors.append(f"{path} does not compile alone:\n{run.stderr.strip()}")
        if not re.search(r"^#ifndef ", text, re.M):
            errors.append(f"{path}: no include guard")
    if done < 10:
        errors.append(f"only {done} headers found")
    return errors


def banned(root):
    errors = []
    for path in files(root, C_ENDS):
        words = list(BANNED_IN_TESTS if path.startswith("tests/") else BANNED)
        if path.startswith(("proto/", "kernels/", "daemon/", "clients/c/")) and path != "daemon/main.c":
            words += ENDS_PROCESS
        if path.startswith(("proto/", "kernels/")) and not path.startswith("kernels/lab/"):
            words += PRINTS
        call = re.compile(r"(?<![\w.>])(" + "|".join(words) + r")\s*\(")
        for number, line in enumerate(code_of(read(root, path)).split("\n"), 1):
            match = call.search(line)
            if match:
                errors.append(f"{path}:{number}: {match.group(1)}() is not used here")
            if re.search(r"\t", line):
                errors.append(f"{path}:{number}: tab")
            if re.match(r"\s*typedef\s+(struct|enum|union)\b", line):
                errors.append(f"{path}:{number}: typedef of a struct, enum or union")
    return errors


def device(root):
    """Every entry of the CUDA backend's table that asks the runtime for anything makes its device current first."""
    table = "kernels/cuda/backend.c"
    if not os.path.exists(os.path.join(root, table)):
        return []
    code = "\n".join(code_of(read(root, path)) for path in files(root, (".c", ".cu"), ("kernels/cuda/",)))
    errors = []
    for slot, entry in re.findall(r"\bk->(\w+) = ((?:tv_cuda|backend)_\w+);", read(root, table)):
        if slot.endswith("_workspace") or slot in ("device", "allocations"):
            continue  # what is known without the runtime
        body = re.search(r"^[^\n;{}]*\b" + entry + r"\([^;{}]*\)\n\{\n(.*?)^\}", code, re.S | re.M)
        if body is None or not re.search(r"\b(TV_CUDA_ENTER|tv_cuda_enter)\(k\)", body.group(1)):
            errors.append(f"{table}: {entry} does not make its device current")
    return errors


def symbols(root, build):
    errors = []
    libraries = files(build, (".a",), ("proto/", "kernels/", "daemon/", "clients/"))
    if len(libraries) < 4:
        return [f"only {len(libraries)} static libraries in the build folder"]
    ignored = re.compile(r"^(__asan|__odr_asan|__ubsan|__tsan|__sanitizer|__llvm|\.|DW\.ref|__x86)")
    for library in libraries:
        run = subprocess.run(
            ["nm", "--defined-only", "--extern-only", "--portability", os.path.join(build, library)],
            capture_output=True, text=True, check=True,
        )
        names = [line.split()[0] for line in run.stdout.split("\n") if len(line.split()) >= 2]
        for name in names:
            if not name.startswith("tv_") and not ignored.match(name):
                errors.append(f"{library}: symbol {name} lacks the prefix tv_")
    return errors


def formatting(root):
    for name in ("clang-format-14", "clang-format"):
        try:
            version = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
        except OSError:
            continue
        if " version 14." in version:
            paths = [os.path.join(root, path) for path in files(root, C_ENDS)]
            run = subprocess.run(
                [name, "--dry-run", "-Werror", "--ferror-limit=1", *paths], capture_output=True, text=True
            )
            return [line for line in run.stderr.split("\n") if "error:" in line]
    print("clang-format 14 is not installed")
    sys.exit(SKIP)


def length(root):
    errors = []
    for path in files(root, C_ENDS + (".py", ".sh", ".build")):
        lines = read(root, path).split("\n")
        if len(lines) > LINES_MAX and path not in LONG_FILES:
            errors.append(f"{path}: {len(lines) - 1} lines, at most {LINES_MAX - 1}")
        if not path.endswith(C_ENDS):
            continue
        if not lines[0].startswith("/*"):
            errors.append(f"{path}: does not open with what it owns and refuses")
        start = None
        for number, line in enumerate(lines, 1):
            if len(line) > 100:
                errors.append(f"{path}:{number}: {len(line)} columns")
            if line == "{":
                start = number
            elif line == "}" and start is not None:
                if number - start >= FUNCTION_LINES_MAX:
                    errors.append(f"{path}:{start}: a function of {number - start + 1} lines")
                start = None
    return errors


def paths(root):
    machine = re.compile("(/" + "work/|/" + "root/|/" + r"home/\w)")
    errors = []
    for path in files(root, TEXT_ENDS):
        if path.startswith("tests/models/") and path.endswith(".json"):
            continue
        for number, line in enumerate(read(root, path).split("\n"), 1):
            if machine.search(line):
                errors.append(f"{path}:{number}: path of one machine: {line.strip()[:80]}")
    return errors


def words(root):
    """A phrase is found across a line break too, where a comment goes on."""
    found = re.compile(r"\b(" + "|".join(PUT_OFF).replace(" ", r"\s+(?:(?:\*|#|//)\s+)?") + r")\b")
    errors = []
    read_count = 0
    for path in files(root, TEXT_ENDS):
        if path.startswith(DATA):
            continue
        text = read(root, path)
        read_count += 1
        for match in found.finditer(text):
            number = text.count("\n", 0, match.start()) + 1
            errors.append(f"{path}:{number}: work put off: {' '.join(match.group(1).split())}")
    if read_count < 5:
        errors.append(f"only {read_count} files found")
    return errors


def main():
    check, root = sys.argv[1], os.path.abspath(sys.argv[2])
    build = os.path.abspath(sys.argv[3]) if len(sys.argv) > 3 else ""
    if check == "headers":
        errors = headers(root, build, sys.argv[4:])
    elif check == "layering":
        errors = layering(root, build) + closures(root, build)
    elif check == "symbols":
        errors = symbols(root, build)
    elif check == "calls":
        errors = calls(root, build)
    else:
        checks = dict(banned=banned, device=device, format=formatting, length=length, paths=paths, words=words)
        errors = checks[check](root)
    for error in errors:
        print(error)
    print(f"{check}: {len(errors)} violations")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
