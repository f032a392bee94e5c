"""TLS on both listeners: who is trusted, which versions are spoken, what a reload does, what a broken pair does.

Every certificate is made here by an authority of the test's own (certs.py); clients are curl, Python and the C client.
"""

import json
import os
import re
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import unittest
import warnings

from harness import CONTRACT, Caller, FixedDaemon, Reader, request_bytes, round_body, sized, verify_path, wait_until
from certs import Authority, not_after_s, serial
from events import Stream
from metrics import parse

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "clients", "python", "src"))
try:
    import treeverify
except ImportError:  # without httpx
    treeverify = None

def read(path):
    with open(path) as file:
        return file.read()


HANDSHAKE_S = 10  # HTTP_HEADERS_US: from accept to the end of the first headers


class TlsDaemon(FixedDaemon):
    def __init__(self, context, cert, key, *options, env=None):
        super().__init__("--tls-cert", cert, "--tls-key", key, *options, env=env)
        self.context = context

    def connect(self, admin=False, timeout=60, context=None):
        return (context or self.context).wrap_socket(super().connect(admin, timeout), server_hostname="127.0.0.1")

    def plain(self, admin=False):
        return super().connect(admin)


class TlsCaller(Caller):
    def dropped(self):
        """Without tickets nothing comes on an idle connection but its end."""
        return bool(select.select([self.sock], [], [], 0)[0])


class TlsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if os.environ.get("TV_TLS") != "1":
            raise unittest.SkipTest("this build has no TLS")
        cls.folder = tempfile.TemporaryDirectory()
        cls.authority = Authority(cls.folder.name)
        cls.stranger = Authority(cls.folder.name, "stranger")
        cls.first = cls.authority.issue("first", days=20)
        cls.second = cls.authority.issue("second", days=40, kind="RSA")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        own = tempfile.TemporaryDirectory()
        self.addCleanup(own.cleanup)
        self.cert, self.key = os.path.join(own.name, "tls.pem"), os.path.join(own.name, "tls.key")
        self.place(self.first)

    def place(self, pair):
        """The pair that the daemon is told of; each file takes its place at once."""
        for source, target in zip(pair, (self.cert, self.key)):
            shutil.copyfile(source, target + ".new")
            os.chmod(target + ".new", 0o600)
            os.replace(target + ".new", target)

    def daemon(self, *options, env=None):
        return TlsDaemon(self.authority.context(), self.cert, self.key, *options, env=env)

    def reload(self, daemon, wanted):
        daemon.process.send_signal(signal.SIGHUP)
        caller = TlsCaller(daemon, admin=True)

        def seen():
            text = caller.call("GET", "/metrics").body.decode()
            return parse(text)["treeverify_config_reloads_total"].by("result") == wanted

        wait_until(seen, 60, wanted)
        caller.close()

    def serial_of(self, daemon, admin=False):
        with daemon.connect(admin) as sock:
            return int(sock.getpeercert()["serialNumber"], 16)

    def test_clients(self):
        """curl, Python and C: each trusts its authority, and nobody else; no client gets in without TLS."""
        ca, other = self.authority.ca, self.stranger.ca
        with self.daemon() as daemon:
            for port in (daemon.port, daemon.admin_port):
                url = f"https://127.0.0.1:{port}"
                for trusted, code in ((ca, 0), (other, 60)):
                    command = ["curl", "-sS", "--noproxy", "*", "--cacert", trusted, f"{url}/healthz"]
                    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
                    self.assertEqual(done.returncode, code, done.stderr)
                    self.assertEqual(done.stdout == '{"status":"ok"}', code == 0)
                for trusted, code in ((ca, 0), (other, 69), ("/nonexistent/ca", 66)):
                    command = [os.environ["TREEVERIFY"], "health", "--url", url, "--cacert", trusted]
                    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
                    self.assertEqual(done.returncode, code, done.stderr)
                sock = daemon.plain(port == daemon.admin_port)
                sock.sendall(request_bytes("GET", "/healthz"))
                try:
                    self.assertNotIn(b"HTTP", sock.recv(100))
                except ConnectionError:
                    pass
                sock.close()
            with self.assertRaises(ssl.SSLCertVerificationError):
                daemon.connect(context=self.stranger.context())
            caller = TlsCaller(daemon)
            state = caller.session()
            for _ in range(3):
                answer = caller.call("POST", verify_path(state), round_body(state, [7, 8], [0, 0]))
                self.assertEqual(answer.status, 200, answer.body)
                state.update(answer.json)
            caller.close()
            self.assertEqual(len(daemon.text().split("PRIVATE KEY")), 1)

    @unittest.skipIf(treeverify is None, "httpx is not installed")
    def test_python_package(self):
        with self.daemon() as daemon:
            url = f"https://127.0.0.1:{daemon.port}"
            with treeverify.Client(url, ca_file=self.authority.ca) as client:
                self.assertTrue(client.health())
            with treeverify.Client(url, ca_file=self.stranger.ca, retry=treeverify.Retry(attempts=1)) as client:
                self.assertFalse(client.health())

    @unittest.skipIf(treeverify is None, "httpx is not installed")
    def test_python_commands(self):
        with tempfile.TemporaryDirectory() as folder:
            files = {name: os.path.join(folder, name) for name in ("keys", "right", "wrong")}
            for name, text in (("keys", "a:verify:0123456789abcdef\n"), ("right", "0123456789abcdef\n"), ("wrong", "0123456789abcdeF")):
                with open(files[name], "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                    file.write(text)
            env = dict(os.environ, PYTHONPATH=os.path.dirname(os.path.dirname(treeverify.__file__)))
            with self.daemon("--api-key-file", files["keys"]) as daemon:
                url = f"https://127.0.0.1:{daemon.port}"
                for command in (["generate", "--max-tokens", "4", "x"], ["bench", "--sessions", "2", "--rounds", "2", "--rtt-ms", "1"]):
                    for key, code in (("right", 0), ("wrong", 76)):
                        line = [sys.executable, "-m", "treeverify", *command, "--url", url, "--cacert", self.authority.ca]
                        line += ["--key-file", files[key]]
                        done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=env)
                        self.assertEqual(done.returncode, code, done.stderr)

    def test_versions(self):
        old, new = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
        for least, accepted in (("1.2", (old, new)), ("1.3", (new,))):
            with self.daemon("--tls-min", least) as daemon:
                for version, name in ((old, "TLSv1.2"), (new, "TLSv1.3")):
                    context = self.authority.context(version, version)
                    if version in accepted:
                        with daemon.connect(context=context) as sock:
                            self.assertEqual(sock.version(), name)
                    else:
                        with self.assertRaises((ssl.SSLError, ConnectionError)):
                            daemon.connect(context=context)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    context = self.authority.context(ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1)
                context.set_ciphers("ALL:@SECLEVEL=0")
                with self.assertRaises((ssl.SSLError, ConnectionError)):
                    daemon.connect(context=context)
                context = self.authority.context(old, old)
                context.set_ciphers("kRSA:@SECLEVEL=0")  # no forward secrecy
                with self.assertRaises((ssl.SSLError, ConnectionError)):
                    daemon.connect(context=context)

    def test_chain(self):
        """The file's further certificates are sent: who trusts the root alone is content."""
        between = self.authority.issue("between")
        leaf, key = self.authority.issue("leaf", signer=between)
        both = os.path.join(self.folder.name, "both.pem")
        with open(both, "w") as file:
            for path in (leaf, between[0]):
                with open(path) as part:
                    file.write(part.read())
        self.place((both, key))
        with self.daemon() as daemon:
            self.assertEqual(self.serial_of(daemon), serial(leaf))

    def test_the_pair_of_the_readme(self):
        """The command as it stands there makes one that is served and trusted."""
        root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
        command = re.search(r"(?m)^    (openssl req -x509 (?:.*\\\n)*.*)$", read(os.path.join(root, "README.md"))).group(1)
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["/bin/sh", "-c", command], cwd=folder, check=True, capture_output=True, timeout=60)
            cert = os.path.join(folder, "tls.crt")
            with TlsDaemon(ssl.create_default_context(cafile=cert), cert, os.path.join(folder, "tls.key")) as daemon:
                caller = TlsCaller(daemon)
                self.assertEqual(caller.call("GET", "/healthz").status, 200)
                caller.close()

    def test_reload_keeps_connections_and_sessions(self):
        """A new pair is for new connections; the ones that stand go on, and so do their sessions."""
        with self.daemon() as daemon:
            callers = [TlsCaller(daemon) for _ in range(4)]
            states = [caller.session() for caller in callers]
            socks = [caller.sock for caller in callers]
            before = daemon.fds()
            self.place(self.second)
            self.reload(daemon, {"done": 1, "failed": 0})
            for admin in (False, True):
                self.assertEqual(self.serial_of(daemon, admin), serial(self.second[0]))
            for caller, state, sock in zip(callers, states, socks):
                answer = caller.call("POST", verify_path(state), round_body(state))
                self.assertEqual(answer.status, 200, answer.body)
                # under sanitizers one may have been idle for too long, and then there is another
                if caller.sock is sock:
                    self.assertEqual(int(sock.getpeercert()["serialNumber"], 16), serial(self.first[0]))
                caller.close()
            wait_until(lambda: daemon.fds() <= before, 60, "no descriptor more")
            metrics = TlsCaller(daemon, admin=True)
            text = metrics.call("GET", "/metrics").body.decode()
            metrics.close()
            self.assertEqual(parse(text)["treeverify_tls_not_after_seconds"].total(), not_after_s(self.second[0]))

    def test_events_across_a_reload(self):
        """A stream is a connection too: it goes on under the pair that it began with."""
        with self.daemon() as daemon:
            caller = TlsCaller(daemon)
            state = caller.session()
            path = f"/v1/sessions/{state['session']}"
            stream = Stream(daemon.connect(), CONTRACT, f"{path}/events")
            self.assertEqual(stream.next().name, "state")
            for i in range(4):
                if i == 2:
                    self.place(self.second)
                    self.reload(daemon, {"done": 1, "failed": 0})
                answer = caller.call("POST", verify_path(state), round_body(state, [7, 8], [0, 0]))
                self.assertEqual(answer.status, 200, answer.body)
                state.update(answer.json)
                event = stream.next()
                self.assertEqual((event.name, event.data["digest"]), ("commit", state["digest"]))
            self.assertEqual(int(stream.sock.getpeercert()["serialNumber"], 16), serial(self.first[0]))
            self.assertEqual(caller.call("DELETE", path).status, 204)
            self.assertEqual(stream.rest(), [("end", None, {"reason": "deleted"})])
            stream.close()
            caller.close()

    def test_reload_storm(self):
        """Pairs change under handshakes: each handshake is whole, with the one or the other."""
        known = {serial(self.first[0]), serial(self.second[0])}
        with self.daemon() as daemon:
            self.serial_of(daemon)
            before, seen = daemon.fds(), set()
            for i in range(sized(40, 1000, 8)):
                self.place((self.first, self.second)[i % 2])
                daemon.process.send_signal(signal.SIGHUP)
                seen.add(self.serial_of(daemon))
            self.assertLessEqual(seen, known)
            self.place(self.second)
            daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: self.serial_of(daemon) == serial(self.second[0]), 60, "the last one")
            wait_until(lambda: daemon.fds() <= before, 60, "no descriptor more")

    def broken(self):
        """(what, certificate, key, what is said of it)"""
        cert, key = (read(path) for path in self.first)
        weak = self.authority.issue("weak", kind="RSA", options=("rsa_keygen_bits:1024",))
        locked = os.path.join(self.folder.name, "locked.key")
        subprocess.run(
            ["openssl", "pkey", "-in", self.first[1], "-aes256", "-passout", "pass:secret", "-out", locked],
            check=True, capture_output=True, timeout=60,
        )
        yield "no certificate", None, key, "tls_cert"
        yield "no key", cert, None, "tls_key"
        yield "empty certificate", "", key, "tls_cert"
        yield "empty key", cert, "", "tls_key"
        yield "another's key", cert, read(self.second[1]), "not the certificate's"
        yield "cut certificate", cert[:200], key, "tls_cert"
        yield "cut key", cert, key[:60], "tls_key"
        yield "no PEM", "x" * 5000, key, "tls_cert"
        yield "the wrong way round", key, cert, "tls_cert"
        yield "a locked key", cert, read(locked), "tls_key"
        yield "a weak key", read(weak[0]), read(weak[1]), "too short"
        yield "too large", cert + "\n" * (300 << 10), key, "too large"

    def write(self, path, text):
        if text is None:
            if os.path.exists(path):
                os.unlink(path)
            return
        with open(path, "w") as file:
            file.write(text)

    def test_broken_pairs(self):
        """None starts (78), and a reload that finds one keeps what was."""
        failed = 0
        with self.daemon() as daemon:
            for what, cert, key, says in self.broken():
                with self.subTest(what=what):
                    self.write(self.cert, cert)
                    self.write(self.key, key)
                    command = [daemon.program, "--model", "m", "--tls-cert", self.cert, "--tls-key", self.key]
                    done = subprocess.run([*command, "--check-config"], capture_output=True, text=True, timeout=60)
                    self.assertEqual(done.returncode, 78, done.stderr)
                    self.assertIn(says, done.stderr)
                    done = subprocess.run([*command, "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=60)
                    self.assertEqual(done.returncode, 78, done.stderr)
                    failed += 1
                    self.reload(daemon, {"done": 0, "failed": failed})
                    self.assertEqual(self.serial_of(daemon), serial(self.first[0]))
            self.assertEqual(daemon.text().count("everything stays as it was"), failed)
            self.place(self.second)
            self.reload(daemon, {"done": 1, "failed": failed})
            self.assertEqual(self.serial_of(daemon), serial(self.second[0]))
        for options in (("--tls-cert", self.cert), ("--tls-key", self.key)):
            done = subprocess.run(
                [daemon.program, "--model", "m", *options, "--check-config"], capture_output=True, text=True, timeout=60
            )
            self.assertEqual(done.returncode, 78)
            self.assertIn("go together", done.stderr)

    def test_dates(self):
        """A certificate that is over or soon will be is served, and said."""
        for days, says in ((-1, "<4>warning: tls: .* is over since"), (3, "<4>warning: tls: .* is good for [23] days"),
                           (20, "<6>tls: .* is good for (19|20) days")):
            pair = self.authority.issue(f"days{days}", days=days)
            self.place(pair)
            with self.daemon() as daemon:
                self.assertRegex(daemon.text(), says)
                context = self.authority.context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                daemon.context = context
                caller = TlsCaller(daemon, admin=True)
                text = caller.call("GET", "/metrics").body.decode()
                self.assertEqual(parse(text)["treeverify_tls_not_after_seconds"].total(), not_after_s(pair[0]))
                caller.close()

    def test_readable_key_is_said(self):
        os.chmod(self.key, 0o644)
        with self.daemon() as daemon:
            self.assertIn("tls_key: others may read", daemon.text())

    def test_credentials(self):
        """As systemd hands them over: by name, of one folder."""
        env = {"CREDENTIALS_DIRECTORY": os.path.dirname(self.cert)}
        names = ("credential:tls.pem", "credential:tls.key")
        with TlsDaemon(self.authority.context(), *names, env=env) as daemon:
            self.assertEqual(self.serial_of(daemon), serial(self.first[0]))
        for cert, directory in (
            (names[0], None), ("credential:", env), ("credential:../tls.pem", env), ("credential:none", env),
        ):
            clean = {name: value for name, value in os.environ.items() if name != "CREDENTIALS_DIRECTORY"}
            done = subprocess.run(
                [daemon.program, "--model", "m", "--tls-cert", cert, "--tls-key", names[1], "--check-config"],
                capture_output=True, text=True, timeout=60, env=dict(clean, **(directory or {})),
            )
            self.assertEqual(done.returncode, 78, (cert, done.stderr))

    def test_slow_handshakes(self):
        """Who begins no handshake, or sends it byte by byte, or ends no headers behind it, is cut in time and without
        an answer; meanwhile others are served."""
        hello = self.client_hello()
        with self.daemon() as daemon:
            self.serial_of(daemon)
            socks = [daemon.plain() for _ in range(sized(40, 500, 8))]
            for _ in range(4):
                begin = time.monotonic()
                socks.append(daemon.connect())
                socks[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: ")
            for sock in socks:
                sock.setblocking(False)
            sent, left = 0, dict(enumerate(socks))
            while left:
                if time.monotonic() > begin + 6 * HANDSHAKE_S:
                    raise AssertionError(f"{len(left)} handshakes were never cut")
                select.select([], [], [], 0.2)
                for i, sock in list(left.items()):
                    try:
                        if i % 2 and sent < len(hello) and not isinstance(sock, ssl.SSLSocket):
                            sock.send(hello[sent:sent + 1])
                        self.assertEqual(sock.recv(100), b"")
                        del left[i]
                    except (BlockingIOError, ssl.SSLWantReadError):
                        pass
                    except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError):
                        del left[i]
                sent += 1
                self.serial_of(daemon, admin=True)
            self.assertGreater(time.monotonic() - begin, HANDSHAKE_S / 2)
            for sock in socks:
                sock.close()
            self.serial_of(daemon)

    def client_hello(self):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        shake = self.authority.context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with self.assertRaises(ssl.SSLWantReadError):
            shake.do_handshake()
        return outgoing.read()

    def test_broken_handshakes(self):
        """Bytes that are no handshake end the connection, and nothing else; no descriptor stays."""
        hello = self.client_hello()
        with self.daemon() as daemon:
            self.serial_of(daemon)
            before = daemon.fds()
            for data in (b"\0" * 100, b"\xff" * 1000, hello[:40] + b"\0" * 200, b"\x16\x03\x01\xff\xff" + b"x" * 20000,
                         b"\x15\x03\x01\x00\x02\x02\x28", hello + hello):
                sock = daemon.plain()
                try:
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass
                except OSError:
                    pass  # it was reset: that is an end too
                sock.close()
            wait_until(lambda: daemon.fds() <= before, 60, "no descriptor more")
            self.serial_of(daemon)

    def test_keys_change_within_a_connection(self):
        """TLS 1.3: a client may ask for new keys, and is answered or, where libmicrohttpd overlooks what came together
        with that, cut in time. TLS 1.2: another handshake ends the connection. The daemon lives on."""
        with self.daemon() as daemon:
            for version, order, may_go_on in (("-tls1_3", "K\n", True), ("-tls1_2", "R\n", False)):
                command = ["openssl", "s_client", version, "-connect", f"127.0.0.1:{daemon.port}", "-CAfile", self.authority.ca]
                pipe = subprocess.PIPE
                client = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
                said = ""
                while "\n---\n" not in said or "Verify return code: 0" not in said:
                    line = client.stdout.readline()
                    self.assertNotEqual(line, "", said)
                    said += line
                client.stdin.write(order)
                client.stdin.flush()
                while "KEYUPDATE" not in said and "RENEGOTIATING" not in said:
                    line = client.stdout.readline()
                    self.assertNotEqual(line, "", said)
                    said += line
                try:
                    client.stdin.write("GET /healthz HTTP/1.1\nHost: localhost\nConnection: close\n\n".replace("\n", "\r\n"))
                    client.stdin.flush()
                except BrokenPipeError:
                    self.assertFalse(may_go_on)
                rest = client.stdout.read()  # to the end: the other side closes
                client.wait(timeout=60)
                client.stdout.close()
                try:
                    client.stdin.close()
                except BrokenPipeError:
                    pass
                self.assertTrue(may_go_on or '{"status":"ok"}' not in rest, said + rest)
            self.serial_of(daemon)

    def test_connections_of_one_address(self):
        """Above the limit a connection is closed before a handshake costs anything; probes have a listener of their own."""
        with self.daemon("--connections-per-address", "4") as daemon:
            held = [daemon.connect() for _ in range(4)]
            for _ in range(3):
                with self.assertRaises(OSError):  # of ssl or of the socket
                    daemon.connect().close()
            self.serial_of(daemon, admin=True)
            for sock in held:
                sock.close()

            def admitted():
                try:
                    daemon.connect().close()
                except OSError:
                    return False
                return True

            wait_until(admitted, 60, "room again")

    def test_refused_before_the_body(self):
        """The early answer goes out as TLS, whatever of the body is still coming."""
        with self.daemon() as daemon:
            sock = daemon.connect()
            head = request_bytes("POST", "/v1/sessions", b"x" * 100)[:-100]
            sock.sendall(head.replace(b"Content-Length: 100", b"Content-Length: 100000000") + b"x" * 3000)
            answer = Reader(sock).answer("POST", "/v1/sessions")
            self.assertEqual((answer.status, answer.code), (413, "body-too-large"))
            sock.close()
            caller = TlsCaller(daemon)
            self.assertEqual(caller.call("GET", "/healthz").status, 200)
            caller.close()

    def test_a_client_that_leaves(self):
        """Its round is stored, and comes again over another connection."""
        with self.daemon() as daemon:
            caller = TlsCaller(daemon)
            state = caller.session()
            daemon.hold()
            body = json.dumps(round_body(state)).encode()
            caller.sock.sendall(request_bytes("POST", verify_path(state), body))
            wait_until(lambda: daemon.stat()[0] >= 1, 60, "the round runs")
            caller.close()
            daemon.release()
            again = TlsCaller(daemon)
            answer = again.call("POST", verify_path(state), round_body(state))
            self.assertEqual((answer.status, answer.json["replayed"]), (200, True), answer.body)
            again.close()

    def test_large_answers(self):
        """More than the socket takes at once, read late."""
        with self.daemon() as daemon:
            caller = TlsCaller(daemon)
            state = caller.session()
            nodes = 60
            want = {"logits": {"rows": "all", "dtype": "f32"}}
            body = round_body(state, [i + 1 for i in range(nodes)], [0] * nodes, want=want)
            answer = caller.call("POST", verify_path(state), body)
            self.assertEqual(answer.status, 200, answer.body[:200])
            self.assertGreater(len(answer.body), 100000)
            caller.close()

    def test_loud_without(self):
        """Beyond loopback: said loudly without TLS, and not with it; refused without keys."""
        keys = os.path.join(os.path.dirname(self.cert), "keys")
        with open(keys, "w") as file:
            file.write("alice:verify:alice-secret-0123456789\n")
        os.chmod(keys, 0o600)
        options = ("--listen", "0.0.0.0:0", "--api-key-file", keys)
        with FixedDaemon(*options) as daemon:
            self.assertEqual(daemon.text().count("NOT ENCRYPTED"), 1)
        with FixedDaemon(*options, "--listen-admin", "0.0.0.0:0") as daemon:
            self.assertEqual(daemon.text().count("NOT ENCRYPTED"), 2)
        with self.daemon(*options) as daemon:
            self.assertNotIn("NOT ENCRYPTED", daemon.text())


if __name__ == "__main__":
    unittest.main(verbosity=1)
