"""The official SDKs on bytes of ours: no sockets."""

import anthropic
import httpx2
import openai

from gateway.sse import SSE_HEADERS

JSON = {"content-type": "application/json"}
MODEL = "smollm2-135m-instruct"


def answering(content: bytes, headers: dict[str, str], status: int = 200) -> httpx2.Client:
    """A client whose every request gets these bytes, in small pieces when they are a stream."""

    def handler(request: httpx2.Request) -> httpx2.Response:
        pieces = (content[i : i + 7] for i in range(0, len(content), 7))
        return httpx2.Response(status, headers=headers, content=pieces)

    return httpx2.Client(transport=httpx2.MockTransport(handler))


def openai_client(
    content: bytes, headers: dict[str, str] = SSE_HEADERS, status: int = 200
) -> openai.OpenAI:
    return openai.OpenAI(
        api_key="k",
        base_url="http://gateway/v1",
        max_retries=0,
        http_client=answering(content, headers, status),
    )


def anthropic_client(
    content: bytes, headers: dict[str, str] = SSE_HEADERS, status: int = 200
) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        api_key="k",
        base_url="http://gateway",
        max_retries=0,
        http_client=answering(content, headers, status),
    )
