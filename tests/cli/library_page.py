"""The manual page of the C library, written from its header: what is declared there, with the words that stand beside it.

Reads the header's own form: a comment in front of what it is about, one declaration behind the other. Refuses a header in
which a function has no words.
"""

import itertools
import re

import roff

SUMMARY = "calls to a treeverify server, over libcurl"
EXAMPLE = """struct tv_client_options options;
struct tv_client_session_options wanted;
struct tv_client_problem problem;
struct tv_client_round round;

tv_client_options_init(&options);
options.url = "http://127.0.0.1:8471";
tv_client_session_options_init(&wanted);   /* greedy */
wanted.tokens = prompt;
wanted.token_count = prompt_count;
if (tv_client_create(&options, &client) == 0 &&
    tv_client_session_create(client, &wanted, &session, &problem) == 0 &&
    tv_client_verify(session, tokens, parents, count, &round, &problem) == 0) {
    use(round.tokens, round.token_count);
    tv_client_round_finish(&round);
}"""
ITEM = re.compile(
    r"/\*(?P<words>.*?)\*/"
    r"|TV_CLIENT_API\s+(?P<function>[^;]+;)"
    r"|(?P<type>enum \w+ \{[^}]*\}|struct \w+ \{.*?^\});"
    r"|(?P<opaque>struct \w+;)(?: /\*(?P<aside>.*?)\*/)?",
    re.S | re.M,
)


def plain(comment):
    """The words of a comment; lines of code and of lists stay lines."""
    first, *rest = comment.strip(" ").split("\n")
    return "\n".join([first.rstrip(), *(re.sub(r"^ \*? ?", "", line).rstrip() for line in rest)]).strip("\n")


def prose(text):
    """Paragraphs; what is indented is shown as it stands, " - " and code words begin items."""
    out = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.split("\n")
        if all(line.startswith("    ") for line in lines):
            out.append(".nf\n" + roff.escape("\n".join(line[4:] for line in lines)) + "\n.fi\n")
            continue
        paragraph = []
        for line in lines:
            item = re.match(r"  (?:(-E[A-Z]+) +|- )(.*)", line)
            if item:
                paragraph.append(f".TP\n{roff.bold(item[1]) if item[1] else chr(92) + '(bu'}\n" + roff.escape(item[2]))
            else:
                paragraph.append(roff.escape(line.strip()))
        out.append("\n".join(part for part in paragraph if part) + "\n")
    return ".PP\n".join(out)


def items(header):
    """(kind, text, words) of what is declared, in its order; words: of the comment in front."""
    body = header[header.index("#define TV_CLIENT_NODES_MAX") :]
    body = body[: body.rindex("#ifdef __cplusplus")]
    found, words, end = [], "", 0
    for match in ITEM.finditer(body):
        if "\n\n" in body[end : match.start()]:
            words = ""
        end = match.end()
        if match["words"] is not None:
            words = plain(match["words"])
        elif match["function"]:
            found.append(("function", re.sub(r"\* (?=\w)", "*", re.sub(r"\s+", " ", match["function"])), words))
        elif match["type"]:
            found.append(("type", match["type"] + ";", words))
        else:
            found.append(("opaque", match["opaque"], plain(match["aside"] or words)))
    return found


def prototype(text):
    """A function on lines of at most 80 columns."""
    head, arguments = re.fullmatch(r"(.+?)\((.*)\);", text).groups()
    lines, line = [], f"{head}("
    for argument in arguments.split(", "):
        if len(line) + len(argument) + 2 > 78 and not line.endswith("("):
            lines.append(line.rstrip())
            line = " " * 8
        line += argument + ", "
    lines.append(line.removesuffix(", ") + ");")
    return "\n".join(lines)


def page(header, version):
    declared = items(header)
    functions = [item for item in declared if item[0] == "function"]
    assert len(functions) == header.count("TV_CLIENT_API ") - 1, (len(functions), header.count("TV_CLIENT_API "))
    opening = plain(re.match(r"/\*(.*?)\*/", header, re.S)[1])
    about = opening.split("\n\n", 2)[2]
    calls, rest = about.split("Every call returns ", 1)
    errors, rest = rest.split("\n\n", 1)
    out = [roff.head("treeverify-client", 3, version, SUMMARY)]
    out.append(".SH SYNOPSIS\n.nf\n#include <treeverify\\-client.h>\n.sp\n")
    out.append(roff.escape("cc drafter.c $(pkg-config --cflags --libs treeverify-client)") + "\n.fi\n")
    out.append(".SH DESCRIPTION\n" + prose(calls.strip()) + ".PP\n" + prose(rest))
    out.append(".SH FUNCTIONS\n")
    for said, group in itertools.groupby(functions, lambda item: item[2]):
        texts = [text for _, text, _ in group]
        assert said, f"{texts}: no words in front of it"
        names = ", ".join(re.search(r"(tv_client_[a-z_]+)[(]", text)[1] for text in texts)
        shown = "\n".join(prototype(text) for text in texts)
        out.append(f".SS {roff.escape(names)}\n.nf\n{roff.escape(shown)}\n.fi\n.PP\n{prose(said)}")
    types = [item for item in declared if item[0] != "function"]
    types = [f"{prose(said) if said else ''}.nf\n{roff.escape(text)}\n.fi\n" for _, text, said in types]
    out.append(".SH TYPES\n" + ".PP\n".join(types))
    out.append(".SH ERRORS\n" + roff.escape("Every call returns ") + prose(errors))
    out.append(f".SH EXAMPLE\n.nf\n{roff.escape(EXAMPLE)}\n.fi\n")
    out.append(roff.see("treeverify(1)", "treeverifyd(8)"))
    return "".join(out)
