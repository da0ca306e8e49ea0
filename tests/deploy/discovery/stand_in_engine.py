"""An engine as a router sees it: healthy, and every answer says where it is from.

python tests/deploy/discovery/stand_in_engine.py HOST PORT
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST, PORT = sys.argv[1], int(sys.argv[2])


class Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer whatever a router wants to know."""
        known = "kvtier-demo"
        self._say({"model_path": known, "served_model_name": known, "data": [{"id": known}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say({"from": HOST})

    def _say(self, answer: object) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer((HOST, PORT), Engine).serve_forever()
