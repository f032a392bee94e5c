"""Following a session: every token arrives once, whatever becomes of the connections; ends and refusals are told."""

import asyncio
import contextlib
import random
import threading

import httpx
from harness import GREEDY, QUICK, SCALE, DaemonTest, prompts, url_of

import treeverify as tv
from treeverify import AsyncClient, Client, Tree
from treeverify.events import Parser

ROUNDS = max(10, int(40 * SCALE))
BLOCKS = b"""retry: 2000
id: 3
event: state
data: {"a": 1}

:

event: lease
data: {"b": [2]}

id: 4
event: commit
data: {}

"""


class Cut(httpx.SyncByteStream):
    """An answer that breaks after so many bytes."""

    def __init__(self, inner, left):
        self.inner, self.left = inner, left

    def __iter__(self):
        for chunk in self.inner:
            yield chunk[: self.left]
            self.left -= len(chunk)
            if self.left <= 0:
                raise httpx.ReadError("cut by the test")

    def close(self):
        self.inner.close()


class Cutting(httpx.BaseTransport):
    def __init__(self, seed):
        self.inner, self.random, self.cuts = httpx.HTTPTransport(), random.Random(seed), 0

    def handle_request(self, request):
        answer = self.inner.handle_request(request)
        if not request.url.path.endswith("/events"):
            return answer
        self.cuts += 1
        stream = Cut(answer.stream, self.random.randrange(40, 900))
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream)

    def close(self):
        self.inner.close()


class ParserTest(DaemonTest):
    def test_any_cut(self):
        whole = Parser().take(BLOCKS)
        self.assertEqual([(event.name, event.id) for event in whole], [("state", 3), ("lease", None), ("commit", 4)])
        self.assertEqual(whole[1].data, {"b": [2]})
        for size in (1, 2, 3, 7, 50):
            parser = Parser()
            found = [event for at in range(0, len(BLOCKS), size) for event in parser.take(BLOCKS[at : at + size])]
            self.assertEqual(found, whole)
        for block in (b"data: {\n\n", b"data: []\n\n", b"id: x\ndata: {}\n\n"):
            with self.assertRaises(tv.ContractError):
                Parser().take(block)


class EventsTest(DaemonTest):
    def rounds(self, session):
        for turn in range(ROUNDS):
            if turn % 3 == 0:
                session.decode(1 + turn % 5)
            else:
                session.verify(Tree.chain([session.pending, 32, 97]))

    def test_a_session_is_followed(self):
        with self.client.session(prompts(1)[0], sampling=GREEDY) as session:
            events = self.client.events(session)
            first = next(events)
            self.assertEqual((first.name, first.data["pending"]), ("state", session.pending))
            text = [session.pending]
            for turn in range(6):
                session.decode(2) if turn % 2 else session.verify(Tree.chain([session.pending, 32]))
                event = next(events)
                self.assertEqual((event.name, event.id, event.data["digest"]), ("commit", turn + 1, session.digest))
                text += event.data["new_tokens"]
            self.assertEqual(text, session.new_tokens)
            session.rollback(session.committed_len - 2)
            self.assertEqual(next(events).name, "rollback")
            session.close()
            self.assertEqual([event.data for event in events if event.name == "end"], [{"reason": "deleted"}])
            with self.assertRaises(tv.NotFoundError):
                next(self.client.events(session.id))

    def test_lost_connections(self):
        """From another thread, over connections that break in the middle of events."""
        transport = Cutting(7)
        with Client(url_of(self.daemon), retry=QUICK, timeout_s=120, transport=transport) as follower:
            with self.client.session(prompts(1)[0], sampling=GREEDY, lease_s=3600) as session:
                text, ids = [session.pending], []

                def follow():
                    for event in follower.events(session.id, 0):
                        if event.name == "commit":
                            ids.append(event.id)
                            text.extend(event.data["new_tokens"])

                thread = threading.Thread(target=follow, daemon=True)
                thread.start()
                self.rounds(session)
                wanted = session.new_tokens
                while len(ids) < ROUNDS and thread.is_alive():
                    thread.join(0.01)
            thread.join(120)
            self.assertFalse(thread.is_alive())
            self.assertEqual(ids, list(range(1, ROUNDS + 1)))
            self.assertEqual(text, wanted)
            self.assertGreater(transport.cuts, 3)
            self.assertGreaterEqual(follower.retries, transport.cuts - 1)

    def test_async(self):
        async def everything():
            async with AsyncClient(url_of(self.daemon), retry=QUICK, timeout_s=120) as client:
                async with await client.session(prompts(1)[0], sampling=GREEDY) as session:
                    text = [session.pending]

                    async def follow():
                        async for event in client.events(session, 0):
                            if event.name == "commit":
                                text.extend(event.data["new_tokens"])
                            elif event.name == "end":
                                return event.data["reason"]
                        raise AssertionError("a stream that ended untold")

                    task = asyncio.create_task(follow())
                    async with contextlib.aclosing(client.events(session)) as events:
                        self.assertEqual((await anext(events)).name, "state")
                        await session.decode(5)
                        self.assertEqual((await anext(events)).id, 1)
                    await session.verify(Tree.chain([session.pending, 32, 97]))
                    wanted = session.new_tokens
                self.assertEqual(await asyncio.wait_for(task, 120), "deleted")
                self.assertEqual(text, wanted)

        asyncio.run(everything())

    def test_refusals(self):
        with self.client.session([1, 2, 3]) as session:
            with self.assertRaises(tv.BadRequestError):
                next(self.client.events(session, 5))
        quiet = Client("http://127.0.0.1:9", retry=tv.Retry(attempts=2, base_s=0.001), connect_s=1)
        with self.assertRaises(tv.TransportError):
            next(quiet.events("s_0123456789abcdefghijAB"))
        quiet.close()
