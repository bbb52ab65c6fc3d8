"""What operators come in by, opened once for each process: hashing, the gate, the provider."""

import hashlib

import msgspec

from control_plane.access.gate import Gate
from control_plane.access.hashing import Argon2, Hasher
from control_plane.access.lockout import Patience
from control_plane.access.oidc_claims import OidcRules, read_domains, read_roles
from control_plane.access.oidc_client import OidcClient, OidcConfig
from control_plane.settings import ControlPlaneSettings
from core.secrets import KeyRing
from store.postgres import Postgres

CALLBACK = "/admin/oidc/callback"
SEEN_EVERY_MS = 60_000  # a session's or a token's last use is written no more often


class Doors(msgspec.Struct, frozen=True, kw_only=True):
    """`pepper` keys digests of sessions, tokens and invitations.

    `ring` seals what a browser carries to the provider and back; `oidc` is None where no
    provider was named.
    """

    pepper: bytes
    hasher: Hasher
    gate: Gate
    ring: KeyRing
    rules: OidcRules
    oidc: OidcClient | None

    async def close(self) -> None:
        """Finish what was begun."""
        self.hasher.close()
        if self.oidc is not None:
            await self.oidc.close()


def open_doors(settings: ControlPlaneSettings, postgres: Postgres) -> Doors:
    """Connects to nobody yet."""
    pepper = settings.key_pepper.encode()
    return Doors(
        pepper=pepper,
        hasher=Hasher(
            Argon2(
                time_cost=settings.argon2_time_cost,
                memory_kib=settings.argon2_memory_kib,
                lanes=settings.argon2_lanes,
                at_once=settings.argon2_at_once,
                waiting_max=settings.argon2_waiting_max,
            )
        ),
        gate=Gate(
            postgres,
            pepper=pepper,
            user=_patience(settings, settings.sign_in_free),
            address=_patience(settings, settings.sign_in_address_free),
        ),
        ring=KeyRing({"1": hashlib.sha256(b"oidc:" + settings.internal_secret.encode()).digest()}),
        rules=OidcRules(
            domains=read_domains(settings.oidc_domains),
            groups_claim=settings.oidc_groups_claim,
            roles=read_roles(settings.oidc_roles),
        ),
        oidc=_oidc(settings),
    )


def _patience(settings: ControlPlaneSettings, free: int) -> Patience:
    return Patience(
        free=free,
        first_ms=settings.sign_in_first_ms,
        most_ms=settings.sign_in_most_ms,
        forget_ms=settings.sign_in_forget_ms,
    )


def _oidc(settings: ControlPlaneSettings) -> OidcClient | None:
    if not settings.oidc_issuer:
        return None
    return OidcClient(
        OidcConfig(
            issuer=settings.oidc_issuer,
            client_id=settings.oidc_client_id,
            client_secret=settings.oidc_client_secret,
            redirect_url=settings.public_url.rstrip("/") + CALLBACK,
            scopes=settings.oidc_scopes,
            timeout_ms=settings.oidc_timeout_ms,
        )
    )
