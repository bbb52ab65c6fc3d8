"""Signing in through an identity provider: out with a sealed note, back with a code.

What must be remembered on the way (state, nonce, verifier) travels in the browser's own cookie,
sealed: strangers who begin and never return leave nothing behind, and any control plane can
finish what another began.
"""

import base64
import binascii
import hmac
import secrets
import time
from typing import Annotated

import msgspec
from litestar import Response, get
from litestar.datastructures import Cookie
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from control_plane.access.credentials import ID_BYTES, an_id
from control_plane.access.gate import Attempt
from control_plane.access.oidc_claims import ClaimsRefused, Identity, identity
from control_plane.access.oidc_client import OidcAwayError, OidcClient, OidcRefusedError
from control_plane.access.origins import landing
from control_plane.auth import AnyRequest
from control_plane.services import Services
from control_plane.signing_in import SignedIn, address_of, let_in, refused
from core.errors import Code, refuse
from core.secrets import NONCE_BYTES, CannotOpenError, Sealed
from store import sessions, users
from store.audit_log import record
from store.postgres import Connection
from store.users import NewUser, User

NOTE_COOKIE = "__Host-headworks-oidc"
NOTE_LIFE_MS = 600_000  # for a person to find their second factor
NOTE_CONTEXT = b"oidc sign-in"
LANDING = "/console"
NAME_MAX = 100
ERROR_MAX = 100

Text = Annotated[str, QueryParameter(max_length=4096)]
# It travels sealed in a cookie, of which browsers take 4096 bytes.
Landing = Annotated[str, QueryParameter(max_length=2000)]
# The name is Litestar's own for something else.
State = Annotated[str, QueryParameter(name="state", max_length=4096)]


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt to sign in must be held to when it comes back."""

    state: str
    nonce: str
    verifier: str
    landing: str
    expires_ms: int


class _Word(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    state: str
    iss: str
    error: str


@get("/oidc/start", status_code=302)
async def start(services: NamedDependency[Services], to: Landing = LANDING) -> Response[None]:
    """Off to the provider; `to` is the page of ours to come back to."""
    client = _client(services)
    note = Note(
        state=secrets.token_urlsafe(32),
        nonce=secrets.token_urlsafe(32),
        verifier=secrets.token_urlsafe(48),
        landing=landing(to, default=LANDING),
        expires_ms=_now_ms() + NOTE_LIFE_MS,
    )
    try:
        url = await client.authorization_url(
            state=note.state, nonce=note.nonce, verifier=note.verifier
        )
    except OidcAwayError as error:
        raise refuse(Code.UNAVAILABLE, str(error)) from error
    cookie = _note_cookie(_seal(services, note), life_ms=NOTE_LIFE_MS)
    return Response(None, status_code=302, headers={"location": url}, cookies=[cookie])


@get("/oidc/callback", status_code=303)
async def callback(
    request: AnyRequest,
    services: NamedDependency[Services],
    *,
    code: Text = "",
    given: State = "",
    iss: Text = "",
    error: Text = "",
) -> Response[None]:
    """Back from the provider. 401 for whatever is not to be believed, 503 while it is away."""
    client, gate = _client(services), services.doors.gate
    attempt = await gate.enter(gate.address_name(address_of(request)))
    word = _Word(code=code, state=given, iss=iss, error=error)
    try:
        note = _note_of(services, request, given)
        who = await _who(services, client, note, word)
        inside = await _let_in(services, request, who, attempt)
    except OidcAwayError as away:
        await gate.withdraw(attempt)
        raise refuse(Code.UNAVAILABLE, str(away)) from away
    except OidcRefusedError as reason:
        await refused(services, attempt, None, f"oidc: {reason}", address=address_of(request))
        raise refuse(Code.INVALID_KEY, str(reason)) from reason
    services.metrics.sign_ins.labels("oidc").inc()
    return Response(
        None,
        status_code=303,
        headers={"location": note.landing, "cache-control": "no-store"},
        cookies=[inside.cookie, _note_cookie("", life_ms=0)],
    )


async def _who(services: Services, client: OidcClient, note: Note, word: _Word) -> Identity:
    if word.iss and word.iss != client.issuer:  # RFC 9207
        raise OidcRefusedError("the answer is another provider's")
    if word.error or not word.code:
        said = word.error[:ERROR_MAX] or "nothing"
        raise OidcRefusedError(f"the identity provider said {said!r}")
    claims = await client.claims(word.code, verifier=note.verifier, nonce=note.nonce)
    who = identity(claims, services.doors.rules)
    if isinstance(who, ClaimsRefused):
        raise OidcRefusedError(who.reason)
    return who


async def _let_in(
    services: Services, request: AnyRequest, who: Identity, attempt: Attempt
) -> SignedIn:
    issuer = _client(services).issuer
    async with services.postgres.transaction() as conn:
        user_id = await users.user_of_identity(conn, issuer=issuer, subject=who.subject)
        user_id = user_id or await _first_time(conn, who, issuer)
        user = await users.user_for_change(conn, user_id)
        assert user is not None, "users are never deleted"
        if user.disabled:
            raise OidcRefusedError("this user is disabled")
        if user.source == "oidc":
            user = await _with_roles(conn, user, who)
        return await let_in(conn, services, request, user, method="oidc", attempt=attempt)


async def _first_time(conn: Connection, who: Identity, issuer: str) -> str:
    """A user whom operators made is found by a verified email; others need a group's role."""
    user_id = await users.user_id_by_email(conn, who.email)
    if user_id is not None:
        await users.user_for_change(conn, user_id)  # of two at once, one links
        known = await users.subject_of(conn, user_id, issuer=issuer)
        if known == who.subject:
            return user_id
        if known is not None:
            # An address goes to somebody else when its owner has left; what they were does not.
            raise OidcRefusedError("this email address is known here as another person's")
    if user_id is None:
        if not who.roles:
            raise OidcRefusedError("none of this person's groups has a role here")
        user_id = an_id("usr", secrets.token_bytes(ID_BYTES))
        new = NewUser(
            id=user_id,
            email=who.email,
            name=who.name[:NAME_MAX],
            password=None,
            roles=who.roles,
            source="oidc",
        )
        if not await users.create_user(conn, new):
            raise OidcRefusedError("this person is signing in elsewhere at this moment")
        detail = {"email": who.email, "roles": list(who.roles), "issuer": issuer}
        await record(conn, actor=who.email, action="user.create", subject=user_id, detail=detail)
    await users.add_identity(conn, user_id, issuer=issuer, subject=who.subject)
    detail = {"issuer": issuer, "subject": who.subject}
    await record(conn, actor=who.email, action="user.identity", subject=user_id, detail=detail)
    return user_id


async def _with_roles(conn: Connection, user: User, who: Identity) -> User:
    """What the provider's groups say today; other roles end the sessions with the old ones."""
    if not who.roles:
        raise OidcRefusedError("none of this person's groups has a role here")
    if set(who.roles) == set(user.roles):
        return user
    wanted = msgspec.structs.replace(user, roles=tuple(who.roles))
    await users.change_user(conn, wanted)
    await sessions.end_sessions(conn, user.id)
    detail = {"roles": [list(user.roles), list(who.roles)]}
    await record(conn, actor=user.email, action="user.change", subject=user.id, detail=detail)
    return wanted


def _client(services: Services) -> OidcClient:
    if services.doors.oidc is None:
        raise refuse(Code.NOT_FOUND, "no identity provider is set up here")
    return services.doors.oidc


def _seal(services: Services, note: Note) -> str:
    nonce = secrets.token_bytes(NONCE_BYTES)
    text = msgspec.json.encode(note).decode()
    sealed = services.doors.ring.seal(text, context=NOTE_CONTEXT, nonce=nonce)
    return base64.urlsafe_b64encode(nonce + sealed.sealed).decode()


def _note_of(services: Services, request: AnyRequest, state: str) -> Note:
    """Raises OidcRefusedError: this browser did not begin what it wants to finish."""
    ring = services.doors.ring
    try:
        raw = base64.urlsafe_b64decode(request.cookies.get(NOTE_COOKIE, "").encode())
        sealed = Sealed(
            key_id=ring.sealing_id or "", nonce=raw[:NONCE_BYTES], sealed=raw[NONCE_BYTES:]
        )
        note = msgspec.json.decode(ring.open(sealed, context=NOTE_CONTEXT), type=Note)
    except (binascii.Error, CannotOpenError, msgspec.DecodeError, ValueError) as error:
        raise OidcRefusedError("this browser did not begin to sign in here") from error
    if not hmac.compare_digest(note.state.encode(), state.encode(errors="replace")):
        raise OidcRefusedError("this answer belongs to another attempt to sign in")
    if note.expires_ms <= _now_ms():
        raise OidcRefusedError("signing in took too long: begin again")
    return note


def _note_cookie(value: str, *, life_ms: int) -> Cookie:
    return Cookie(
        key=NOTE_COOKIE,
        value=value,
        max_age=life_ms // 1000,
        path="/",
        secure=True,
        httponly=True,
        samesite="lax",
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
