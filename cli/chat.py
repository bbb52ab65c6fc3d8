"""`headworks chat "…"`: ask as a tenant would, and see what it cost and how fast it was."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from cli.place import add_data_option, complain, layout_of, state_or_complain
from local.layout import Layout
from local.state import StackState

TIMEOUT_S = 300.0
SETTLE_POLLS = 30
SETTLE_POLL_S = 0.1
MICRO = 1_000_000


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The question, and a few knobs."""
    parser = commands.add_parser("chat", help="ask the model, see TTFT, tokens/s and cost")
    add_data_option(parser)
    parser.add_argument("question")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Stream the answer to standard output and the figures to standard error."""
    layout = layout_of(arguments)
    state = state_or_complain(layout)
    if state is None:
        return 1
    try:
        return _ask(arguments, layout, state)
    except httpx.HTTPError as error:
        complain(f"the gateway could not be reached: {error}")
        return 1


def _ask(arguments: argparse.Namespace, layout: Layout, state: StackState) -> int:
    body = {
        "model": arguments.model,
        "messages": [{"role": "user", "content": arguments.question}],
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked = time.monotonic()
    first = 0.0
    usage: dict[str, Any] = {}
    with httpx.stream(
        "POST",
        f"{state.gateway_urls[0]}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {layout.demo_key.read_text()}"},
        timeout=TIMEOUT_S,
    ) as response:
        if response.is_error:
            complain(f"{response.status_code}: {_message(response.read())}")
            return 1
        for event in _events(response):
            if "error" in event:
                complain(event["error"]["message"])
                return 1
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                first = first or (time.monotonic() if text else 0.0)
                sys.stdout.write(text)
                sys.stdout.flush()
            usage = event.get("usage") or usage
        request_id = response.headers["x-request-id"]
    print()
    _figures(usage, asked, first, time.monotonic(), _cost(layout, state, request_id))
    return 0


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data not in (line, "[DONE]"):
            yield json.loads(data)


def _figures(usage: dict[str, Any], asked: float, first: float, ended: float, cost: str) -> None:
    tokens = usage.get("completion_tokens", 0)
    rate = (tokens - 1) / (ended - first) if tokens > 1 and ended > first else 0.0
    print(
        f"TTFT {(first - asked) * 1000:.0f} ms · {rate:.1f} tokens/s · "
        f"{usage.get('prompt_tokens', 0)} in, {tokens} out · {cost}",
        file=sys.stderr,
    )


def _cost(layout: Layout, state: StackState, request_id: str) -> str:
    """The settled bill, which follows the answer by a moment."""
    for _ in range(SETTLE_POLLS):
        rows = httpx.get(
            f"{state.control_plane_url}/admin/usage",
            params={"request_id": request_id},
            headers={"authorization": f"Bearer {layout.admin_token.read_text()}"},
            timeout=TIMEOUT_S,
        ).json()["usage"]
        if rows and rows[0]["state"] == "settled":
            micro = rows[0]["billed_micro"]
            return f"${micro // MICRO}.{micro % MICRO:06d}"
        time.sleep(SETTLE_POLL_S)
    return "not settled yet"


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError):
        return body.decode(errors="replace")
