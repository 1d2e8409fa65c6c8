"""What tests of alerts share: a web server that notes what is posted, also over HTTPS."""
import http.server
import json
import ssl
import subprocess
import threading
import time


def make_certificate(path):
    """One that is signed by itself, with its key, in one file."""
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1",
                    "-keyout", f"{path}.key", "-out", path], check=True, capture_output=True)
    return path


class Webhook:
    """A server of this test; `answer` is its status, or seconds to hang before it answers 200; `location`, where a
    redirect leads."""

    def __init__(self, answer=200, certificate=None):
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
                if hook.location:
                    self.send_header("Location", hook.location)
                self.end_headers()

            def log_message(self, *_):
                pass
        self.answer, self.answers, self.got, self.released = answer, [], [], threading.Event()
        self.location = None
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None   # a client that does not trust the certificate
        if certificate:   # the handshake takes place in the thread of the connection
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, f"{certificate}.key")
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True,
                                                     do_handshake_on_connect=False)
        self.url = f"http{'s' if certificate else ''}://127.0.0.1:{self.server.server_port}/hook/secret"
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
