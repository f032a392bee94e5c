"""differential.py sees a fault of one launch: the second daemon has one planted (tests/support/planted_round.c) from the
middle of a rig on. Its bits are not compared, as on a device: what is seen is more than the bounds allow.

usage: differential_catches.py TREEVERIFYD TREEVERIFYD_PLANTED MODELS_DIR [FAULT:PAIR:RIG...]
"""

import argparse
import os
import sys
import tempfile

import differential
from twins import Difference

STEPS = 40
SWITCHED = 15  # rounds before the fault is there
CASES = ("output:f32:f32:2", "page:f32:f32:6", "mask-bit:f32:f32:2", "output:f32:bf16:5")


class Planted(differential.Player):
    def __init__(self, args, number, file):
        super().__init__(args, number)
        self.report.exact = False
        self.file = file

    def round(self, *args, **fields):
        if self.report.rounds >= SWITCHED and self.file and not os.path.exists(self.file):
            with open(self.file, "w", encoding="ascii"):
                pass
        return super().round(*args, **fields)


def play(args, fault, number, on):
    """What it says of the fault, or None."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "on")
        os.environ.update(TV_PLANT=fault, TV_PLANT_FILE=file)
        player = Planted(args, number, file if on else None)
        try:
            player.play(STEPS)
        except Difference as difference:
            return str(difference)[:150]
        return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("other")
    parser.add_argument("models")
    parser.add_argument("cases", nargs="*", default=CASES)
    args = parser.parse_args()
    args.backend, args.seed, failed = "cpu", 4, 0
    for case in args.cases:
        fault, left, right, number = case.split(":")
        args.pairs = f"{left}:{right}"
        for on in (False, True):
            found = play(args, fault, int(number), on)
            failed += (found is not None) != on
            print(f"{'ok   ' if (found is not None) == on else 'FAIL '} {case} {'on' if on else 'off'}: {found}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
