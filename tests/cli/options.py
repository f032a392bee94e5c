"""Every option of treeverifyd is in the table and in the sample file, as the program itself says it.

    options.py TREEVERIFYD SOURCE_ROOT            # compare, then try each by file, variable and command line
    options.py TREEVERIFYD SOURCE_ROOT --write    # write deploy/config/OPTIONS.md and treeverifyd.conf anew, and the
                                                  # daemon's manual pages and completions (pages.py)
"""

import os
import re
import subprocess
import sys
import tempfile
import textwrap

PROGRAM, ROOT = sys.argv[1], sys.argv[2]
TABLE = os.path.join(ROOT, "deploy", "config", "OPTIONS.md")
SAMPLE = os.path.join(ROOT, "deploy", "config", "treeverifyd.conf")

TABLE_HEAD = """# Options of treeverifyd

Each is an option of the command line (`--listen-admin off`), a variable of the environment, and a key of the configuration file (`listen_admin = off`);
the command line wins, then the environment, then the files. Those are the one that `--config FILE` or `TREEVERIFY_CONFIG` names and then, in order of their names, `FILE.d/*.conf` (16 at most), where a
later file's key replaces an earlier one's. Unknown keys, keys given twice in one file and values out of range are refused (exit 78; on the command line 64), also where something of higher rank overrides them.
`--check-config` reads everything, says what is wrong and ends; `--print-config` prints what holds, as a file, each key under its origin.

SIGHUP (`systemctl reload`) reads all of it again. A key marked `value` changes at once; of a key marked `contents` the file that it names is read again, while the name itself waits for a restart, as every
other key does, which the log says. With anything wrong in one of the files nothing changes: it is counted (`treeverify_config_reloads_total`) and logged.

| key | variable | value | default | reload | what it does |
|---|---|---|---|---|---|
"""
TABLE_FLAGS = """
On the command line alone:

| option | what it does |
|---|---|
"""
SAMPLE_HEAD = """# Configuration of treeverifyd, with every key at its default. Files named *.conf in the folder beside this
# one (this file's name and .d) are read after it, in order of their names. The table with the variables of
# the environment is in deploy/config/OPTIONS.md. Check with: treeverifyd --config FILE --check-config
"""


def clean_env(**more):
    env = {name: value for name, value in os.environ.items() if not name.startswith("TREEVERIFY_")}
    return dict(env, **more)


def run(*arguments, env=None):
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, env=env or clean_env(), timeout=60)
    return done.returncode, done.stdout, done.stderr


def printed(text):
    """key -> (origin, value or None when nobody has set it)"""
    found = {}
    for origin, unset, key, value in re.findall(r"^# (.+)\n(# )?(\w+) = (.*)$", text, re.M):
        found[key] = (origin, None if unset else value)
    return found


def options():
    """[(key, value form or "", help, what a reload does)] as --help has them."""
    _, text, _ = run("--help")
    found = re.findall(r"^  --([a-z-]+)(?: ([^\s\[]\S*))?(?: \[reload(: contents)?(\])?)?\n        (.+)$", text, re.M)
    marks = {("", ""): "", ("", "]"): "value", (": contents", "]"): "contents"}
    return [
        (name.replace("-", "_"), value, words, marks[contents, mark])
        for name, value, contents, mark, words in found if name != "config"
    ]


def cell(text):
    return text.replace("|", "\\|")


def table(entries, defaults):
    lines, flags = [TABLE_HEAD], [TABLE_FLAGS]
    for key, value, words, reload in entries:
        if not value:
            flags.append(f"| `--{key.replace('_', '-')}` | {cell(words)} |\n")
            continue
        default = defaults[key][1]
        default = "" if default is None else f"`{default}`"
        lines.append(f"| `{key}` | `TREEVERIFY_{key.upper()}` | `{cell(value)}` | {cell(default)} | {reload} | {cell(words)} |\n")
    return "".join(lines + flags)


def sample(entries, defaults):
    lines = [SAMPLE_HEAD]
    for key, value, words, _ in entries:
        if value:
            lines.append("\n" + textwrap.fill(f"{words} ({value})", 108, initial_indent="# ", subsequent_indent="# "))
            lines.append(f"\n#{key} = {defaults[key][1] or ''}".rstrip() + "\n")
    return "".join(lines)


def compare(path, wanted):
    with open(path, encoding="utf-8") as file:
        assert file.read() == wanted, f"{path} is not what the program says; options.py --write writes it anew"


def other_value(key, value, default):
    """A value that is not the default."""
    words = value.split("|")
    if value == "SEED|off":
        return "7"
    if key in ("listen", "listen_admin"):
        return "127.0.0.1:4242"
    if value == "SEED|off":
        return "7"
    if len(words) > 1 and all(re.fullmatch(r"[\w.]+", word) for word in words):
        return next(word for word in words if word != default)
    if value == "N" or value == "BYTES":
        edges = {"drain_grace_s": "9", "batch_window_us": "7", "body_bytes_large": "2000000"}
        return edges.get(key, str(int(default) + 1) if key != "answers_bytes" else "300000000")
    others = {"off|all|sample:P": "sample:0.25", "P": "0.125", "L1,L2,...|none": "3,0", "NAME1,NAME2,...|any": "a.example,b", "off|P1,P2,..": "0.5,0.25"}
    return others.get(value, "some/where")


def check_each(entries, defaults):
    """Each key by each way, and its origin; the way of higher rank wins."""
    tried = 0
    for key, value, _, _ in entries:
        if not value or key in UNCHECKED:
            continue
        wanted = other_value(key, value, defaults[key][1])
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "a.conf")
            with open(path, "w") as file:
                file.write(f"{key} = {wanted}\n")
            environment = clean_env(**{f"TREEVERIFY_{key.upper()}": wanted})
            for origin, arguments, env in (
                (f"file {path}", ["--config", path], clean_env()),
                ("environment", ["--config", path], environment),
                ("command line", [f"--{key.replace('_', '-')}={wanted}", "--config", path], environment),
            ):
                beside = NEEDS.get(key, ())
                code, out, err = run(*arguments, *beside, "--print-config", env=env)
                assert code == 0, (key, err)
                assert printed(out)[key] == (origin, wanted), (key, wanted, printed(out)[key])
        tried += 1
    assert tried > 20, tried


def check_dropins():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a.conf")
        os.mkdir(path + ".d")

        def write(name, text):
            with open(os.path.join(path + ".d", name), "w") as file:
                file.write(text)

        with open(path, "w") as file:
            file.write("max_nodes = 10\nmax_depth = 11\nthreads = 1\n")
        write("20-b.conf", "max_nodes = 20\n")
        write("10-a.conf", "max_nodes = 15\nmax_depth = 16\n")
        write("30-c.ignored", "max_nodes = 30\n")
        write(".hidden.conf", "max_nodes = 31\n")
        code, out, err = run("--print-config", env=clean_env(TREEVERIFY_CONFIG=path))
        assert code == 0, err
        got = printed(out)
        assert got["max_nodes"] == (f"file {path}.d/20-b.conf", "20"), got["max_nodes"]
        assert got["max_depth"] == (f"file {path}.d/10-a.conf", "16"), got["max_depth"]
        assert got["threads"] == (f"file {path}", "1"), got["threads"]
        arguments = ("--model", "m", "--config", path, "--check-config")
        code, out, _ = run(*arguments)
        assert (code, out) == (0, "the configuration is valid\n"), (code, out)
        for text in ("max_node = 1\n", "max_nodes = 1\nmax_nodes = 2\n", "max_nodes = 0\n", "[other]\n"):
            write("40-d.conf", text)
            if text == "[other]\n":
                write("40-d.conf", "[other]\nmax_nodes = 1\n")
            code, _, err = run(*arguments)
            assert code == 78 and "40-d.conf:" in err, (text, code, err)
        os.unlink(os.path.join(path + ".d", "40-d.conf"))
        os.symlink("/nonexistent/file", os.path.join(path + ".d", "50-e.conf"))
        code, _, err = run(*arguments)
        assert code == 78 and "50-e.conf" in err, (code, err)
        os.unlink(os.path.join(path + ".d", "50-e.conf"))
        for number in range(17):
            write(f"9{number:02}.conf", "")
        code, _, err = run(*arguments)
        assert code == 78 and "16 files" in err, (code, err)


def check_sample(defaults):
    """As it is, and with every line that has a value taken in, it means the defaults."""
    with open(SAMPLE, encoding="utf-8") as file:
        text = file.read()
    taken_in = re.sub(r"^#(\w+ = .+)$", r"\1", text, flags=re.M)
    assert len(re.findall(r"^\w+ = ", taken_in, re.M)) > 20
    for each in (text, taken_in):
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
            file.write(each)
            file.flush()
            code, out, err = run("--config", file.name, "--print-config")
        assert code == 0, err
        assert {key: value for key, (_, value) in printed(out).items()} == {
            key: value for key, (_, value) in defaults.items()
        }


def check_readme(entries, defaults):
    """The README's table has the program's defaults; of what is said in the same detail, the words too."""
    words = {key: text for key, _, text, _ in entries}
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        rows = re.findall(r"^\| `(\w+)` \| (\S+?)(?::[^|]*)? \| (.+) \|$", file.read(), re.M)
    said = {key: (default, text) for key, default, text in rows if key in words}
    assert len(said) > 8, said
    for key, (default, text) in said.items():
        assert default == defaults[key][1], (key, default, defaults[key])
    assert said["batch_window_us"][1] == words["batch_window_us"], said["batch_window_us"]


# what a key's other value is refused without
NEEDS = {"synthetic_kv": ("--synthetic-weights=7",), "products": ("--backend=cuda",)}
# keys whose value is a file that is read at once
UNCHECKED = ("api_key_file", "tls_cert", "tls_key")


def main():
    code, text, _ = run("--print-config")
    assert code == 0, text
    entries, defaults = options(), printed(text)
    assert {key for key, value, _, _ in entries if value} == set(defaults), "--help and --print-config differ"
    wanted = {TABLE: table(entries, defaults), SAMPLE: sample(entries, defaults)}
    if "--write" in sys.argv:
        for path, content in wanted.items():
            with open(path, "w", encoding="utf-8") as file:
                file.write(content)
        pages = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pages.py")
        subprocess.run([sys.executable, pages, ROOT, PROGRAM, "--write"], check=True)
        return
    for path, content in wanted.items():
        compare(path, content)
    check_readme(entries, defaults)
    check_sample(defaults)
    check_dropins()
    check_each(entries, defaults)
    print(f"{len(entries)} options")


main()
