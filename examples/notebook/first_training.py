# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A first training in a notebook
#
# This notebook trains a small agent from start to end on a CPU. It takes about a minute. To run it:
#
# ```bash
# pip install 'agent-lightning-next[train]' jupytext jupyterlab
# jupytext --to ipynb first_training.py
# jupyter lab first_training.ipynb
# ```

# %% [markdown]
# ## An agent and its tasks
#
# The agent asks a model which team should answer a customer. Its reward is 1 for the right team.

# %%
import random

import agentlightning as agl
from agentlightning.learner.tiny import make_policy

TEAMS = {
    "billing": ["invoice", "refund", "price"],
    "technical": ["crash", "error", "login"],
    "shipping": ["parcel", "delay", "address"],
}


def prompt(task: dict) -> list[dict]:
    return [{"role": "user", "content": f"Which team answers: my {task['about']} again"}]


@agl.rollout
async def agent(task: dict, llm: agl.LLM) -> float:
    client = agl.openai_client(llm)
    answer = await client.chat.completions.create(model=llm.model, messages=prompt(task))
    return agl.rewards.exact_match(answer.choices[0].message.content or "", task["team"])


tasks = [{"about": word, "team": team} for team, words in TEAMS.items() for word in words]

# %% [markdown]
# ## A model
#  A tiny model is made on the spot, from demonstrations that mostly guess. With a GPU, pass a name
# such as `"Qwen/Qwen3-0.6B"` to the `Trainer` instead.

# %%
generator = random.Random(1)


def demonstration() -> dict:
    task = generator.choice(tasks)
    team = task["team"] if generator.random() < 0.2 else generator.choice(list(TEAMS))
    return {"messages": [*prompt(task), {"role": "assistant", "content": team}]}


policy = make_policy([demonstration() for _ in range(600)], seed=1)

# %% [markdown]
# ## Training
#
# The notebook's stop button ends it early and saves.

# %%
trainer = agl.Trainer(
    model=policy,
    algorithm=agl.GRPO(steps=12, tasks_per_step=9, group_size=8, max_tokens=8),
    optimizer=agl.AdamW(learning_rate=3e-4),
    max_sequence_length=128,
    seed=1,
)
result = trainer.fit(agent, tasks, tasks)

# %% [markdown]
# ## Before and after

# %%
before, after = result.evaluations[0].reward, result.evaluations[-1].reward
print(f"reward {before:.2f} before, {after:.2f} after; the policy is in {result.checkpoint}")
assert after > before
