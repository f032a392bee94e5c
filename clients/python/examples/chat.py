"""A chat loop that keeps nothing at the server: every turn is a session of its own, opened with the whole conversation.

    python chat.py [--url URL] [--tokens N] < turns.txt

Each line of the input is a turn; the model's answer ends with its line. What earlier turns have left in the server's
cache is taken over page by page, so a turn costs what is new in it: the last column tells. For models whose tokens are
bytes.
"""

import argparse
import sys

from treeverify import Client, Sampling
from treeverify.drafters import NgramDrafter
from treeverify.text import ByteText


def answer(client, history, drafter, count):
    """The model's next line, and how many tokens of the history needed no pass of the model."""
    with client.session(history, sampling=Sampling(rule="greedy"), stop=[10]) as session:
        if session.finish is None:
            for _ in session.generate(drafter, count - 1):
                pass
        return [token for token in session.new_tokens[:count] if token != 10], session.cached_len


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8471")
    parser.add_argument("--tokens", type=int, default=60, help="of an answer, at most")
    options = parser.parse_args()
    history, drafter = [], NgramDrafter()
    with Client(options.url) as client:
        for line in sys.stdin:
            history += list(line.rstrip("\n").encode()) + [10]
            tokens, cached = answer(client, history, drafter, options.tokens)
            text = ByteText()
            print("".join(map(text.feed, tokens)) + text.end())
            print(f"  ({len(history)} tokens of conversation, {cached} of them known)", flush=True)
            history += [*tokens, 10]


if __name__ == "__main__":
    main()
