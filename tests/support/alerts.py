"""What tests of alerts share: a web server that notes what is posted, and commands that do."""
import http.server
import json
import threading
import time


class Webhook:
    """A server of this test; `answer` is its status, or seconds to hang before it answers 200."""

    def __init__(self, answer=200):
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
                status = hook.answers.pop(0) if hook.answers else hook.answer
                if status < 100:
                    hook.released.wait(status)
                    return
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_):
                pass
        self.answer, self.answers, self.got, self.released = answer, [], [], threading.Event()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook/secret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def alerts(self):
        return [data for _, _, data in self.got]

    def wait_for(self, kind, seconds=30):
        """The first alert of a kind."""
        end = time.monotonic() + seconds
        while True:
            for data in self.alerts():
                if data["kind"] == kind:
                    return data
            if time.monotonic() > end:
                raise AssertionError(f"no {kind} among {[data['text'] for data in self.alerts()]}")
            time.sleep(0.02)

    def close(self):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
