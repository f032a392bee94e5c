"""Under which names (Host) a daemon may be called: a page in a browser brings a name of its own (DNS rebinding).

Without keys it is refused with 403, on both listeners and for every route, before anything of the body is taken;
names of the option hosts are taken. With keys the key decides.
"""

import os
import tempfile
import unittest

from harness import FixedDaemon, Reader

OURS = ("localhost", "LocalHost:8471", "127.0.0.1", "127.0.0.1:1", "127.8.9.1:65535", "[::1]", "[::1]:8471", "[0:0:0:0:0:0:0:1]")
FOREIGN = (
    "evil.example", "evil.example:8471", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:127.0.0.1", "localhost@evil.example",
    "192.0.2.1", "0.0.0.0", "[::]", "[::ffff:127.0.0.1]", "::1", "[::1", "[]", "127.1", "2130706433", "0x7f.0.0.1", "localhost.", ":8471", "",
    "a" * 300,
)
SECRET = "a-secret-of-16-bytes"


def answer(daemon, host, target="/healthz", method="GET", admin=False, lines=(), body=b""):
    head = [f"{method} {target} HTTP/1.1", f"Host: {host}", *lines, "", ""]
    with daemon.connect(admin) as sock:
        sock.sendall("\r\n".join(head).encode() + body)
        return Reader(sock).answer(method, target)


class HostsTest(unittest.TestCase):
    def refused(self, got, host):
        self.assertEqual((got.status, got.code), (403, "forbidden"), host)

    def test_open_listeners_have_few_names(self):
        with FixedDaemon() as daemon:
            for admin in (False, True):
                for host in OURS:
                    self.assertEqual(answer(daemon, host, admin=admin).status, 200, host)
                for host in FOREIGN:
                    self.refused(answer(daemon, host, admin=admin), host)
            self.refused(answer(daemon, "evil.example", "/", admin=True), "the status page")
            body = b'{"tokens":[1,2,3]}'
            lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
            self.refused(answer(daemon, "evil.example", "/v1/sessions", "POST", lines=lines, body=body), "a body")
            listed = answer(daemon, "localhost", "/v1/sessions")
            self.assertEqual(listed.json["sessions"], [])  # nothing was created
            with daemon.connect() as sock:  # what no browser speaks
                sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
                self.assertEqual(Reader(sock).answer("GET", "/healthz").status, 200)

    def test_names_of_the_configuration(self):
        with FixedDaemon("--hosts", "gpu.example,other") as daemon:
            for host in ("gpu.example", "GPU.example:8471", "other", "localhost"):
                self.assertEqual(answer(daemon, host).status, 200, host)
            for host in ("gpu.example.evil.example", "gpu", "example", "gpu.example,other", "oth", ""):
                self.refused(answer(daemon, host), host)
        with FixedDaemon("--hosts", "any") as daemon:
            self.assertEqual(answer(daemon, "evil.example").status, 200)

    def test_with_keys_the_key_decides(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "keys")
            with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(f"someone:verify:{SECRET}\n")
            with FixedDaemon("--api-key-file", path) as daemon:
                key = [f"Authorization: Bearer {SECRET}"]
                self.assertEqual(answer(daemon, "evil.example", "/v1/sessions").status, 401)
                self.assertEqual(answer(daemon, "gpu.example", "/v1/sessions", lines=key).status, 200)


if __name__ == "__main__":
    unittest.main(verbosity=1)
