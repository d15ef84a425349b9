"""A server that is put into a sandbox: requests, uploads, server-sent events, WebSocket echo, garbage."""

import base64
import hashlib
import socketserver
import sys
import threading

_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_next = threading.Semaphore(0)


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.rfile.readline()
            if not line:
                return
            head += line
        lines = head.split(b"\r\n")
        self.method, self.target, _ = lines[0].split(b" ")
        self.fields = {k.lower(): v for k, v in (line.split(b": ", 1) for line in lines[1:] if line)}
        ways = {
            b"/ws": self.echo,
            b"/events": self.events,
            b"/next": self.next,
            b"/upload": self.upload,
            b"/garbage": self.garbage,
            b"/head": lambda: self.answer(head),
            b"/cookie": self.cookie,
        }
        ways.get(self.target, self.describe)()

    def answer(self, body: bytes) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def describe(self) -> None:
        seen = [self.fields.get(name, b"-") for name in (b"x-forwarded-host", b"cookie")]
        self.answer(b" ".join([self.method, self.target, *seen]))

    def cookie(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n")
        self.wfile.write(b"Set-Cookie: a=1; Domain=boxes.example; Path=/\r\n")
        self.wfile.write(b"Set-Cookie: b=2;DOMAIN = .localhost\r\n\r\n")

    def upload(self) -> None:
        size, left = 0, int(self.fields[b"content-length"])
        while left:
            data = self.rfile.read(min(left, 65536))
            size, left = size + len(data), left - len(data)
        self.answer(b"%d" % size)

    def events(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for number in range(3):
            self.wfile.write(b"data: %d\n\n" % number)
            _next.acquire()

    def next(self) -> None:
        _next.release()
        self.answer(b"next")

    def garbage(self) -> None:
        self.wfile.write(b"nonsense\r\n\r\n")

    def echo(self) -> None:
        accept = base64.b64encode(hashlib.sha1(self.fields[b"sec-websocket-key"] + _MAGIC).digest())
        self.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n")
        self.wfile.write(b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n")
        while True:
            first, second = self.rfile.read(2)
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(self.rfile.read(second & 127)))
            if first & 15 == 8:
                return
            self.wfile.write(bytes([0x81, len(data)]) + data)


if __name__ == "__main__":
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    socketserver.ThreadingTCPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
