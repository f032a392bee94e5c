"""The Prometheus text format 0.0.4, read strictly: what a scraper may not trip over.

    families = parse(text)                       # raises Malformed
    families["treeverify_sessions"].samples[(("state", "idle"),)]
"""

import re

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
NUMBER = re.compile(r"[+-]?(Inf|NaN|\d+(\.\d*)?([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?)$")
TYPES = ("counter", "gauge", "histogram")


class Malformed(AssertionError):
    """Text that is not of the format, or numbers that cannot be."""


class Family:
    def __init__(self, name, text):
        self.name, self.help, self.type = name, text, None
        self.samples = {}  # labels, in their order -> value; of a histogram: "_bucket" and so on in front

    def total(self):
        return sum(self.samples.values())

    def by(self, label):
        """value of the label -> sum over the others"""
        sums = {}
        for labels, value in self.samples.items():
            key = dict(labels)[label]
            sums[key] = sums.get(key, 0) + value
        return sums

    def counts(self):
        """A histogram's _count by its own labels."""
        return {labels[1:]: value for labels, value in self.samples.items() if labels[0] == "_count"}


def unescape(text, quoted):
    out, at = "", 0
    while at < len(text):
        if text[at] != "\\":
            out, at = out + text[at], at + 1
            continue
        pair = text[at : at + 2]
        known = {"\\\\": "\\", "\\n": "\n"}
        if quoted:
            known['\\"'] = '"'
        if pair not in known:
            raise Malformed(f"escape {pair!r} in {text!r}")
        out, at = out + known[pair], at + 2
    return out


def read_labels(text):
    """({...} or nothing at the front of text) -> labels, the rest"""
    if not text.startswith("{"):
        return (), text
    labels, at = [], 1
    while text[at] != "}":
        name = LABEL.match(text, at)
        if name is None or text[name.end() : name.end() + 2] != '="':
            raise Malformed(f"no label at {at} of {text!r}")
        value = re.compile(r'((?:[^"\\]|\\.)*)"').match(text, name.end() + 2)
        if value is None:
            raise Malformed(f"no end of a label value in {text!r}")
        labels.append((name.group(), unescape(value.group(1), True)))
        at = value.end()
        if text[at] == ",":
            at += 1
        elif text[at] != "}":
            raise Malformed(f"{text[at]!r} behind a label of {text!r}")
    if len({name for name, _ in labels}) != len(labels):
        raise Malformed(f"a label twice: {text!r}")
    return tuple(labels), text[at + 1 :]


def read_sample(line, family):
    name = NAME.match(line)
    suffix = name.group()[len(family.name) :]
    suffixes = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",)
    if not name.group().startswith(family.name) or suffix not in suffixes:
        raise Malformed(f"{line!r} among the samples of {family.name}")
    labels, rest = read_labels(line[name.end() :])
    if not rest.startswith(" ") or NUMBER.match(rest[1:]) is None:
        raise Malformed(f"no value: {line!r}")
    key = ((suffix,) if family.type == "histogram" else ()) + labels
    if key in family.samples:
        raise Malformed(f"twice: {line!r}")
    family.samples[key] = float(rest[1:])


def check_histogram(family):
    series = {}
    for key, value in family.samples.items():
        own = tuple(label for label in key[1:] if label[0] != "le")
        parts = series.setdefault(own, {"buckets": []})
        if key[0] == "_bucket":
            parts["buckets"].append((float(dict(key[1:])["le"].replace("+Inf", "inf")), value))
        else:
            parts[key[0]] = value
    for own, parts in series.items():
        bounds = [bound for bound, _ in parts["buckets"]]
        counts = [count for _, count in parts["buckets"]]
        if bounds != sorted(set(bounds)) or bounds[-1:] != [float("inf")]:
            raise Malformed(f"{family.name}{own}: bounds {bounds}")
        if counts != sorted(counts) or counts[-1] != parts["_count"]:
            raise Malformed(f"{family.name}{own}: {counts} of {parts['_count']}")
        if "_sum" not in parts or (counts[-1] == 0 and parts["_sum"] != 0):
            raise Malformed(f"{family.name}{own}: sum {parts.get('_sum')} of {counts[-1]} values")


def check_family(family):
    if family.type == "histogram":
        check_histogram(family)
    for key, value in family.samples.items():
        if value != value:
            raise Malformed(f"{family.name}{key} is not a number")
        if family.type != "gauge" and value < 0:
            raise Malformed(f"{family.name}{key} is {value}")
    if family.type == "counter" and not family.name.endswith("_total"):
        raise Malformed(f"{family.name}: a counter ends in _total")
    if family.type != "counter" and family.name.endswith("_total"):
        raise Malformed(f"{family.name}: a {family.type} does not end in _total")


def parse(text):
    """name -> Family. HELP, then TYPE, then the samples, all of a family together."""
    if not text.endswith("\n"):
        raise Malformed("the last line has no end")
    families, family = {}, None
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, _, words = line[7:].partition(" ")
            if NAME.fullmatch(name) is None or name in families or not words:
                raise Malformed(f"bad or second HELP: {line!r}")
            if family is not None and family.type is None:
                raise Malformed(f"{family.name} has no TYPE")
            family = families[name] = Family(name, unescape(words, False))
        elif line.startswith("# TYPE "):
            name, _, kind = line[7:].partition(" ")
            if family is None or name != family.name or family.type is not None or kind not in TYPES:
                raise Malformed(f"TYPE without its HELP: {line!r}")
            family.type = kind
        elif family is None or family.type is None or NAME.match(line) is None:
            raise Malformed(f"not a line of the format: {line!r}")
        else:
            read_sample(line, family)
    for each in families.values():
        check_family(each)
    return families


def growing(before, after):
    """Counters and histograms of `before` that `after` has below or not at all."""
    lost = []
    for name, family in before.items():
        if family.type == "gauge":
            continue
        later = after[name].samples if name in after else {}
        lost += [(name, key) for key, value in family.samples.items() if later.get(key, -1) < value]
    return lost
