"""`headworks status`: what runs, where it is, and whether it answers."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from cli.place import add_data_option, layout_of, shown, state_or_complain
from local.layout import Layout
from local.state import StackState

PROBE_TIMEOUT_S = 3.0
MIB = 1024 * 1024


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Text for people, JSON for programs."""
    parser = commands.add_parser("status", help="what runs, where, and whether it is ready")
    add_data_option(parser)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """0 when every gateway is ready."""
    layout = layout_of(arguments)
    state = state_or_complain(layout)
    report = describe(layout, state) if state else {"ready": False, "phase": "stopped"}
    if arguments.json:
        print(json.dumps(report, indent=2))
    elif state:
        _print(report)
    return 0 if report["ready"] else 1


def describe(layout: Layout, state: StackState) -> dict[str, Any]:
    """The `--json` document."""
    processes: dict[str, dict[str, Any]] = {
        name: {
            "state": process.state.value,
            "pid": process.pid,
            "restarts": process.restarts,
            "last_exit": process.last_exit,
            "memory_mib": _memory_mib(process.pid),
        }
        for name, process in state.processes.items()
    }
    return {
        "ready": all(_answers(f"{url}/health/ready") for url in state.gateway_urls),
        "phase": state.phase,
        "gateway_url": state.gateway_urls[0],
        "gateway_urls": state.gateway_urls,
        "control_plane_url": state.control_plane_url,
        "worker_urls": state.worker_urls,
        "database_url": state.database_url,
        "redis_url": state.redis_url,
        "demo_key_file": shown(layout.demo_key),
        "admin_token_file": shown(layout.admin_token),
        "processes": processes,
        "memory_mib": round(sum(p["memory_mib"] or 0 for p in processes.values()), 1),
    }


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=PROBE_TIMEOUT_S).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _memory_mib(pid: int | None) -> float | None:
    """Proportional set size of the process and its children: shared pages counted once."""
    if pid is None:
        return None
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
        return round(sum(member.memory_full_info().pss for member in family) / MIB, 1)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _print(report: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("process", "state", "pid", "restarts", "MiB"):
        table.add_column(column)
    for name, process in report["processes"].items():
        table.add_row(
            name,
            process["state"],
            str(process["pid"] or "-"),
            str(process["restarts"]),
            str(process["memory_mib"] or "-"),
        )
    console = Console(highlight=False)
    console.print("ready" if report["ready"] else f"not ready ({report['phase']})")
    console.print(f"gateway        {', '.join(report['gateway_urls'])}")
    console.print(f"control plane  {report['control_plane_url']}")
    console.print(f"memory         {report['memory_mib']} MiB")
    console.print(table)
