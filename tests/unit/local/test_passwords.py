"""Passwords of the embedded services: whole or absent, and never made anew over data."""

import stat

import pytest

from local import postgres
from local.layout import Layout
from local.postgres import EmbeddedPostgres, PostgresError
from local.secrets import SecretsError, load_or_make
from local.valkey import EmbeddedValkey


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(postgres, "_unprivileged", lambda: None)
    return EmbeddedPostgres(directory=tmp_path / "postgres", port=1)


def a_program(tmp_path, monkeypatch, script):
    """Stands where initdb does."""
    program = tmp_path / "bin" / "initdb"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(0o755)
    monkeypatch.setattr(postgres, "binaries", lambda: program.parent)


def test_an_empty_valkey_password_is_made_anew(tmp_path):
    valkey = EmbeddedValkey(directory=tmp_path, port=1)
    (tmp_path / "password").write_text("")
    valkey.prepare()
    first = (tmp_path / "password").read_text()
    assert first
    assert f"requirepass {first}\n" in (tmp_path / "valkey.conf").read_text()
    valkey.prepare()
    assert (tmp_path / "password").read_text() == first
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_postgres_password_is_a_first_start_cut_short(cluster, tmp_path, monkeypatch):
    a_program(tmp_path, monkeypatch, "exit 0")
    cluster.directory.mkdir()
    (cluster.directory / "password").write_text("")
    cluster.prepare()
    assert (cluster.directory / "password").read_text()
    assert {path.name for path in cluster.directory.iterdir()} == {"data", "password"}


def test_a_failed_initdb_leaves_no_password(cluster, tmp_path, monkeypatch):
    a_program(tmp_path, monkeypatch, "echo no room >&2; exit 1")
    with pytest.raises(PostgresError, match="no room"):
        cluster.prepare()
    assert [path.name for path in cluster.directory.iterdir()] == ["data"]


def test_an_initdb_that_hangs_is_a_failure(cluster, tmp_path, monkeypatch):
    a_program(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(postgres, "COMMAND_TIMEOUT_S", 0.1)
    with pytest.raises(PostgresError, match="initdb took longer than"):
        cluster.prepare()
    assert [path.name for path in cluster.directory.iterdir()] == ["data"]


def test_data_whose_password_is_lost_is_not_removed(cluster):
    used = cluster.directory / "data" / "postmaster.opts"
    used.parent.mkdir(parents=True)
    used.write_text("postgres")
    with pytest.raises(PostgresError, match="password is lost"):
        cluster.prepare()
    assert used.exists()


def test_secrets_that_cannot_be_read_are_named_and_kept(tmp_path):
    layout = Layout(tmp_path)
    layout.secrets.write_text("{")
    with pytest.raises(SecretsError, match=r"secrets\.json cannot be read"):
        load_or_make(layout)
    assert layout.secrets.read_text() == "{"
