"""Alerts to web servers over HTTPS, to those that lead elsewhere, and to those that answer late, oddly or never."""
import os
import shutil
import time
import unittest
from unittest import mock

from llmfp8 import alerts
from tests.support.alerts import OddServer, Webhook, make_certificate, server_context
from tests.support.log_tools import LogToolTest

REFUSED = "the certificate of the webhook is refused: "


class Post(LogToolTest):
    """post() with short limits."""
    measures_time = True   # of tests/run.py

    def setUp(self):
        super().setUp()
        for name, value in (("POST_S", 10), ("PAUSE_S", 0.01)):
            patch = mock.patch.object(alerts, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def server(self, serve, scheme="http"):
        server = OddServer(serve, scheme)
        self.addCleanup(server.close)
        return server

    def hook(self, *arguments):
        hook = Webhook(*arguments)
        self.addCleanup(hook.close)
        return hook

    def post(self, url):
        said = alerts.post(url, {"kind": "end"}, lambda: time.monotonic() + 60)
        self.assertNotIn("secret", said)
        self.assertNotIn("\n", said)
        return said


@unittest.skipUnless(shutil.which("openssl"), "needs openssl")
class Https(Post):
    def trusting(self, certificate):
        return mock.patch.dict(os.environ, {"SSL_CERT_FILE": str(certificate)})

    def test_a_certificate_that_is_not_trusted(self):
        hook = self.hook(200, make_certificate(self.folder / "certificate.pem"))
        self.assertEqual(self.post(hook.url),
                         REFUSED + "self-signed certificate; SSL_CERT_FILE=FILE trusts those in FILE")
        self.assertEqual(hook.got, [])

    def test_a_certificate_that_is_trusted(self):
        certificate = make_certificate(self.folder / "certificate.pem")
        hook = self.hook(200, certificate)
        with self.trusting(certificate):
            self.assertEqual(self.post(hook.url), "")
        self.assertEqual(hook.got, [("/hook/secret", "application/json", {"kind": "end"})])

    def test_a_certificate_of_another_server(self):
        certificate = make_certificate(self.folder / "certificate.pem", "DNS:example.com")
        hook = self.hook(200, certificate)
        with self.trusting(certificate):
            self.assertRegex(self.post(hook.url), f"^{REFUSED}IP address mismatch, [^;]*$")
        self.assertEqual(hook.got, [])

    def test_it_is_tried_again_only_if_this_may_help(self):
        certificate = make_certificate(self.folder / "certificate.pem")
        hook = self.hook(200, certificate)
        hook.answers = [503, 429]
        with self.trusting(certificate):
            self.assertEqual(self.post(hook.url), "")
        self.assertEqual(len(hook.got), 3)
        context = server_context(certificate)
        server = self.server(lambda connection: context.wrap_socket(connection, server_side=True), "https")
        self.assertIn(REFUSED, self.post(server.url))
        self.assertEqual(server.count, 1)

    def test_a_server_that_closes_after_the_handshake(self):
        certificate = make_certificate(self.folder / "certificate.pem")
        context = server_context(certificate)
        server = self.server(lambda connection: context.wrap_socket(connection, server_side=True).recv(1), "https")
        with self.trusting(certificate):
            self.assertIn("the webhook cannot be reached: ", self.post(server.url))
        self.assertEqual(server.count, alerts.TRIES)

    def test_no_server_of_https(self):
        self.assertRegex(self.post(self.hook().url.replace("http:", "https:")),
                         r"^the webhook cannot be reached: .*(WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE)")

    def test_a_redirect_never_leaves_https(self):
        certificate, elsewhere = make_certificate(self.folder / "certificate.pem"), self.hook()
        hook = self.hook(307, certificate)
        hook.location = elsewhere.url
        with self.trusting(certificate):
            self.assertRegex(self.post(hook.url), "^the webhook answers 307, a redirect")
        self.assertEqual(elsewhere.got, [])
        hook.location = self.hook(200, certificate).url
        with self.trusting(certificate):
            self.assertEqual(self.post(hook.url), "")


class Servers(Post):
    def test_redirects_that_ask_for_the_post_again(self):
        for code in (307, 308):
            hook, elsewhere = self.hook(code), self.hook()
            hook.location = elsewhere.url
            self.assertEqual(self.post(hook.url), "")
            self.assertEqual(elsewhere.got, [("/hook/secret", "application/json", {"kind": "end"})])

    def test_redirects_that_would_lose_the_alert(self):
        for code in (301, 302, 303):
            hook, elsewhere = self.hook(code), self.hook()
            hook.location = elsewhere.url
            self.assertEqual(self.post(hook.url), f"the webhook answers {code}, a redirect that is not followed: give "
                                                  "the address that it leads to")
            self.assertEqual((len(hook.got), elsewhere.got), (1, []))

    def test_redirects_without_an_end(self):
        hook = self.hook(307)
        hook.location = hook.url
        self.assertRegex(self.post(hook.url), "^the webhook answers 307, a redirect")
        self.assertLess(len(hook.got), 20)

    def test_a_redirect_to_a_file(self):
        hook = self.hook(307)
        hook.location = "file:///etc/hostname"
        self.assertRegex(self.post(hook.url), "^the webhook answers 307, a redirect")

    def test_a_server_that_closes(self):
        server = self.server(lambda connection: connection.recv(1 << 16))
        said = self.post(server.url)
        self.assertRegex(said, "^the webhook cannot be reached: (Remote end closed connection|Connection reset)")
        self.assertEqual(server.count, alerts.TRIES)

    def test_a_server_of_something_else(self):
        def serve(connection):
            connection.recv(1 << 16)
            connection.sendall(b"220 mail.example \x1b[31m secret\r\n")
        self.assertEqual(self.post(self.server(serve).url),
                         "the webhook does not answer as a web server (BadStatusLine)")

    def test_a_slow_server(self):
        def serve(connection):   # a byte now and then, so that no read ever times out
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            for _ in range(600):
                connection.sendall(b"x")
                time.sleep(0.1)
        with mock.patch.object(alerts, "POST_S", 0.6):
            begin = time.monotonic()
            self.assertEqual(self.post(self.server(serve).url), "the webhook does not answer within 1 s")
            self.assertLess(time.monotonic() - begin, 30)

    def test_wrong_addresses(self):
        for address in ("http://127.0.0.1:9/se cret", "file:///etc/hostname", "ftp://127.0.0.1/x", "", "http://[x/",
                        "http://127.0.0.1:port/x", "http://127.0.0.1:9/\u00e9"):
            self.file("address", address)
            self.assertEqual(self.post(f"@{self.folder / 'address'}"), "the webhook cannot be reached: wrong address")


if __name__ == "__main__":
    unittest.main()
