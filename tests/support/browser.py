"""A browser at the admin API: it keeps cookies and says what browsers say of pages."""

import secrets
from http.cookies import SimpleCookie
from typing import Any

import psycopg

from tests.support.control_plane import ControlPlane

ORIGIN = "http://control-plane"
PASSWORD = "a long walk by the weir"


class Browser:
    """By hand, not by httpx's jar: that would not send a Secure cookie to a test's address."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.cookies: dict[str, str] = {}
        self.csrf: str | None = None
        self.set_cookie = ""

    async def send(
        self, method: str, path: str, body: Any = None, *, headers: Any = None, **query: Any
    ) -> Any:
        """`headers` replace what a page of ours would send; None takes one away."""
        said = {"origin": ORIGIN, "sec-fetch-site": "same-origin", "user-agent": "a browser"}
        if self.cookies:
            said["cookie"] = "; ".join(f"{k}={v}" for k, v in self.cookies.items())
        if self.csrf is not None:
            said["x-csrf-token"] = self.csrf
        said = {k: v for k, v in (said | (headers or {})).items() if v is not None}
        answer = await self._plane.client.request(
            method, f"/admin{path}", json=body, params=query, headers=said
        )
        self._keep(answer)
        return answer

    async def sign_in(self, email: str, password: str = PASSWORD) -> Any:
        answer = await self.send("POST", "/login", {"email": email, "password": password})
        if answer.status_code == 200:
            self.csrf = answer.json()["csrf"]
        return answer

    def _keep(self, answer: Any) -> None:
        for line in answer.headers.get_list("set-cookie"):
            self.set_cookie = line
            for name, morsel in SimpleCookie(line).items():
                if morsel["max-age"] == "0":
                    self.cookies.pop(name, None)
                else:
                    self.cookies[name] = morsel.value


async def a_user(plane: ControlPlane, *roles: str, **fields: Any) -> Any:
    """One with a password, made with the admin token; any number of tests share a database."""
    email = f"{secrets.token_hex(6)}@example.com"
    body = {"email": email, "name": "A Person", "roles": roles, "password": PASSWORD} | fields
    return (await plane.made("/users", body))["user"]


async def a_browser(plane: ControlPlane, *roles: str) -> Browser:
    """Of a new user with these roles, who is in."""
    browser = Browser(plane)
    answer = await browser.sign_in((await a_user(plane, *roles))["email"])
    assert answer.status_code == 200, answer.text
    return browser


async def a_token(plane: ControlPlane, **scope: Any) -> str:
    """Of the installation."""
    made = await plane.made("/tokens", {"name": "t", **scope})
    return str(made["text"])


def run(postgres_url: str, statement: Any, *values: Any) -> Any:
    """Behind the application's back: what an intruder or the passing of time would do."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        cursor = connection.execute(statement, values)
        return cursor.fetchall() if cursor.description else None


async def forget_addresses(plane: ControlPlane) -> None:
    """Tests share one address; what others failed at must not make this one wait."""
    async with plane.services.postgres.transaction() as conn:
        await conn.execute("DELETE FROM sign_in_attempts WHERE name LIKE 'address:%'")
