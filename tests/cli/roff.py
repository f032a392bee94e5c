"""The few forms of a manual page that pages.py needs, in man(7)."""

import re
from typing import NamedTuple

DATE = "2026-11-30"


class Option(NamedTuple):
    name: str
    value: str  # form of its value, "" for a flag
    words: str


def escape(text):
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\`")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M)


def bold(text):
    return f"\\fB{escape(text)}\\fR"


def values(form):
    """A value's form: words to be written as they are in bold, what stands for something in italics."""
    def part(match):
        word = match[0]
        return f"\\fI{escape(word)}\\fR" if word.isupper() or re.fullmatch(r"[A-Z]+\d+", word) else bold(word)

    return re.sub(r"[A-Za-z0-9_]+", part, form.replace("-", "\\-"))


def paragraph(text):
    """Prose; an empty line parts paragraphs."""
    parts = [" ".join(part.split()) for part in text.strip().split("\n\n")]
    return "\n.PP\n".join(escape(part) for part in parts) + "\n"


def head(name, section, version, what):
    title = f'.TH {name.upper()} {section} {DATE} "treeverify {version}"\n'
    origin = '.\\" written by tests/cli/pages.py from what the program says\n'
    return f"{origin}{title}.SH NAME\n{escape(name)} \\- {escape(what)}\n"


def usage(text):
    """A line of synopsis: the program's name in bold, what stands for something in italics."""
    words = text.split(" ")
    shown = [bold(words[0])]
    for word in words[1:]:
        core = word.strip("[].")
        plain = core.islower() and not core.startswith("-") and "[" not in word
        shown.append(bold(word) if plain or core.startswith("-") else re.sub(r"[A-Za-z]+", r"\\fI\g<0>\\fR", escape(word)))
    return " ".join(shown)


def option(item):
    """A tagged paragraph of an option."""
    value = f" {values(item.value)}" if item.value else ""
    return f".TP\n{bold('--' + item.name)}{value}\n{escape(item.words)}\n"


def items(title, pairs):
    """A section of tagged paragraphs."""
    return f".SH {title}\n" + "".join(f".TP\n{bold(name)}\n{escape(words)}\n" for name, words in pairs)


def see(*names):
    pages = [f".BR {escape(name.split('(')[0])} ({name.split('(')[1]}" for name in names]
    return ".SH SEE ALSO\n" + " ,\n".join(pages) + "\n"
