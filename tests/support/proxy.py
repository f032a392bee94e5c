"""A proxy on loopback that checks every answer it passes on against proto/openapi.yaml.

For clients that are programs: they talk to .url, and close() raises what the contract did not describe.
It passes requests and answers whole; it adds, drops and repeats nothing.
"""

import http.client
import http.server
import threading

from daemon import CONTRACT
from openapi import Mismatch

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date"}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one piece, so that nothing waits for an acknowledgement
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        self.upstream = http.client.HTTPConnection(*self.server.upstream, timeout=240)

    def finish(self):
        self.upstream.close()
        super().finish()

    def relay(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        sent = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        self.upstream.request(self.command, self.path, body=body or None, headers=sent)
        answer = self.upstream.getresponse()
        content = answer.read()
        try:
            CONTRACT.answer(self.command, self.path, answer.status, dict(answer.getheaders()), content)
        except Mismatch as mismatch:
            self.server.mismatches.append(mismatch)
        self.server.answers += 1
        self.server.watch(self.path, body, content)
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = do_HEAD = relay

    def log_message(self, *words):
        pass  # the daemon has its log


class ContractProxy:
    def __init__(self, host, port):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.upstream, self.server.mismatches, self.server.answers = (host, port), [], 0
        self.server.watch = lambda path, body, content: None  # a test may put its own here
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = "http://127.0.0.1:%d" % self.server.server_address[1]

    def close(self):
        """Stop; raise the first answer that broke the contract."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        if self.server.mismatches:
            raise self.server.mismatches[0]
        if self.server.answers == 0:
            raise Mismatch("no answer passed through")
