"""What a new stack needs to answer its first request, made through the admin API.

A model version, its deployment, its public name, a price, a demo tenant and its key. Running
it again changes nothing that is there.
"""

from pathlib import Path
from typing import Any, Self

import httpx
import msgspec

from artifacts.manifest import Manifest
from core.registry import deployment_name
from local.secrets import write_private

DEMO_TENANT = "demo"
REGION = "local"
REQUEST_TIMEOUT_S = 15.0

# Micro-dollars for a million tokens: small, and round enough to check by hand.
PRICE = {"input_micro": 100_000, "cached_input_micro": 50_000, "output_micro": 400_000}


class SeedError(Exception):
    """The control plane refused a part of the seed; the message holds its answer."""


class Admin:
    """A client of the admin API."""

    def __init__(self, url: str, token: str) -> None:
        self._client = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            timeout=REQUEST_TIMEOUT_S,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        """The answer's JSON. Raises SeedError."""
        return self._call("GET", path, None)

    def create(self, path: str, body: dict[str, Any]) -> Any | None:
        """The new thing, or None when it was there before. Raises SeedError."""
        return self._call("POST", path, body)

    def put(self, path: str, body: dict[str, Any]) -> Any:
        """None where an operator's own stands, as a route table may. Raises SeedError."""
        return self._call("PUT", path, body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any | None:
        response = self._client.request(method, path, json=body)
        if method in {"POST", "PUT"} and response.status_code == httpx.codes.CONFLICT:
            return None
        if response.is_error:
            raise SeedError(f"{method} {path}: {response.status_code} {response.text}")
        return response.json()


def seed(admin: Admin, manifest: Manifest, demo_key: Path, *, region: str = REGION) -> str:
    """Make everything; returns the deployment's name."""
    admin.create("/admin/models", {"manifest": msgspec.to_builtins(manifest)})
    deployment = deployment_name(manifest.name, manifest.version)
    admin.create(
        "/admin/deployments",
        {"name": deployment, "version": manifest.version, "region": region},
    )
    admin.put(f"/admin/routes/{manifest.name}", {"deployment": deployment})
    if not _priced(admin, manifest.name):
        admin.create("/admin/prices", {"model": manifest.name, **PRICE})
    _demo_key(admin, demo_key)
    return deployment


def _priced(admin: Admin, model: str) -> bool:
    """Whether everybody can have it, be it some day."""
    prices = admin.get(f"/admin/prices?book=list&model={model}")["prices"]
    return any(price["tier"] is price["service_class"] is None for price in prices)


def _demo_key(admin: Admin, path: Path) -> None:
    """Mint a key unless the file holds one. A lost file means a new key: it is shown once."""
    if path.exists():
        return
    created = admin.create("/admin/tenants", {"name": DEMO_TENANT})
    if created is None:
        (created,) = admin.get(f"/admin/tenants?name={DEMO_TENANT}")["tenants"]
    minted = admin.create(f"/admin/tenants/{created['id']}/keys", {"name": "demo"})
    assert minted is not None
    write_private(path, minted["key"].encode())
