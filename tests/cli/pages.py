"""Manual pages and completions are what the programs say of themselves.

    pages.py SOURCE_ROOT TREEVERIFYD [TREEVERIFY]            # compare, lint, and complete some words
    pages.py SOURCE_ROOT TREEVERIFYD [TREEVERIFY] --write    # write the pages and completions anew

The options, their values, help and defaults come from --help and --print-config, the page of the C library from its
header (library_page.py); the prose between is here. Pages lie in
deploy/man, completions for bash and zsh in deploy/completion. Without TREEVERIFY only the daemon's.
"""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile

import library_page
import roff
from roff import Option, bold, escape, paragraph

ROOT, SERVER = sys.argv[1:3]
CLIENT = next((word for word in sys.argv[3:4] if not word.startswith("-")), None)
HEADER = os.path.join(ROOT, "clients", "c", "treeverify-client.h")
MAN, COMPLETION = (os.path.join(ROOT, "deploy", folder) for folder in ("man", "completion"))

CLIENT_PROSE = """treeverify talks to a treeverifyd, which verifies draft token trees for remote drafters. Results go to
standard output, what went wrong to standard error; with --json both are JSON on standard output."""
SERVER_PROSE = """treeverifyd serves one model of the DeepSeek V2/V3 family over HTTP/JSON: drafters elsewhere post trees of
guessed tokens, and get back which guesses the model accepts and the model's own next token.

It prints one line when it serves, "listening URL admin URL", and logs to standard error. Each option is also a key of the
configuration file, see treeverifyd.conf(5), and a variable of the environment; the command line wins, then the environment,
then the file."""
SIGNALS = (
    ("SIGTERM, SIGINT", "drain: readiness fails, new sessions are refused, calls under way end, then exit 0; after "
                        "drain_max_s in any case"),
    ("SIGHUP", "read the configuration again: what may change then does, see the options; what is broken changes nothing"),
)
SERVER_EXITS = (
    ("0", "drained"), ("64", "wrong command line"), ("65", "the checkpoint is bad, missing or not supported"),
    ("69", "no device, driver or library for the backend"),
    ("70", "the self-test failed, the device is lost, or a call of the engine never ends"),
    ("71", "out of memory or threads at the start"),
    ("78", "bad configuration, key file included, or an address that cannot be bound"),
)
CONF_PROSE = """The file holds one "key = value" a line. A line that begins with # or ; is a comment. Unknown keys, keys given
twice in one file and values out of range are refused with exit 78, also where something of higher rank overrides them.

The files read are the one that --config or the variable TREEVERIFY_CONFIG names and then, in the order of their names, those
that end in .conf in the folder beside it whose name is this file's and .d (16 at most); a later file's key replaces an
earlier one's. Each key is a variable of the environment too: TREEVERIFY_ and its name in capitals.

treeverifyd --config FILE --check-config says whether a file is right, --print-config what holds and where it comes from."""


def run(program, *words, code=0):
    env = {name: value for name, value in os.environ.items() if not name.startswith("TREEVERIFY_")}
    got = subprocess.run([program, *words], capture_output=True, text=True, env=env, timeout=60)
    assert code is None or got.returncode == code, (program, words, got)
    return got.stdout if code is not None else got.stderr


# --- what the programs say -----------------------------------------------------------------------------------------


def server_options():
    lines = r"^  --([a-z-]+)(?: ([^\s\[]\S*))?(?: \[(reload(?:: contents)?)\])?\n        (.+)$"
    found = re.findall(lines, run(SERVER, "--help"), re.M)
    assert len(found) == run(SERVER, "--help").count("\n  --") > 30, found
    reload = {"": "", "reload": "; may change at SIGHUP", "reload: contents": "; the file is read again at SIGHUP"}
    return [Option(name, value, words + reload[mark]) for name, value, mark, words in found]


def server_defaults():
    found = re.findall(r"^# .+\n(# )?(\w+) = (.*)$", run(SERVER, "--print-config"), re.M)
    return {key: None if unset else value for unset, key, value in found}


def read_options(text):
    """Options of a command's help: "  --name VALUE   words", going on in lines that begin further right."""
    options = []
    for line in text.split("\n"):
        match = re.match(r"  --([a-z-]+)(?: (\S+))?(?: {2,}(.+))?$", line)
        if match:
            options.append(Option(match[1], match[2] or "", match[3] or ""))
        elif options and re.match(r" {10,}\S", line):
            last = options[-1]
            options[-1] = Option(last.name, last.value, f"{last.words} {line.strip()}".strip())
        elif options and line.startswith("  "):
            raise AssertionError(f"neither an option nor the rest of one: {line!r}")
    return options


class Command:
    """One command of treeverify, from its --help."""

    def __init__(self, name, summary):
        self.name, self.summary = name, summary
        text = run(CLIENT, name, "--help")
        blocks = text.strip("\n").split("\n\n")
        usage = blocks[0].split("\n")[0]
        assert usage.startswith(f"usage: treeverify {name} "), usage
        self.usage = re.sub(r" {2,}\(.*\)$", "", usage.removeprefix("usage: "))
        self.operand = re.sub(r"[\[\]]", "", self.usage.split("[OPTIONS]")[1]).strip()
        self.options = read_options(text)
        assert {"url", "key-file", "json", "help"} <= {option.name for option in self.options}, text
        rest = blocks[1:]
        at = next(i for i, block in enumerate(rest) if re.search(r"^  --", block, re.M))
        assert rest[at].startswith("  --"), f"{name}: an empty line parts the options from what stands before them"
        self.before, self.after = rest[:at], rest[at + 1 :]


def client_help():
    """Commands and exit codes of treeverify --help."""
    text = run(CLIENT, "--help")
    commands = [Command(*pair) for pair in re.findall(r"^  ([a-z]+) +(.+)$", text.split("\n\n")[1], re.M)]
    exits = re.findall(r"^ +(\d+)  (.+)$", text.split("exit codes:")[1], re.M)
    assert len(commands) >= 6 and len(exits) >= 8, text
    return commands, exits


# --- manual pages --------------------------------------------------------------------------------------------------


def client_page(commands, exits):
    version = run(CLIENT, "--version").split()[1]
    page = [roff.head("treeverify", 1, version, "talk to a treeverifyd")]
    page.append(".SH SYNOPSIS\n" + "\n.br\n".join(roff.usage(command.usage) for command in commands) + "\n")
    page.append(".SH DESCRIPTION\n" + paragraph(CLIENT_PROSE))
    page.append(".SH COMMANDS\n")
    for command in commands:
        page.append(f".SS {escape(command.usage)}\n")
        page.append("\n.PP\n".join(paragraph(block).rstrip("\n") for block in command.before) + "\n")
        page += [roff.option(option) for option in command.options if option.name != "help"]
        page += [".PP\n" + paragraph(block) for block in command.after]
    page.append(roff.items("EXIT STATUS", exits))
    page.append(roff.items("ENVIRONMENT", [("TREEVERIFY_URL", "the server, when --url is not given")]))
    page.append(roff.items("FILES", [("PREFIX/share/treeverify/kjv-store.txt", "a text for --store of generate")]))
    page.append(roff.see("treeverifyd(8)", "treeverifyd.conf(5)", "treeverify-client(3)"))
    return "".join(page)


def server_page(options):
    version = run(SERVER, "--version").split()[1]
    usage = run(SERVER, "--help").split("\n")[0].removeprefix("usage: ")
    page = [roff.head("treeverifyd", 8, version, "verify draft token trees for remote drafters")]
    page.append(f".SH SYNOPSIS\n{roff.usage(usage)}\n.SH DESCRIPTION\n" + paragraph(SERVER_PROSE))
    page.append(".SH OPTIONS\n" + "".join(roff.option(option) for option in options))
    page.append(roff.items("SIGNALS", SIGNALS) + roff.items("EXIT STATUS", SERVER_EXITS))
    page.append(roff.items("FILES", [
        ("/etc/treeverify/treeverifyd.conf", "what the unit of systemd names as the configuration"),
        ("PREFIX/share/treeverify/treeverifyd.conf", "a file to begin with, every key at its default"),
        ("/var/lib/treeverify", "reproducers, where nothing else is set"),
    ]))
    page.append(roff.see("treeverify(1)", "treeverifyd.conf(5)"))
    return "".join(page)


def conf_page(options, defaults):
    version = run(SERVER, "--version").split()[1]
    keys = [option for option in options if option.value and option.name != "config"]
    assert {option.name.replace("-", "_") for option in keys} == set(defaults), "--help and --print-config differ"
    page = [roff.head("treeverifyd.conf", 5, version, "configuration of treeverifyd")]
    page.append(".SH DESCRIPTION\n" + paragraph(CONF_PROSE) + ".SH KEYS\n")
    for option in keys:
        key = option.name.replace("-", "_")
        default = defaults[key]
        said = "unset" if default in (None, "") else default
        page.append(f".TP\n{bold(key)} = {roff.values(option.value)}\n{escape(option.words)} (default: {escape(said)})\n")
    page.append(".SH EXAMPLES\n.nf\nmodel = /srv/models/moonlight\nlisten = 127.0.0.1:8471\nshadow = sample:0.01\n.fi\n")
    page.append(roff.see("treeverifyd(8)", "treeverify(1)"))
    return "".join(page)


# --- completions ---------------------------------------------------------------------------------------------------


def kind(option):
    """What an option's value is: words to choose from, "file", "folder", or nothing that can be guessed."""
    if option.value in ("FILE", "DIR"):
        return "file" if option.value == "FILE" else "folder"
    return [word for word in option.value.split("|") if re.fullmatch(r"[a-z]\w*", word)]


def bash_values(pattern, option):
    found = kind(option)
    if found in ("file", "folder"):
        flag = "-f" if found == "file" else "-d"
        return f"    {pattern}) compopt -o filenames; mapfile -t COMPREPLY < <(compgen {flag} -- \"$cur\"); return ;;\n"
    words = f"mapfile -t COMPREPLY < <(compgen -W '{' '.join(found)}' -- \"$cur\"); " if found else ""
    return f"    {pattern}) {words}return ;;\n"


def bash_options(options):
    return " ".join(f"--{option.name}" for option in options)


BASH_HEAD = """# bash completion of {program}; tests/cli/pages.py writes it from the program's --help
{function}()
{{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}}
    COMPREPLY=()
"""


def bash_server(options):
    text = BASH_HEAD.format(program="treeverifyd", function="_treeverifyd") + "    case $prev in\n"
    text += "".join(bash_values(f"--{option.name}", option) for option in options if option.value)
    return text + f"""    esac
    mapfile -t COMPREPLY < <(compgen -W '{bash_options(options)}' -- "$cur")
}}
complete -F _treeverifyd treeverifyd
"""


def bash_client(commands):
    names = "|".join(command.name for command in commands)
    text = BASH_HEAD.format(program="treeverify", function="_treeverify")
    text += f"""    local command= words= operand= word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD - 1}}"; do
        case $word in
        {names}) command=$word; break ;;
        esac
    done
    case $command:$prev in
"""
    for command in commands:
        text += "".join(bash_values(f"{command.name}:--{option.name}", option) for option in command.options if option.value)
    text += f"    esac\n    case $command in\n    '') words='{' '.join(c.name for c in commands)} --help --version' ;;\n"
    for command in commands:
        operand = " operand=file" if command.operand == "FILE" else ""
        text += f"    {command.name}) words='{bash_options(command.options)}'{operand} ;;\n"
    return text + """    esac
    if [[ $operand == file && $cur != -* ]]; then
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    else
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
    fi
}
complete -F _treeverify treeverify
"""


def zsh_text(text):
    return re.sub(r"([\[\]:\\])", r"\\\1", text.split("; ")[0]).replace("'", "'\\''")


def zsh_option(option):
    spec = f"--{option.name}[{zsh_text(option.words)}]"
    if option.value:
        found = kind(option)
        action = {"file": "_files", "folder": "_files -/"}.get(found if isinstance(found, str) else "", "")
        action = f"({' '.join(found)})" if isinstance(found, list) and found else action
        spec += f":{zsh_text(option.value)}:{action}"
    return f"'{spec}'"


def zsh_arguments(options, operand="", indent="    "):
    specs = [zsh_option(option) for option in options] + (["'*:FILE:_files'"] if operand == "FILE" else [])
    return f"{indent}_arguments \\\n" + " \\\n".join(f"{indent}    {spec}" for spec in specs) + "\n"


ZSH_HEAD = "#compdef {program}\n# zsh completion of {program}; tests/cli/pages.py writes it from the program's --help\n"


def zsh_server(options):
    return ZSH_HEAD.format(program="treeverifyd") + zsh_arguments(options, indent="")


def zsh_client(commands):
    described = " ".join(f"'{command.name}:{zsh_text(command.summary)}'" for command in commands)
    text = ZSH_HEAD.format(program="treeverify") + f"""if (( CURRENT == 2 )); then
    local -a commands=({described})
    _describe command commands
    _arguments '--help[this text]' '--version[the version]'
    return
fi
local command=$words[2]
shift words
(( CURRENT-- ))
case $command in
"""
    for command in commands:
        text += f"{command.name})\n{zsh_arguments(command.options, command.operand)}    ;;\n"
    return text + "esac\n"


# --- the checks ----------------------------------------------------------------------------------------------------


def wanted():
    options, defaults = server_options(), server_defaults()
    texts = {
        os.path.join(MAN, "treeverifyd.8"): server_page(options),
        os.path.join(MAN, "treeverifyd.conf.5"): conf_page(options, defaults),
        os.path.join(COMPLETION, "treeverifyd"): bash_server(options),
        os.path.join(COMPLETION, "_treeverifyd"): zsh_server(options),
    }
    if CLIENT:
        commands, exits = client_help()
        texts[os.path.join(MAN, "treeverify.1")] = client_page(commands, exits)
        with open(HEADER, encoding="utf-8") as file:
            page = library_page.page(file.read(), run(CLIENT, "--version").split()[1])
        texts[os.path.join(MAN, "treeverify-client.3")] = page
        texts[os.path.join(COMPLETION, "treeverify")] = bash_client(commands)
        texts[os.path.join(COMPLETION, "_treeverify")] = zsh_client(commands)
    return texts


def check_options_exist():
    """Each option of a help is one that the program takes; one that nobody has is refused, so this can tell."""
    for command in client_help()[0]:
        for option in (*command.options, Option("no-such-option", "", "")):
            words = [f"--{option.name}"] + (["-1"] if option.value else []) + ["--help"]
            said = run(CLIENT, command.name, *words, code=None)
            assert ("unrecognized option" in said) == (option.name == "no-such-option"), (command.name, words, said)


def lint(path):
    """What the formatters that are here warn of."""
    for tool, command in (
        ("mandoc", ["mandoc", "-T", "lint", "-W", "warning", path]),
        ("man", ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", path]),
    ):
        if shutil.which(tool) is None:
            print(f"{tool} is not installed")
            continue
        got = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, LC_ALL="C.UTF-8", MANWIDTH="100"))
        said = got.stderr + (got.stdout if tool == "mandoc" else "")
        assert got.returncode == 0 and not said.strip(), f"{' '.join(command)}:\n{said}"


def completed(path, function, *words):
    """What bash offers for the last of the words."""
    script = f'source {path}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); {function} 2>/dev/null; '
    script += 'printf "%s\\n" "${COMPREPLY[@]}"'
    got = subprocess.run(["bash", "-c", script, "-", *words], capture_output=True, text=True, check=True)
    return sorted(got.stdout.split())


def check_bash():
    client, server = (os.path.join(COMPLETION, name) for name in ("treeverify", "treeverifyd"))
    commands = [command.name for command in client_help()[0]]
    assert completed(client, "_treeverify", "treeverify", "") == sorted([*commands, "--help", "--version"])
    assert completed(client, "_treeverify", "treeverify", "ge") == ["generate"]
    assert completed(client, "_treeverify", "treeverify", "generate", "--no") == ["--no-drafts", "--nodes"]
    assert completed(client, "_treeverify", "treeverify", "generate", "--color", "a") == ["always", "auto"]
    assert completed(client, "_treeverify", "treeverify", "bench", "--rounds", "") == []
    assert completed(server, "_treeverifyd", "treeverifyd", "--backend", "") == ["cpu", "cuda"]
    assert completed(server, "_treeverifyd", "treeverifyd", "--shadow-") == ["--shadow-path-p"]
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "text with spaces")
        os.mkdir(name)
        got = completed(client, "_treeverify", "treeverify", "generate", "--store", os.path.join(folder, "te"))
        assert " ".join(sorted(got, key=name.split().index)) == name, got
        assert len(completed(server, "_treeverifyd", "treeverifyd", "--model", os.path.join(folder, "te"))) == 3


def check_zsh():
    if shutil.which("zsh") is None:
        print("zsh is not installed: its completions were compared, not tried")
        return
    for name in ("_treeverify", "_treeverifyd"):
        path = os.path.join(COMPLETION, name)
        subprocess.run(["zsh", "-f", "-n", path], check=True)
    for typed, wanted in (
        ("treeverify gen\t", "treeverify generate"),
        ("treeverify generate --col\tal\t", "treeverify generate --color always"),
        ("treeverify bench --dr\t", "treeverify bench --drafters"),
        ("treeverifyd --bac\tcu\t", "treeverifyd --backend cuda"),
    ):
        zsh_types(typed, wanted)


def zsh_types(typed, wanted):
    """A real shell on a terminal: what stands on its line in the end."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(TERM="dumb", PS1="> ", LC_ALL="C")
        os.execvp("zsh", ["zsh", "-f", "-i"])
    seen = b""
    try:
        os.write(terminal, f"fpath=({COMPLETION} $fpath); autoload -U compinit; compinit -D -u; print rea''dy\n".encode())
        # behind the completion, the line becomes the argument of an echo (C-a, C-e) and is run
        for step, until in (("", "ready"), (f"{typed}\x01echo LINE \x05\n", f"\nLINE {wanted}")):
            seen = b""
            os.write(terminal, step.encode())
            while until.encode() not in seen.replace(b"\r", b""):
                assert select.select([terminal], [], [], 60)[0], f"zsh: {typed!r} became {seen!r}"
                seen += os.read(terminal, 4096)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def main():
    texts = wanted()
    if "--write" in sys.argv:
        for path, text in texts.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return
    assert CLIENT, __doc__
    for path, text in texts.items():
        with open(path, encoding="utf-8") as file:
            assert file.read() == text, f"{path} is not what the program says; pages.py --write writes it anew"
    for path in texts:
        if path.startswith(MAN):
            lint(path)
    check_options_exist()
    check_bash()
    check_zsh()
    print(f"{len(texts)} files")


if __name__ == "__main__":
    main()
