"""Every claim of SECURITY.md names a test that is there.

    security.py SOURCE_ROOT

A row of its tables has at least one PATH:NAME, or says that it holds by construction.
"""

import os
import re
import sys

REFERENCE = re.compile(r"`(tests/[\w/]+\.(?:py|c)):(\w+)`")


def is_defined(text, name):
    return re.search(rf"(?m)^(?: {{4}}def {name}\(|static void {name}\(void \*\*state\))", text) is not None


def main():
    root = sys.argv[1]
    with open(os.path.join(root, "SECURITY.md"), encoding="utf-8") as file:
        lines = file.read().split("\n")
    errors, found, rows = [], 0, 0
    for number, line in enumerate(lines, 1):
        references = REFERENCE.findall(line)
        is_row = line.startswith("| ") and not line.startswith("| it cannot |")
        rows += is_row
        if is_row and not references and "by construction" not in line:
            errors.append(f"{number}: a claim without a test")
        if len(references) != len(re.findall(r"tests/[\w/]+\.\w+:", line)):
            errors.append(f"{number}: a reference that cannot be read")
        for path, name in references:
            found += 1
            try:
                with open(os.path.join(root, path), encoding="utf-8") as file:
                    if not is_defined(file.read(), name):
                        errors.append(f"{number}: {path} has no {name}")
            except OSError:
                errors.append(f"{number}: there is no {path}")
    if rows < 30 or found < 50:
        errors.append(f"only {rows} claims and {found} references found")
    for error in errors:
        print(f"SECURITY.md:{error}")
    print(f"{rows} claims, {found} tests named")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
