"""Acceptance length of the Python drafters on the held-out end of the bundled text: tree against chain, by budget.

    /usr/bin/python3 tests/bench/acceptance.py TREEVERIFYD [--onnx FILE [--temperature T] [--window N]] [--no-store]
        [--no-chain] [--nodes 1,2,4,8,16,32,64] [--prompts 24] [--tokens 160]

Greedy, on tests/models/kjv-mla-8m; prompts of 200 bytes from tests/golden/kjv_tail.txt; the n-gram drafter's store is
clients/cli/data/kjv-store.txt, and without --onnx it is the drafter. Prints new tokens per round, the model's own
included, for the drafter's tree and for the likeliest chain in it. The numbers depend on the text alone, not on the machine.
"""

import argparse
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "clients", "python", "src"))
sys.path.insert(0, os.path.join(ROOT, "tests", "support"))

from daemon import Daemon  # noqa: E402

from treeverify import Client, Sampling, Tree  # noqa: E402
from treeverify.drafters import NgramDrafter  # noqa: E402

PROMPT_BYTES = 200
DEPTH = 16  # of every tree, as generate() has it: a longer chain than this is none
CHAIN_TREE = 64  # drafts at most from which a chain is chosen


class Chain:
    """From the tree of a drafter's likeliest guesses, the child with the best score at each node."""

    def __init__(self, drafter):
        self.drafter = drafter

    @staticmethod
    def tree_nodes(nodes):
        return min(4 * nodes, CHAIN_TREE)

    def draft(self, tokens, nodes, depth):
        tree = self.drafter.draft(tokens, self.tree_nodes(nodes), depth)
        node, path = 0, [int(tree.tokens[0])]
        while len(path) <= nodes:
            children = [n for n in range(len(tree)) if int(tree.parents[n]) == node]
            if not children:
                break
            node = max(children, key=lambda child: tree.scores[child])
            path.append(int(tree.tokens[node]))
        return Tree.chain(path)


def prompts(count, new_tokens):
    with open(os.path.join(ROOT, "tests", "golden", "kjv_tail.txt"), "rb") as file:
        text = file.read()
    step = (len(text) - PROMPT_BYTES - new_tokens) // count
    return [list(text[i * step : i * step + PROMPT_BYTES]) for i in range(count)]


def acceptance(client, drafter, nodes, texts, new_tokens):
    rounds = tokens = 0
    for prompt in texts:
        with client.session(prompt, sampling=Sampling(rule="greedy")) as session:
            for answer in session.generate(drafter, new_tokens, nodes=nodes, depth=DEPTH):
                rounds += 1
                tokens += len(answer.new_tokens)
    return tokens / rounds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("treeverifyd")
    parser.add_argument("--onnx")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--no-store", action="store_true")
    parser.add_argument("--no-chain", action="store_true", help="trees alone")
    parser.add_argument("--nodes", default="1,2,4,8,16,32,64")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=160)
    options = parser.parse_args()
    if options.onnx:
        from treeverify.drafters.onnx import OnnxDrafter

        drafter = OnnxDrafter(options.onnx, temperature=options.temperature, window=options.window)
    else:
        store = None
        if not options.no_store:
            with open(os.path.join(ROOT, "clients", "cli", "data", "kjv-store.txt"), "rb") as file:
                store = list(file.read())
        drafter = NgramDrafter(store)
    chains = {}
    texts = prompts(options.prompts, options.tokens)
    print("| drafts besides node 0 | tree | chain |\n|--:|--:|--:|")
    with Daemon(options.treeverifyd, os.path.join(ROOT, "tests", "models", "kjv-mla-8m")) as daemon:
        with Client(f"http://{daemon.host}:{daemon.port}", timeout_s=120) as client:
            for nodes in map(int, options.nodes.split(",")):
                tree = acceptance(client, drafter, nodes, texts, options.tokens)
                same = Chain.tree_nodes(nodes), min(nodes, DEPTH)  # what a chain depends on
                if same not in chains and not options.no_chain:
                    chains[same] = acceptance(client, Chain(drafter), nodes, texts, options.tokens)
                chain = f"{chains[same]:.2f}" if same in chains else "–"
                print(f"| {nodes} | {tree:.2f} | {chain} |", flush=True)


if __name__ == "__main__":
    main()
