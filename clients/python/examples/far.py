"""A drafter 20 ms away: one round at a time, then with the next round sent ahead of the answer.

    python far.py [--url URL] [--store FILE] [--rtt-ms 20] [--tokens 200] [PROMPT]

The link is emulated here, in the transport of the client; the text is the same both times. Prints tokens a second. For
models whose tokens are bytes.
"""

import argparse
import asyncio
import time

from treeverify import AsyncClient, Sampling
from treeverify.bench import FarTransport
from treeverify.drafters import NgramDrafter


async def run(options, pipeline):
    drafter = NgramDrafter.from_file(options.store) if options.store else NgramDrafter()
    transport = FarTransport(options.rtt_ms / 1e3)
    async with AsyncClient(options.url, transport=transport) as client:
        prompt = list(options.prompt.encode())
        async with await client.session(prompt, sampling=Sampling(rule="greedy")) as session:
            started = time.monotonic()
            async for _ in session.generate(drafter, options.tokens, pipeline=pipeline, guesses=4):
                pass
            return session.new_tokens[: options.tokens], time.monotonic() - started


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt", nargs="?", default="Ge1:1 In the beginning God")
    parser.add_argument("--url", default="http://127.0.0.1:8471")
    parser.add_argument("--store", metavar="FILE", help="text that the drafter knows")
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    plain, plain_s = await run(options, False)
    ahead, ahead_s = await run(options, True)
    assert ahead == plain, "the text does not depend on the link"
    print(bytes(plain).decode(errors="replace"))
    print(f"one round at a time: {len(plain) / plain_s:.0f} tokens/s; sent ahead: {len(ahead) / ahead_s:.0f} tokens/s")


if __name__ == "__main__":
    asyncio.run(main())
