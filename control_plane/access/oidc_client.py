"""An identity provider over HTTP: where it is, its keys, and a code turned into its word.

Authorization code with PKCE (RFC 7636), state and nonce. What it says is believed after its
signature, issuer, audience, age and nonce were checked, by PyJWT over `cryptography`.
"""

import asyncio
import base64
import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import httpx
import jwt
import msgspec

from control_plane.access.origins import is_private

ANSWER_BYTES_MAX = 1024 * 1024
KEYS_MAX = 100
DISCOVERY_LIFE_S = 3600.0
KEYS_LIFE_S = 3600.0
LEEWAY_S = 60  # clocks differ
# Signatures only: with a shared secret (HS…) or without one (none) anybody could write a word.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
KEY_TYPES = frozenset({"RSA", "EC", "OKP"})
REQUIRED = ["iss", "sub", "aud", "exp", "iat", "nonce"]


class OidcConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What was agreed with the provider.

    An unknown key's id has the keys read again, at most once in `keys_gap_s`.
    """

    issuer: str
    client_id: str
    client_secret: str
    redirect_url: str
    scopes: str
    timeout_ms: int
    keys_gap_s: float = 10.0


class OidcAwayError(Exception):
    """The provider cannot be reached, or answers nothing that makes sense. Try again later."""


class OidcRefusedError(Exception):
    """Its word is not to be believed, or it gave none; the message says why."""


class _Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Of its discovery document, what we use."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str


class _Tokens(msgspec.Struct, frozen=True, kw_only=True):
    id_token: str


class OidcClient:
    """One for each process; `close` once. What it learns is kept for an hour."""

    def __init__(self, config: OidcConfig) -> None:
        self._config = config
        self._http = httpx.AsyncClient(
            timeout=config.timeout_ms / 1000, follow_redirects=False, trust_env=False
        )
        self._reading = asyncio.Lock()
        self.forget()

    @property
    def issuer(self) -> str:
        """Whose subjects these are."""
        return self._config.issuer

    def forget(self) -> None:
        """Ask for its addresses and keys anew."""
        self._endpoints: _Endpoints | None = None
        self._endpoints_until = 0.0
        self._keys: dict[str, dict[str, Any]] = {}
        self._keys_until = 0.0
        self._keys_read = float("-inf")

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    async def authorization_url(self, *, state: str, nonce: str, verifier: str) -> str:
        """Where the browser goes. Raises OidcAwayError."""
        endpoints = await self._discover()
        query = {
            "response_type": "code",
            "client_id": self._config.client_id,
            "redirect_uri": self._config.redirect_url,
            "scope": self._config.scopes,
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge(verifier),
            "code_challenge_method": "S256",
        }
        url = endpoints.authorization_endpoint
        return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"

    async def claims(self, code: str, *, verifier: str, nonce: str) -> Mapping[str, Any]:
        """What it says of whoever brought the code.

        Raises OidcAwayError, and OidcRefusedError for a code or a word that is not to be believed.
        """
        endpoints = await self._discover()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._config.redirect_url,
            "code_verifier": verifier,
            "client_id": self._config.client_id,
        }
        auth = httpx.BasicAuth(self._config.client_id, self._config.client_secret)
        request = self._http.build_request("POST", endpoints.token_endpoint, data=form)
        body = await self._read(request, auth=auth)
        try:
            tokens = msgspec.json.decode(body, type=_Tokens)
        except msgspec.DecodeError as error:
            raise OidcRefusedError("the identity provider sent no ID token") from error
        return await self._verified(tokens.id_token, nonce=nonce)

    async def _verified(self, token: str, *, nonce: str) -> Mapping[str, Any]:
        try:
            header = jwt.get_unverified_header(token)
            algorithm, key_id = header.get("alg"), header.get("kid", "")
            if algorithm not in ALGORITHMS:
                raise OidcRefusedError(f"ID tokens signed with {algorithm!r} are not taken")
            key = await self._key(key_id, algorithm)
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self._config.client_id,
                issuer=self._config.issuer,
                leeway=LEEWAY_S,
                options={"require": REQUIRED},
            )
        except jwt.PyJWTError as error:
            raise OidcRefusedError(f"the ID token is not to be believed: {error}") from error
        self._check_party(claims)
        said = claims["nonce"]
        if not isinstance(said, str) or not hmac.compare_digest(said.encode(), nonce.encode()):
            raise OidcRefusedError("the ID token belongs to another attempt to sign in")
        return claims

    def _check_party(self, claims: Mapping[str, Any]) -> None:
        """OpenID Connect Core 3.1.3.7: a token for several must say that it was made for us."""
        party = claims.get("azp")
        several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if (party is not None or several) and party != self._config.client_id:
            raise OidcRefusedError("the ID token was made for somebody else")

    async def _key(self, key_id: str, algorithm: str) -> jwt.PyJWK:
        found = await self._found(key_id)
        if found is None:
            raise OidcRefusedError("the ID token is signed with a key that is not the provider's")
        if found.get("use", "sig") != "sig" or found.get("alg", algorithm) != algorithm:
            raise OidcRefusedError("the ID token is signed with a key that is for something else")
        return jwt.PyJWK(found, algorithm)

    async def _found(self, key_id: str) -> dict[str, Any] | None:
        async with self._reading:
            now = time.monotonic()
            is_over = now >= self._keys_until
            may_have_changed = (
                key_id not in self._keys and now - self._keys_read >= self._config.keys_gap_s
            )
            if is_over or may_have_changed:
                self._keys_read = now
                self._keys = await self._read_keys()
                self._keys_until = now + KEYS_LIFE_S
            return self._keys.get(key_id)

    async def _read_keys(self) -> dict[str, dict[str, Any]]:
        endpoints = await self._discover()
        document = await self._document(endpoints.jwks_uri, dict[str, Any])
        keys = document.get("keys")
        if not isinstance(keys, list):
            raise OidcAwayError("the identity provider's keys cannot be read")
        return {
            str(key.get("kid", "")): key
            for key in keys[:KEYS_MAX]
            if isinstance(key, dict) and key.get("kty") in KEY_TYPES
        }

    async def _discover(self) -> _Endpoints:
        now = time.monotonic()
        if self._endpoints is None or now >= self._endpoints_until:
            url = self._config.issuer.rstrip("/") + "/.well-known/openid-configuration"
            found = await self._document(url, _Endpoints)
            if found.issuer != self._config.issuer:
                raise OidcAwayError("the identity provider calls itself by another name")
            for address in (found.authorization_endpoint, found.token_endpoint, found.jwks_uri):
                if not is_private(address):
                    raise OidcAwayError("the identity provider has an address without TLS")
            self._endpoints, self._endpoints_until = found, now + DISCOVERY_LIFE_S
        return self._endpoints

    async def _document(self, url: str, kind: Any) -> Any:
        body = await self._read(self._http.build_request("GET", url))
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise OidcAwayError(f"{url} is not what it should be: {error}") from error

    async def _read(self, request: httpx.Request, *, auth: httpx.Auth | None = None) -> bytes:
        try:
            async with asyncio.timeout(self._config.timeout_ms / 1000):
                response = await self._http.send(request, auth=auth, stream=True)
                try:
                    body = await _bounded(response)
                finally:
                    await response.aclose()
        except (httpx.HTTPError, TimeoutError) as error:
            raise OidcAwayError(f"{request.url.host} cannot be reached: {error!r}") from error
        if response.status_code == httpx.codes.OK:
            return body
        message = f"{request.url.host} answered {response.status_code}"
        if request.method == "POST" and response.is_client_error:
            raise OidcRefusedError(message)
        raise OidcAwayError(message)


async def _bounded(response: httpx.Response) -> bytes:
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > ANSWER_BYTES_MAX:
            raise OidcAwayError("the identity provider's answer is too long")
    return bytes(body)


def challenge(verifier: str) -> str:
    """RFC 7636's S256."""
    digest = hashlib.sha256(verifier.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
