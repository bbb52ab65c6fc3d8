"""An opened gateway, before any of its loops has run."""

from pathlib import Path

import pytest

from gateway.gateway import Gateway
from gateway.settings import GatewaySettings
from tests.support.gateway_world import PEPPER, SECRET

pytestmark = [pytest.mark.anyio, pytest.mark.services]


async def test_it_follows_the_keys_from_before_it_serves(
    postgres_url: str, valkey_url: str, tmp_path: Path
) -> None:
    gateway = Gateway(
        GatewaySettings(
            database_url=postgres_url,
            redis_url=valkey_url,
            internal_secret=SECRET,
            key_pepper=PEPPER,
            models_dir=str(tmp_path / "models"),
            spool_dir=str(tmp_path / "spool"),
            gateway_port=0,
        )
    )
    await gateway.open()
    try:
        # Nothing was awaited since: a key read from now on is one whose changes are followed.
        assert gateway.auth.confirmed_ago_s < gateway.settings.start_timeout_ms / 1000
    finally:
        await gateway.close()
