"""page_embed.py PAGE OUTPUT: the status page as a header in C, with the hashes of its style and its script.

Refuses a page that its own policy would break or that reaches outside: other elements that load
something, attributes with script or style in them, addresses. Part of the build.
"""

import base64
import hashlib
import re
import sys

POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REFUSED = (
    (r"<(?:img|iframe|object|embed|audio|video|source|base|meta\s+http-equiv)\b", "an element that loads something"),
    (r"<script\s", "a script with attributes"),
    (r"<link\b(?![^>]*href=\"data:,\")", "a link to a resource"),
    (r"<[a-z][^>]*\s(?:style|on[a-z]+)=", "an attribute that the policy forbids"),
    (r"@import|url\(", "a resource of the style"),
    (r"(?:https?:)?//[a-z0-9-]+\.[a-z]", "an address outside"),
    (r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", "text taken for markup or code"),
)


def only(name, page):
    found = re.findall(f"<{name}>(.*?)</{name}>", page, re.S)
    if len(found) != 1:
        sys.exit(f"the page has {len(found)} <{name}> elements, not 1")
    return "'sha256-" + base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode() + "'"


def main(source, output):
    with open(source, encoding="utf-8", newline="") as file:
        page = file.read()
    for pattern, what in REFUSED:
        match = re.search(pattern, page.replace('"http://www.w3.org/2000/svg"', '""'))  # a name, not an address
        if match:
            sys.exit(f"{source}: {what}: {match.group(0)!r}")
    policy = POLICY.format(script=only("script", page), style=only("style", page))
    data = page.encode()
    lines = [",".join(map(str, data[at : at + 24])) for at in range(0, len(data), 24)]
    with open(output, "w", encoding="ascii") as file:
        file.write("/* Written by page_embed.py; for page.c alone. */\n")
        file.write("static const unsigned char page_text[] = {\n" + ",\n".join(lines) + "};\n")
        file.write(f'static const char page_policy[] = "{policy}";\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
