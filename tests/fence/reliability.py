"""The scoreboard has its rows, and every test that tests/RELIABILITY.md names, there or below it, is there.

    reliability.py SOURCE_ROOT

R01 to R34 once and in order, each with a figure or the words that there is none; a file that is named exists, and so
does the function behind a colon.
"""

import os
import re
import sys

from security import is_defined

NAMED = re.compile(r"`(tests/[\w/.-]+?)(?::(\w+))?`")
ROWS = [f"R{number:02}" for number in range(1, 35)]
CELLS = 5


def main():
    root = sys.argv[1]
    with open(os.path.join(root, "tests", "RELIABILITY.md"), encoding="utf-8") as file:
        text = file.read()
    rows = [line.strip("|\n ").split(" | ") for line in text.split("\n") if re.match(r"\| R\d\d", line)]
    errors = []
    if [row[0].split()[0] for row in rows] != ROWS:
        errors.append("the rows are not R01 to R34, each once and in order")
    for row in rows:
        if len(row) != CELLS or not all(row):
            errors.append(f"{row[0]}: {len(row)} cells, or an empty one")
            continue
        if not NAMED.search(row[2]) and "not measured" not in row[4] and "`tests`" not in row[2]:
            errors.append(f"{row[0]}: a figure without a test")
    found = 0
    for path, name in NAMED.findall(text):
        found += 1
        try:
            with open(os.path.join(root, path), encoding="utf-8") as file:
                if name and not is_defined(file.read(), name):
                    errors.append(f"{path} has no {name}")
        except OSError:
            errors.append(f"there is no {path}")
    if found < 150:
        errors.append(f"only {found} tests could be read")
    for error in errors:
        print(error)
    print(f"{len(rows)} rows, {found} tests named")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
