"""The async client: sessions side by side over a flaky link, and calls that are cancelled."""

import asyncio

import httpx
from harness import GREEDY, QUICK, SCALE, DaemonTest, FlakyProxy, prompts, url_of

import treeverify as tv
from treeverify import AsyncClient, Tree
from treeverify.drafters import TraceDrafter

COUNT = max(16, int(60 * SCALE))


class AsyncTest(DaemonTest):
    def test_eight_sessions_side_by_side(self):
        starts = prompts(8, 60)
        samplings = [GREEDY if i % 2 else tv.Sampling(temperature=0.9, seed=i) for i in range(8)]
        plain = [self.plain(prompt, COUNT, sampling) for prompt, sampling in zip(starts, samplings)]
        proxy = FlakyProxy(self.daemon, 0.15)
        self.addCleanup(self.close_leftovers)

        async def one(client, at):
            async with await client.session(starts[at], sampling=samplings[at]) as session:
                drafter = TraceDrafter(starts[at] + plain[at], wrong_every=2 + at, wrong=1)
                text = [session.pending]
                async for round in session.generate(drafter, COUNT - 1, nodes=6):
                    text += round.new_tokens
                return text[:COUNT]

        async def everything():
            async with AsyncClient(proxy.url, retry=QUICK, timeout_s=120) as client:
                return await asyncio.gather(*(one(client, at) for at in range(8)))

        try:
            self.assertEqual(asyncio.run(everything()), plain)
        finally:
            proxy.close()

    def test_every_call(self):
        prompt = prompts(1)[0]
        plain = self.plain(prompt, 12)

        async def calls():
            async with AsyncClient(url_of(self.daemon)) as client:
                self.assertTrue(await client.health())
                self.assertTrue((await client.ready())["ready"])
                self.assertEqual((await client.model()).vocab, 260)
                self.assertTrue((await client.parity())["ok"])
                self.assertEqual((await client.parity_totals())["rounds"]["violation"], 0)
                with self.assertRaises(tv.NotFoundError):
                    await client.parity_violation(1)
                shot = await client.verify(prompt, Tree.chain(plain[:3]), sampling=GREEDY)
                self.assertEqual(shot.new_tokens, plain[1:4])
                session = await client.session(prompt, sampling=GREEDY)
                want = tv.Want(logits="bf16", logits_via="fetch")
                round = await session.verify(Tree.chain(plain[:3]), want=want)
                self.assertEqual((await session.fetch_logits(round)).values.shape, (3, 260))
                self.assertEqual((await session.stored_round(1)).new_tokens, round.new_tokens)
                await session.decode(8)
                self.assertEqual(session.new_tokens, plain)
                await session.extend([65], keep_pending=True)
                self.assertEqual((await session.state(tail=1))["tail"], [65])
                self.assertEqual((await session.renew(60))["committed_len"], session.committed_len)
                self.assertEqual(len(await client.sessions()), 1)
                await session.close()
                with self.assertRaises(RuntimeError):
                    await session.decode(1)
            async with AsyncClient("http://127.0.0.1:1", retry=tv.Retry(attempts=1)) as nobody:
                self.assertFalse(await nobody.health())

        asyncio.run(calls())

    def test_a_cancelled_call_is_found_out(self):
        """The answer never reaches the caller, who goes on with another tree."""
        prompt = prompts(1)[0]
        plain = self.plain(prompt, 10)

        class Held(httpx.AsyncBaseTransport):
            def __init__(self):
                self.inner, self.hold, self.answered = httpx.AsyncHTTPTransport(), False, asyncio.Event()

            async def handle_async_request(self, request):
                response = await self.inner.handle_async_request(request)
                await response.aread()
                if self.hold and request.url.path.endswith("/verify"):
                    self.answered.set()
                    await asyncio.Event().wait()
                return response

            async def aclose(self):
                await self.inner.aclose()

        async def cancel():
            transport = Held()
            async with AsyncClient(url_of(self.daemon), transport=transport) as client:
                session = await client.session(prompt, sampling=GREEDY)
                transport.hold = True
                task = asyncio.create_task(session.verify(Tree.chain(plain[:4])))
                await transport.answered.wait()
                with self.assertRaises(RuntimeError):
                    await session.decode(1)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                transport.hold = False
                round = await session.verify(Tree.root(session.pending))
                self.assertEqual((round.recovered, round.new_tokens), ("resync", plain[1:5]))
                await session.decode(5)
                self.assertEqual(session.new_tokens, plain)
                await session.close()

        asyncio.run(cancel())
