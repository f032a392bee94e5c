"""The Python client's share of client_endurance.py: rounds along known texts, each token compared.

usage: python_rounds.py URL; stdin: three lines, the cases [(prompt, sampling, text)...], how many rounds, the length of a
session. Prints rounds and tokens.
"""

import ast
import sys

from treeverify import Client, Retry, Sampling
from treeverify.drafters import TraceDrafter


def main():
    cases, wanted, length = map(ast.literal_eval, sys.stdin.read().split("\n"))
    done = tokens = at = 0
    with Client(sys.argv[1], retry=Retry(attempts=30, total_s=60.0, base_s=0.001, cap_s=0.05)) as client:
        while done < wanted:
            prompt, (rule, temperature, seed), text = cases[at % len(cases)]
            at += 1
            chosen = Sampling(rule=rule) if rule == "greedy" else Sampling(rule=rule, temperature=temperature, seed=seed)
            drafter = TraceDrafter([*prompt, *text], wrong_every=5, wrong=1, branch=True)
            with client.session(prompt, sampling=chosen) as session:
                count = min(length, 5 * (wanted - done) + 1)
                for round in session.generate(drafter, count - 1, nodes=6, depth=4):
                    tokens, done = tokens + len(round.new_tokens), done + 1
                assert session.new_tokens == text[: len(session.new_tokens)], "a token was lost or doubled"
                assert session.state()["committed_len"] == len(session.tokens)
    print(done, tokens)


if __name__ == "__main__":
    main()
