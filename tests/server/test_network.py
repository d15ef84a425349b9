"""What sandboxes reach of the server's machine: what was given to them, and never the server itself."""

from __future__ import annotations

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from tests.server.conftest import create, scoped
from tests.server.server_process import PROJECT, running_server

SETTINGS = {"network": {"names": {"host.test": ["127.0.0.1"]}, "allowed": ["127.0.0.0/8"]}}
LOOK = """
import socket, sys
for port in sys.argv[1:]:
    try:
        with socket.create_connection(("host.test", int(port)), 10) as sock:
            sock.sendall(b"GET / HTTP/1.0\\r\\nHost: host.test\\r\\n\\r\\n")
            print("answered" if sock.recv(1) else "cut")
    except ConnectionError:
        print("cut")
"""


class Quiet(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """The test says what it saw."""


def test_the_servers_own_port_is_out_of_reach_and_other_opened_ports_are_not(able: None) -> None:
    with running_server(settings=SETTINGS) as server, server.client() as api:
        own = server.url.rpartition(":")[2]
        with HTTPServer(("127.0.0.1", 0), Quiet) as other:
            threading.Thread(target=other.serve_forever, daemon=True).start()
            box = create(api, networkPolicy={"mode": "custom", "allow": ["host.test"]})
            records = box.run("python3", "-c", LOOK, str(other.server_port), own).text.splitlines()
            other.shutdown()
        found = [json.loads(line) for line in records if line]
        assert "".join(record["data"] for record in found if "stream" in record) == "answered\ncut\n"
        params = scoped(name=box.name, kindPrefix="network.", sortOrder="asc", limit="50")
        events = api.get("/v1/events", params=params).json()["events"]
        assert {event["kind"] for event in events} >= {"network.dns", "network.connection"}
        assert all(event["kind"].startswith("network.") for event in events)
        denied = [event["data"]["port"] for event in events if event["data"].get("verdict") == "deny"]
        assert denied == [int(own)]


def test_ports_of_the_host_are_given_by_the_local_user_and_last(able: None) -> None:
    with running_server() as server, server.client() as api, server.local() as local:
        granted = [{"port": 5432, "name": "db.internal"}]
        body = {"projectId": PROJECT, "name": "given", "hostPorts": granted}
        refused = api.post("/v3/sandboxes", params=scoped(), json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert "host_ports" in refused.json()["error"]["message"]
        box = create(local, name="given", hostPorts=granted)
        assert box.created["sandbox"]["hostPorts"] == granted
        assert "hostPorts" not in create(api).created["sandbox"]
        server.stop(signal.SIGKILL)
        server.start()
        with server.local() as again, server.client() as token:
            path = "/v2/sandboxes/given"
            assert again.get(path, params=scoped()).json()["sandbox"]["hostPorts"] == granted
            assert token.post(f"{path}/fork", params=scoped(), json={"name": "f"}).status_code == 403
            forked = token.post(f"{path}/fork", params=scoped(), json={"name": "f", "hostPorts": []})
            assert forked.status_code == 200 and "hostPorts" not in forked.json()["sandbox"]
            many = {"name": "m", "count": 2}
            assert token.post("/v1/sandboxes/given/fork", params=scoped(), json=many).status_code == 403
            made = {"projectId": PROJECT, **many, "hostPorts": granted}
            assert token.post("/v1/sandboxes", params=scoped(), json=made).status_code == 403
            forks = again.post("/v1/sandboxes/given/fork", params=scoped(), json=many)
            shown = [each["sandbox"]["hostPorts"] for each in forks.json()["sandboxes"]]
            assert forks.status_code == 200 and shown == [granted, granted]
            changed = token.patch(path, params=scoped(), json={"hostPorts": []})
            assert changed.status_code == 200 and "hostPorts" not in changed.json()["sandbox"]
            for wrong in ({"port": 0, "name": "db"}, {"port": 1, "name": "127.0.0.1"}, {"port": 1}):
                answer = again.patch(path, params=scoped(), json={"hostPorts": [wrong]})
                assert answer.status_code == 400 and "hostPorts[0]" in answer.json()["error"]["message"]
