"""`headworks check`: audit the live system. Exit status 1, with the reason, when it is off."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

import httpx

from cli.place import add_data_option, complain, layout_of, state_or_complain

TIMEOUT_S = 60.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`--quiescent` also demands that nothing is in flight."""
    parser = commands.add_parser("check", help="audit money, leases, tickets, KV and journals")
    add_data_option(parser)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quiescent", action="store_true", help="nothing may be in flight")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """0 only when every item was looked at and is well."""
    layout = layout_of(arguments)
    state = state_or_complain(layout)
    if state is None:
        return 1
    try:
        response = httpx.get(
            f"{state.control_plane_url}/admin/check",
            params={"quiescent": "true"} if arguments.quiescent else {},
            headers={"authorization": f"Bearer {layout.admin_token.read_text()}"},
            timeout=TIMEOUT_S,
        )
        response.raise_for_status()
    except httpx.HTTPError as error:
        complain(f"the control plane could not be asked: {error}")
        return 1
    report = response.json()
    print(json.dumps(report, indent=2) if arguments.json else _text(report))
    return 0 if report["ok"] else 1


def _text(report: dict[str, Any]) -> str:
    lines = [
        f"{'ok ' if item['ok'] else 'OFF'}  {item['name']}: {item['detail']}"
        for item in report["items"]
    ]
    return "\n".join([*lines, "", "all well" if report["ok"] else "something is off"])
