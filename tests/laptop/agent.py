"""The agent that the pages mean where they show none. Its answers are short, whatever the model."""

import agentlightning as agl


@agl.rollout
async def agent(task: dict, llm: agl.LLM, resources: dict) -> float:
    question = task["question"]
    if "prompt" in resources:
        question = resources["prompt"].format(request=question)
    answer = await agl.openai_client(llm).chat.completions.create(
        model=llm.model, max_tokens=8, messages=[{"role": "user", "content": question}]
    )
    return float(answer.choices[0].message.content == task["answer"])


solve = book_room = agent
