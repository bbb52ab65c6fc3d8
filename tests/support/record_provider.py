"""Records what a real server of each dialect sends, byte for byte, for tests to replay.

    python -m tests.support.record_provider http://127.0.0.1:8801 "vLLM 0.32.0" smollm2 [PID]

The committed recordings are of vLLM on a CPU, serving a small chat model in float32:

    vllm serve MODEL --served-model-name smollm2 --dtype float32 --port 8801 --max-model-len 4096
        --enable-auto-tool-choice --tool-call-parser hermes --enable-prompt-tokens-details

One file a case in tests/support/recordings, with the server's name and version in it. With the
PID of the server given, it is killed in the middle of the last answers: what a cut looks like.
"""

import http.client
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HERE = Path(__file__).parent / "recordings"

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city now.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
CLAUDE_TOOLS = [
    {
        "name": WEATHER["name"],
        "description": WEATHER["description"],
        "input_schema": WEATHER["parameters"],
    }
]
FORCED = {"type": "function", "function": {"name": "get_weather"}}
SAY = [{"role": "user", "content": "Name three colours."}]
ASK = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
LONG = [{"role": "user", "content": "word " * 6000}]
RESULTS = [
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees, rain"},
]
CLAUDE_RESULTS = [
    *ASK,
    {
        "role": "assistant",
        "content": [
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12 degrees, rain"}
        ],
    },
]
USAGE = {"stream_options": {"include_usage": True}}


def chats() -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies of OpenAI's dialect, each as a whole and as a stream."""
    bodies = {
        "plain": {"messages": SAY, "max_completion_tokens": 40},
        "length": {"messages": SAY, "max_completion_tokens": 3},
        "stop": {"messages": SAY, "max_completion_tokens": 40, "stop": [","]},
        "two": {"messages": SAY, "max_completion_tokens": 8, "n": 2, "temperature": 1.0},
        "logprobs": {
            "messages": SAY,
            "max_completion_tokens": 6,
            "logprobs": True,
            "top_logprobs": 2,
        },
        "forced": {
            "messages": ASK,
            "max_completion_tokens": 60,
            "tools": TOOLS,
            "tool_choice": FORCED,
        },
        "required": {
            "messages": ASK,
            "max_completion_tokens": 80,
            "tools": TOOLS,
            "tool_choice": "required",
        },
        "auto": {"messages": ASK, "max_completion_tokens": 60, "tools": TOOLS},
        "results": {"messages": RESULTS, "max_completion_tokens": 40, "tools": TOOLS},
        "schema": {
            "messages": SAY,
            "max_completion_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "schema": {
                        "type": "object",
                        "properties": {"colour": {"type": "string", "maxLength": 12}},
                        "required": ["colour"],
                        "additionalProperties": False,
                    },
                },
            },
        },
        "unicode": {
            "messages": [{"role": "user", "content": "Repeat exactly: \N{GRINNING FACE} naïve"}],
            "max_completion_tokens": 16,
        },
    }
    for name, body in bodies.items():
        base = {"model": "", "temperature": 0.0, "seed": 7, **body}
        yield f"{name}-whole", base
        yield f"{name}-stream", {**base, "stream": True, **USAGE}
    yield "bare-stream", {"model": "", "messages": SAY, "max_completion_tokens": 4, "stream": True}
    yield "too-long", {"model": "", "messages": LONG, "max_completion_tokens": 4}
    yield "too-long-stream", {"model": "", "messages": LONG, "stream": True, **USAGE}
    yield "bad-value", {"model": "", "messages": SAY, "temperature": -3}
    yield "unknown-model", {"model": "no-such-model", "messages": SAY}


def messages() -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies of Anthropic's dialect."""
    bodies = {
        "plain": {"messages": SAY, "max_tokens": 40},
        "length": {"messages": SAY, "max_tokens": 3},
        "stop": {"messages": SAY, "max_tokens": 40, "stop_sequences": [","]},
        "system": {
            "messages": SAY,
            "system": [{"type": "text", "text": "Answer in one word."}],
            "max_tokens": 20,
        },
        "forced": {
            "messages": ASK,
            "max_tokens": 60,
            "tools": CLAUDE_TOOLS,
            "tool_choice": {"type": "tool", "name": "get_weather"},
        },
        "any": {
            "messages": ASK,
            "max_tokens": 80,
            "tools": CLAUDE_TOOLS,
            "tool_choice": {"type": "any"},
        },
        "auto": {"messages": ASK, "max_tokens": 60, "tools": CLAUDE_TOOLS},
        "results": {"messages": CLAUDE_RESULTS, "max_tokens": 40, "tools": CLAUDE_TOOLS},
    }
    for name, body in bodies.items():
        base = {"model": "", "temperature": 0.0, **body}
        yield f"{name}-whole", base
        yield f"{name}-stream", {**base, "stream": True}
    yield "too-long", {"model": "", "messages": LONG, "max_tokens": 4}
    yield "unknown-model", {"model": "no-such-model", "messages": SAY, "max_tokens": 4}
    yield "bad-value", {"model": "", "messages": SAY, "max_tokens": 0}


DIALECTS = {
    "openai": ("/v1/chat/completions", chats),
    "anthropic": ("/v1/messages", messages),
}


def main() -> None:
    """Record every case, then the cuts."""
    url, server, model, *pid = sys.argv[1:]
    HERE.mkdir(exist_ok=True)
    for dialect, (path, cases) in DIALECTS.items():
        for name, body in cases():
            asked = {**body, "model": body["model"] or model}
            record(url, path, asked, f"{dialect}-{name}", server)
    if pid:
        cut(url, model, server, int(pid[0]))


def record(url: str, path: str, body: dict[str, Any], name: str, server: str) -> None:
    """One exchange, as it was."""
    response = ask(url, path, body)
    keep(name, server, path, body, response, response.read(), cut=False)


def cut(url: str, model: str, server: str, pid: int) -> None:
    """One stream of each dialect, and then the server is killed."""
    story = {"messages": SAY, "model": model, "stream": True, "temperature": 0.0}
    chat = {**story, "max_completion_tokens": 400, "ignore_eos": True, **USAGE}
    message = {
        **story,
        "max_tokens": 400,
        "messages": [{"role": "user", "content": "Tell a tale."}],
    }
    told = [
        ("openai-cut", "/v1/chat/completions", chat),
        ("anthropic-cut", "/v1/messages", message),
    ]
    streams = [(*each, ask(url, each[1], each[2])) for each in told]
    heads = [stream.read1() + stream.read1() + stream.read1() for *_, stream in streams]
    os.killpg(os.getpgid(pid), signal.SIGKILL)
    for (name, path, body, stream), head in zip(streams, heads, strict=True):
        try:
            rest = stream.read()
        except http.client.IncompleteRead as error:
            rest = error.partial
        keep(name, server, path, body, stream, head + rest, cut=True)


def ask(url: str, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    """The head of the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    head = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    connection.request("POST", path, json.dumps(body), head)
    return connection.getresponse()


def keep(  # noqa: PLR0917 - a recording's fields, in the file's order
    name: str,
    server: str,
    path: str,
    body: dict[str, Any],
    response: http.client.HTTPResponse,
    answer: bytes,
    *,
    cut: bool,
) -> None:
    """Write it beside the others."""
    recording = {
        "server": server,
        "path": path,
        "request": body,
        "status": response.status,
        "headers": {"content-type": response.headers.get("content-type", "")},
        "cut": cut,
        "body": answer.decode(),
    }
    file = HERE / f"{name}.json"
    file.write_text(json.dumps(recording, indent=1, ensure_ascii=True) + "\n")
    sys.stdout.write(f"{response.status} {len(answer):7} {file.name}\n")


if __name__ == "__main__":
    main()
