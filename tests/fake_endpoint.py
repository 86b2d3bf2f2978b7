"""An endpoint that sends exactly what a test tells it to, and remembers what it was asked."""

import json
import os
import socket
import ssl
import struct
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DONE = b"data: [DONE]\n\n"
PER_WORD, ADDED = 2, 5  # its tokenizer: two tokens a word, and five for the template
SSE = {"Content-Type": "text/event-stream"}


def event(**content) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def piece(text: str = " a", finish=None, **more) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish, **more}])


def usage(tokens: int, prompt: int = 7, **more) -> bytes:
    counts = {"completion_tokens": tokens, "prompt_tokens": prompt, "total_tokens": tokens + prompt}
    return event(choices=[], usage=counts | more)


def count_prompt(body: dict) -> int:
    text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    return len(text) if isinstance(text, list) else PER_WORD * len(text.split()) + ADDED


def plain(body: dict):
    """One token a chunk, as many as asked for, then the counts."""
    for _ in range(body["max_tokens"]):
        yield piece()
    yield piece("", "length")
    yield usage(body["max_tokens"], count_prompt(body))
    yield DONE


class FakeEndpoint(ThreadingHTTPServer):
    """`script(body)` gives what is sent for a request: bytes, or seconds to wait; before them a (status, headers) where
    that is not 200 and events. The short requests that `meter` sends first are answered plainly."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, script=plain, models=("fake",), first=plain):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.models, self.first = script, models, first
        self.bodies, self.headers, self.paths = [], [], []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # a client that has gone


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.paths.append(self.path)
        self.server.headers.append(dict(self.headers))
        content = {"object": "list", "data": [{"id": name} for name in self.server.models]}
        self.send(200, {"Content-Type": "application/json"}, [json.dumps(content).encode()])

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.paths.append(self.path)
        server.headers.append(dict(self.headers))
        if body["max_tokens"] == 1:
            return self.answer(server.first(body))
        with server.lock:
            server.bodies.append(body)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        self.leave = self.leave_once
        self.answer(server.script(body))
        self.leave()

    def leave(self):
        pass

    def leave_once(self):
        """Counted before the client can know that its answer has ended."""
        with self.server.lock:
            self.server.in_flight -= 1
        self.leave = lambda: None

    def answer(self, pieces):
        pieces = iter(pieces)
        head = next(pieces, b"")
        status, headers = head if isinstance(head, tuple) else (200, SSE)
        self.send(status, headers, pieces if isinstance(head, tuple) else chain(head, pieces))

    def send(self, status, headers, pieces):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        for sent in pieces:
            if isinstance(sent, float | int):
                time.sleep(sent)
                continue
            if sent == "reset":  # no proper end: what lies in the way is thrown away
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())
                return
            if DONE in sent:
                self.leave()
            with suppress(ConnectionError):
                self.wfile.write(sent)
                self.wfile.flush()


def chain(first, rest):
    yield first
    yield from rest


@contextmanager
def serving(script=plain, *, certificate=None, **options):
    """A running `FakeEndpoint`; with TLS where `certificate` names the file of one and its key."""
    server = FakeEndpoint(script, **options)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
