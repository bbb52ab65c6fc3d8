"""An identity provider on the loopback that signs real tokens, and can be told to lie."""

import base64
import hashlib
import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

CLIENT = "headworks-tests"
CLIENT_SECRET = "a secret for tests"

_CHEAP_RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)


class SigningKey:
    """A key pair by its id: RS256, or ES256 for `kind` EC."""

    def __init__(self, key_id: str, kind: str = "EC") -> None:
        self.key_id = key_id
        self.algorithm = "ES256" if kind == "EC" else "RS256"
        self.private = ec.generate_private_key(ec.SECP256R1()) if kind == "EC" else _CHEAP_RSA
        maker = jwt.get_algorithm_by_name(self.algorithm)
        public = json.loads(maker.to_jwk(self.private.public_key()))
        self.public = public | {"kid": key_id, "alg": self.algorithm, "use": "sig"}


class OidcServer:
    """`claims` go over what is true, `headers` too; `shown` is the JWKS, `signing` the key used.

    `close` once.
    """

    def __init__(self) -> None:
        self.begin_anew()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.provider = self
        self.issuer = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def begin_anew(self) -> None:
        self.claims: dict[str, Any] = {}
        self.headers: dict[str, Any] = {}
        self.signing = SigningKey("one")
        self.shown = [self.signing.public]
        self.discovery: dict[str, Any] = {}
        self.unsigned = False
        self.key_reads = 0
        self._codes: dict[str, dict[str, str]] = {}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def consent(self, authorization_url: str) -> dict[str, str]:
        """What the person does there: signs in, and is sent back with these."""
        query = {k: v[0] for k, v in parse_qs(urlsplit(authorization_url).query).items()}
        assert query["response_type"] == "code"
        assert query["client_id"] == CLIENT
        assert query["code_challenge_method"] == "S256"
        assert "openid" in query["scope"].split()
        code = secrets.token_urlsafe(8)
        self._codes[code] = query
        return {"code": code, "state": query["state"], "iss": self.issuer}

    def token(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        """A code for its ID token: once, for the client's secret and the verifier."""
        begun = self._codes.pop(form.get("code", ""), None)
        known = base64.b64encode(f"{CLIENT}:{CLIENT_SECRET}".encode()).decode()
        hashed = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(hashed).rstrip(b"=").decode()
        if (
            begun is None
            or authorization != f"Basic {known}"
            or challenge != begun["code_challenge"]
            or form.get("redirect_uri") != begun["redirect_uri"]
        ):
            return 400, {"error": "invalid_grant"}
        return 200, {"id_token": self._id_token(begun["nonce"]), "token_type": "Bearer"}

    def _id_token(self, nonce: str) -> str:
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "sub": "subject-1",
            "aud": CLIENT,
            "exp": now + 600,
            "iat": now,
            "nonce": nonce,
            "email": "ada@example.com",
            "email_verified": True,
            "name": "Ada",
        } | self.claims
        claims = {name: value for name, value in claims.items() if value is not None}
        headers = {"kid": self.signing.key_id} | self.headers
        if self.unsigned:
            return jwt.encode(claims, None, algorithm="none", headers=headers)
        return jwt.encode(
            claims, self.signing.private, algorithm=self.signing.algorithm, headers=headers
        )

    def document(self, path: str) -> dict[str, Any] | None:
        if path == "/.well-known/openid-configuration":
            return {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "jwks_uri": f"{self.issuer}/keys",
            } | self.discovery
        if path == "/keys":
            self.key_reads += 1
            return {"keys": self.shown}
        return None


class _Server(ThreadingHTTPServer):
    provider: OidcServer


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        found = self.server.provider.document(self.path)
        self._send(200 if found is not None else 404, found or {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        form = {k: v[0] for k, v in parse_qs(body).items()}
        self._send(*self.server.provider.token(form, self.headers.get("Authorization", "")))

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
