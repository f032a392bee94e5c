"""What shadow mode costs rounds that did not ask for it.

usage: shadow_cost.py TREEVERIFYD MODEL [TURNS] [NODES] [PREFIX]

Two daemons of one kind differ by several per cent, as their memory happens to lie. The figure to read is therefore of one
process: with --shadow sample:0.5 half of the rounds are captured, chosen by a function of the round's number that is known
here too, and the other half is not looked at. Beside it, `off` and `all` as daemons of their own.

Every turn sends one round to each daemon, in random order, and waits until the oracles are idle, so that each captured round
is captured whole and judged (with a backlog the capture is cut short, and the cost looks smaller than it is). Printed: the
round trip, and the processor time of all threads but the oracle's, which a loaded machine distorts less.
"""

import os
import random
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import Daemon, Session  # noqa: E402

MODES = {"off": 0.0, "sample:0.5": 0.5, "all": 1.0}
SAMPLED = 3  # daemons of the mode that is compared with itself
WORD = (1 << 64) - 1


def is_sampled(number, probability):
    """Whether the daemon captures its round of this number, as daemon/shadow/shadow.c decides it."""
    x = (number * 0x9E3779B97F4A7C15 + 1) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    x ^= x >> 31
    return (x >> 11) * 2.0**-53 < probability


def thread_stat(pid, thread):
    with open(f"/proc/{pid}/task/{thread}/stat", encoding="ascii") as file:
        return file.read().rsplit(")", 1)[1].split()


def live_ms(pid):
    """Processor time of the threads that serve, in ms; the oracle's is nicer than the first one."""
    total, nice = 0, int(thread_stat(pid, pid)[16])
    for thread in os.listdir(f"/proc/{pid}/task"):
        if int(thread_stat(pid, thread)[16]) <= nice:
            with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[0])
    return total / 1e6


class Side:
    """One daemon, its session and what its rounds took: [0] those that were not captured, [1] the others."""

    def __init__(self, program, model, mode, prefix, folder):
        self.mode, self.times, self.cpu = mode, ([], []), ([], [])
        self.daemon = Daemon(program, model, "--threads", "1", "--shadow", mode, "--state-dir", folder)
        self.daemon.__enter__()
        self.client = self.daemon.client()
        self.session = Session(self.client, prefix, sampling={"rule": "greedy"})

    def judged(self):
        return sum(self.client.get("/v1/parity")["rounds"].values())

    def play(self, drafts, parents):
        captured = is_sampled(len(self.times[0]) + len(self.times[1]), MODES[self.mode])
        cpu, start = live_ms(self.daemon.process.pid), time.perf_counter()
        self.session.verify(drafts, parents)
        self.times[captured].append(1e3 * (time.perf_counter() - start))
        self.cpu[captured].append(live_ms(self.daemon.process.pid) - cpu)
        while self.judged() < len(self.times[1]):
            time.sleep(0.002)
        assert self.judged() == len(self.times[1]), "the rounds that were captured are not those expected"

    def report(self):
        rounds = self.client.get("/v1/parity")["rounds"]
        for captured, name in ((0, "not captured"), (1, "captured")):
            if len(self.times[captured]) > 1:
                deciles = statistics.quantiles(self.times[captured], n=10)
                print(
                    f"--shadow {self.mode:10} {name:12} p10 {deciles[0]:.2f} ms, p50 {deciles[4]:.2f} ms, "
                    f"p90 {deciles[8]:.2f} ms; processor {statistics.median(self.cpu[captured]):.3f} ms a round"
                )
        print(f"    {rounds}")

    def cost(self):
        return statistics.median(self.cpu[1]) - statistics.median(self.cpu[0])


def main():
    program, model = sys.argv[1], sys.argv[2]
    turns, nodes, length = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((3, 100), (4, 16), (5, 200)))
    source = random.Random(1)
    prefix = [source.randrange(256) for _ in range(length)]
    drafts = [3 * i % 251 for i in range(1, nodes)]  # all different: no two siblings are equal
    parents = [(i - 1) // 2 for i in range(1, nodes)]
    modes = ["off", "all"] + ["sample:0.5"] * SAMPLED
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(program, model, mode, prefix, folder) for mode in modes]
        print(f"{turns} turns of {nodes} nodes behind {length} tokens, load {os.getloadavg()[0]:.1f}")
        for _ in range(turns):
            for side in source.sample(sides, len(sides)):
                side.play(drafts, parents)
        for side in sides:
            side.report()
        costs = [side.cost() for side in sides[2:]]
        plain = statistics.median(ms for side in sides[2:] for ms in side.cpu[0])
        print(f"a captured round in one process: {', '.join(f'{ms:+.3f}' for ms in costs)} ms of processor time")
        print(f"mean {statistics.mean(costs):+.3f} ms of {plain:.3f} ms: {statistics.mean(costs) / plain:+.1%}")
        print(f"load {os.getloadavg()[0]:.1f}")
        for side in sides:
            side.client.close()
            side.daemon.__exit__(None, None, None)


if __name__ == "__main__":
    main()
