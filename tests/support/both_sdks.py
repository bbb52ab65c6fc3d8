"""Both official SDKs of one caller, at a gateway on a real socket."""

from typing import Self

import anthropic
import openai

from tests.support.gateway_world import Caller, World


class SDKs:
    """Neither tries anything twice."""

    def __init__(self, world: World, caller: Caller) -> None:
        self.openai = openai.AsyncOpenAI(
            api_key=caller.key, base_url=f"{world.url}/v1", max_retries=0
        )
        self.anthropic = anthropic.AsyncAnthropic(
            api_key=caller.key, base_url=world.url, max_retries=0
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.openai.close()
        await self.anthropic.close()
