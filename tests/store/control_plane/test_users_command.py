"""`headworks users` against a control plane that is a process of its own."""

import argparse
import json

import httpx
import pytest

from cli import users as command
from tests.support.control_plane import ADMIN_TOKEN, CHEAP
from tests.support.control_plane_process import environ, start, wait_live
from tests.support.services import free_port

pytestmark = pytest.mark.services

EMAIL = "ada@example.com"
PASSWORD = "a long walk by the weir"


@pytest.fixture
def url(postgres_url, valkey_url):
    port = free_port()
    cheap = {f"HEADWORKS_{name.upper()}": str(value) for name, value in CHEAP.items()}
    child = start(environ(postgres_url, valkey_url, port) | cheap)
    try:
        wait_live(port, child)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.communicate()


@pytest.fixture
def users(url, capsys):
    """The command's exit status and what it said, without a process for each."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(dest="command"))

    def run(*words, token=ADMIN_TOKEN):
        arguments = parser.parse_args(["users", *words, "--control-plane", url])
        code = arguments.run(arguments, {"HEADWORKS_ADMIN_TOKEN": token})
        told = capsys.readouterr()
        return code, told.out if code == 0 else told.err

    return run


def test_the_first_admin_is_invited_gets_in_and_is_put_out(url, users):
    def said(*words):
        code, text = users(*words, "--json")
        assert code == 0
        return json.loads(text)

    code, text = users("add", EMAIL, "--name", "Ada [/x]", "--role", "admin")
    assert (code, text.count(EMAIL)) == (0, 1)
    body = {"invitation": text.split()[-1], "password": PASSWORD}
    taken = httpx.post(f"{url}/admin/invitations/accept", json=body)
    assert taken.status_code == 200, taken.text
    assert EMAIL in users("list")[1]
    assert "Ada [/x]" in users("list")[1]
    (user,) = said("list")["users"]
    assert (user["roles"], user["has_password"]) == (["admin"], True)
    assert users("add", EMAIL, "--role", "viewer") == (1, f"headworks: {EMAIL} is a user\n")

    login = {"email": EMAIL, "password": PASSWORD}
    assert said("disable", EMAIL)["user"]["disabled"]
    assert httpx.post(f"{url}/admin/login", json=login).status_code == 401
    assert not said("enable", EMAIL)["user"]["disabled"]
    assert httpx.post(f"{url}/admin/login", json=login).status_code == 200
    assert said("reset", EMAIL)["invitation"].startswith("hwi_")
    assert httpx.post(f"{url}/admin/login", json=login).status_code == 401

    assert users("disable", "no@example.com") == (
        1,
        "headworks: there is no user 'no@example.com'\n",
    )
    code, text = users("list", token="no token")
    assert (code, "admin token" in text) == (1, True)
