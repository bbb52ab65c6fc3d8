"""`headworks users`: who may operate this, from the first one on.

On the stack that runs here, or with `--control-plane URL` on another, with the admin token or
an API token in the file named or in HEADWORKS_ADMIN_TOKEN.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.place import add_data_option, complain, layout_of, state_or_complain

TIMEOUT_S = 15.0
PAGE = 1000
ROLES = ("viewer", "operator", "billing", "admin")


class UsersError(Exception):
    """What the control plane refused, as it said it."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`add`, `list`, `disable`, `enable`, `reset`; a user is named by their email."""
    parser = commands.add_parser("users", help="who may operate this: add, list, disable, reset")
    does = parser.add_subparsers(dest="does", required=True, metavar="WHAT")
    add = does.add_parser("add", help="make a user, and the invitation to send them")
    add.add_argument("email")
    add.add_argument("--name", help="for people (default: the email)")
    add.add_argument("--role", action="append", choices=ROLES, required=True)
    does.add_parser("list", help="everybody, their roles, and when they last signed in")
    for what, text in (
        ("disable", "end their sessions, hold their tokens, let them in no more"),
        ("enable", "let them and their tokens in again"),
        ("reset", "end their password and sessions; a new invitation"),
    ):
        does.add_parser(what, help=text).add_argument("email")
    for each in does.choices.values():
        add_data_option(each)
        each.add_argument("--control-plane", metavar="URL")
        each.add_argument("--admin-token-file", type=Path, metavar="FILE")
        each.add_argument("--json", action="store_true")
        each.set_defaults(run=run)


def run(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """0 when it is done; 1 with the reason when it is not."""
    try:
        place = _place(arguments, environ)
        if place is None:
            return 1
        url, token = place
        headers = {"authorization": f"Bearer {token}"}
        with httpx.Client(base_url=f"{url}/admin", headers=headers, timeout=TIMEOUT_S) as client:
            answer = _DOES[arguments.does](client, arguments)
    except (UsersError, httpx.HTTPError, OSError) as error:
        complain(str(error))
        return 1
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        _print(answer)
    return 0


def _place(arguments: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, str] | None:
    file = arguments.admin_token_file
    if arguments.control_plane:
        token = file.read_text().strip() if file else environ.get("HEADWORKS_ADMIN_TOKEN", "")
        return arguments.control_plane.rstrip("/"), token
    layout = layout_of(arguments)
    state = state_or_complain(layout)
    if state is None:
        return None
    return state.control_plane_url, (file or layout.admin_token).read_text().strip()


def _add(client: httpx.Client, arguments: argparse.Namespace) -> Any:
    name = arguments.name or arguments.email
    body = {"email": arguments.email, "name": name, "roles": arguments.role}
    return _call(client, "POST", "/users", json=body)


def _list(client: httpx.Client, _: argparse.Namespace) -> Any:
    found: list[Any] = []
    after: str | None = ""
    while after is not None:
        page = _call(client, "GET", "/users", params={"after": after, "limit": PAGE})
        found += page["users"]
        after = page["after"]
    return {"users": found}


def _disable(client: httpx.Client, arguments: argparse.Namespace) -> Any:
    path = f"/users/{_id(client, arguments.email)}"
    return {"user": _call(client, "PATCH", path, json={"disabled": arguments.does == "disable"})}


def _reset(client: httpx.Client, arguments: argparse.Namespace) -> Any:
    return _call(client, "POST", f"/users/{_id(client, arguments.email)}/reset")


_DOES = {"add": _add, "list": _list, "disable": _disable, "enable": _disable, "reset": _reset}


def _id(client: httpx.Client, email: str) -> str:
    found = _call(client, "GET", "/users", params={"email": email})["users"]
    if not found:
        raise UsersError(f"there is no user {email!r}")
    return str(found[0]["id"])


def _call(client: httpx.Client, method: str, path: str, **what: Any) -> Any:
    response = client.request(method, path, **what)
    if response.is_error:
        try:
            message = response.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = f"the control plane answered with status {response.status_code}"
        raise UsersError(message)
    return response.json()


def _print(answer: dict[str, Any]) -> None:
    if "users" in answer:
        _print_table(answer["users"])
        return
    user = answer["user"]
    invitation = answer.get("invitation")
    if invitation:
        print(f"{user['email']} is invited; this works once, at /console/welcome:")
        print(invitation)
        return
    print(f"{user['email']} is {'disabled' if user['disabled'] else 'let in'}")


def _print_table(users: list[dict[str, Any]]) -> None:
    table = Table("email", "name", "roles", "state", box=None, pad_edge=False)
    for user in users:
        shown = (user["email"], user["name"], ", ".join(user["roles"]), _state(user))
        table.add_row(*map(escape, shown))  # a name is no markup, whatever a provider called them
    Console().print(table)


def _state(user: dict[str, Any]) -> str:
    if user["disabled"]:
        return "disabled"
    if user["invited"]:
        return "invited"
    return "never signed in" if user["signed_in_ms"] is None else "active"
