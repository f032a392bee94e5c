"""The fence catches what it should: a tree with one fault of each kind is refused, fault by fault.

usage: fence_catches.py FENCE_PY CC...
"""

import os
import subprocess
import sys
import tempfile

HEAD = "/*\n * file - test.\n */\n"

# Calls enough between modules that have an edge, so that a build folder without any is noticed.
CALLED = "".join(f"int tv_sched_x{i}(void);\nint tv_sched_x{i}(void)\n{{\n    return 0;\n}}\n" for i in range(25))
CALLS = "".join(f"int tv_sched_x{i}(void);\nint tv_http_x{i}(void)\n{{\n    return tv_sched_x{i}();\n}}\n" for i in range(25))
LINKED = {"daemon/sched/sound.c": CALLED, "daemon/http/sound.c": CALLS}
COUNTS = {"daemon/cache/cache.c": "int tv_cache_counts(void)\n{\n    return 0;\n}\n"}
COUNTED = "int tv_cache_counts(void);\nint f(void);\nint f(void)\n{\n    return tv_cache_counts();\n}\n"
ENTRIES = "void f(struct tv_kernels *k)\n{\n    k->x = tv_cuda_x;\n}\n"
LOST = "int tv_cuda_x(struct tv_kernels *k)\n{\n    return start();\n}\n"
ENTERED = "int tv_cuda_x(struct tv_kernels *k)\n{\n    TV_CUDA_ENTER(k);\n    return start();\n}\n"

# check, path, text (after the opening comment; or those of several paths), what the report must contain
FAULTS = [
    ("layering", "daemon/cache/cache.c", '#include "model/model.h"\n', "no edge daemon/cache -> daemon/model"),
    ("layering", "daemon/http/http.c", '#include "kernels/kernels.h"\n', "no edge daemon/http -> kernels"),
    ("layering", "daemon/model/model.c", '#include "kernels/ref/ref.h"\n', "through kernels.h and types.h"),
    ("layering", "daemon/http/http.c", "#include <kernels/ref/ref.h>\n", "no edge daemon/http -> kernels"),
    ("layering", "daemon/sched/sched.c", "#include <verify/verify.h>\n", "stands in quotes"),
    ("layering", "daemon/sched/sched.c", '#include "verify/walk.h"\n', "through verify.h only"),
    ("layering", "daemon/model/model.c", '#include "proto/request.h"\n', "no edge daemon/model -> proto"),
    ("layering", "proto/x.c", '#include "kernels/types.h"\n', "no edge proto -> kernels"),
    ("layering", "kernels/x.c", '#include "daemon/base/log.h"\n', "no edge kernels -> daemon/base"),
    ("layering", "clients/cli/x.c", '#include "daemon/base/log.h"\n', "no edge clients/cli -> daemon/base"),
    ("layering", "clients/cli/x.c", '#include "proto/request.h"\n', "no edge clients/cli -> proto"),
    ("layering", "proto/x.c", '#include "tests/support/t.h"\n', "nothing includes tests/"),
    ("layering", "clients/cli/x.c", "#include <curl/curl.h>\n", "belongs to clients/c/"),
    ("layering", "proto/x.c", "#include <cjson/cJSON.h>\n", "belongs to proto/json_read.c"),
    ("layering", "daemon/sched/sched.c", "#include <microhttpd.h>\n", "belongs to daemon/http/"),
    ("layering", "deploy/x.c", "int x;\n", "deploy/ has no C code"),
    (
        "layering",
        "daemon/http/http.c",
        {"daemon/http/http.c": '#include "sched/sched.h"\n', "daemon/sched/sched.h": '#include "verify/verify.h"\n'},
        "sees daemon/verify/verify.h through its headers",
    ),
    ("layering", "daemon/sched/info.c", "int f(void)\n{\n    return sched->engine->kernels->id;\n}\n", "verify's own"),
    ("calls", "daemon/sched/info.c", {**LINKED, **COUNTS, "daemon/sched/info.c": COUNTED}, "no edge daemon/sched -> daemon/cache"),
    ("calls", "daemon/sched/info.c", {**COUNTS, "daemon/sched/info.c": COUNTED}, "the wrong build folder"),
    ("banned", "proto/x.c", "void f(char *a)\n{\n    strcpy(a, a);\n}\n", "strcpy()"),
    ("banned", "clients/cli/x.c", "int f(char *a)\n{\n    return atoi(a);\n}\n", "atoi()"),
    ("banned", "daemon/model/model.c", "void f(void)\n{\n    exit(1);\n}\n", "exit()"),
    ("banned", "kernels/x.c", 'void f(void)\n{\n    printf("x");\n}\n', "printf()"),
    ("banned", "proto/x.c", "typedef struct y {\n    int a;\n} y;\n", "typedef"),
    ("device", "kernels/cuda/backend.c", {"kernels/cuda/backend.c": ENTRIES, "kernels/cuda/x.cu": LOST}, "tv_cuda_x does not make"),
    ("length", "proto/x.c", "int x;\n" * 600, "603 lines"),
    ("length", "proto/x.c", "void f(void)\n{\n" + "    ;\n" * 80 + "}\n", "a function of 82 lines"),
    ("length", "proto/x.c", "int " + "x" * 120 + ";\n", "125 columns"),
    ("paths", "deploy/x.sh", "cd /" + "root/here\n", "path of one machine"),
    ("words", "proto/x.c", "/* TO" + "DO */\n", "work put off: TO" + "DO"),
    ("words", "deploy/x.sh", "# Not\n# imple" + "mented\n", "work put off: Not # imple" + "mented"),
    ("words", "daemon/model/model.c", "/*\n * Good for\n * n" + "ow.\n */\n", "work put off: for * n" + "ow"),
    ("headers", "proto/x.h", "size_t tv_x(void);\n", "does not compile alone"),
]
# What must not be taken for a fault.
SOUND = [
    ("words", "proto/x.c", '/* what to do: not here */\nconst char *tv_x = "/tmp/tv_XX' + 'XXXX";\n'),
    ("device", "kernels/cuda/backend.c", {"kernels/cuda/backend.c": ENTRIES, "kernels/cuda/x.cu": ENTERED}),
    ("banned", "proto/x.c", '/* strcpy( exit( */\nconst char *tv_x = "system(";\n'),
    ("layering", "daemon/model/model.c", '#include "proto/json_read.h"\n'),
    ("layering", "daemon/http/http.c", '/* #include "kernels/kernels.h" */\n#include "sched/sched.h"\n'),
    ("calls", "daemon/verify/rows.c", {**LINKED, **COUNTS, "daemon/verify/rows.c": COUNTED}),
]
HEADERS = (
    "kernels/kernels.h kernels/types.h kernels/ref/ref.h proto/request.h proto/json_read.h daemon/base/log.h "
    "daemon/cache/cache.h daemon/model/model.h daemon/verify/verify.h daemon/verify/walk.h daemon/sched/sched.h "
    "tests/support/t.h"
).split()


def run(fence, compiler, check, path, text):
    with tempfile.TemporaryDirectory() as root:
        sound = {header: "#ifndef TV_X\n#define TV_X\n#endif\n" for header in HEADERS}
        sound["proto/sound.c"] = "#include <stddef.h>\n" + '#include "proto/request.h"\n' * 60
        sound.update(text if isinstance(text, dict) else {path: text})
        for name, body in sound.items():
            os.makedirs(os.path.join(root, os.path.dirname(name)), exist_ok=True)
            with open(os.path.join(root, name), "w", encoding="utf-8") as file:
                file.write(HEAD + body)
        for name in sound if check == "calls" else ():  # objects where Meson has them
            if name.startswith("daemon/") and name.endswith(".c"):
                to = os.path.join(root, "daemon", "lib.p", name[len("daemon/"):].replace("/", "_") + ".o")
                os.makedirs(os.path.dirname(to), exist_ok=True)
                subprocess.run([*compiler, "-c", os.path.join(root, name), "-o", to], check=True)
        return subprocess.run(
            [sys.executable, fence, check, root, root, *compiler], capture_output=True, text=True
        )


def main():
    fence, compiler = sys.argv[1], sys.argv[2:]
    failed = 0
    for check, path, text, expected in FAULTS:
        got = run(fence, compiler, check, path, text)
        if got.returncode != 1 or expected not in got.stdout:
            failed += 1
            print(f"NOT CAUGHT {check} {path}: wanted {expected!r}\n{got.stdout}{got.stderr}")
    for check, path, text in SOUND:
        got = run(fence, compiler, check, path, text)
        if got.returncode != 0:
            failed += 1
            print(f"FALSE ALARM {check} {path}\n{got.stdout}{got.stderr}")
    print(f"{len(FAULTS)} faults, {len(SOUND)} sound trees, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
