"""An agent in the style of Agent Lightning 1.0: a class that finds task, model and reward in its
environment."""

import asyncio
import json
import os
from urllib.request import Request, urlopen

from openai import AsyncOpenAI


class Agent:
    async def run(self) -> None:
        key, question = os.environ["AGL_KEY"], os.environ["QUESTION"]
        client = AsyncOpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=key)
        chat = await client.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": question}], max_tokens=4
        )
        assert chat.choices
        continued = await client.completions.create(model="auto", prompt=[5, 6, 7], max_tokens=4)
        ids = (continued.choices[0].model_extra or {})["token_ids"]
        event = {
            "event_type": "reward",
            "data": {"value": len(ids) / 4, "source": "agent", "reason": question},
        }
        headers = {"Authorization": f"Bearer {key}"}
        request = Request(os.environ["AGL_EVENT_URL"], json.dumps(event).encode(), headers)
        assert await asyncio.to_thread(lambda: urlopen(request, timeout=10).status) == 200


if __name__ == "__main__":
    asyncio.run(Agent().run())
