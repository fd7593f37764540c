"""Answers customers of a small shop: a LangChain agent with one tool.

OPENAI_API_KEY=… python agent.py "The lamp: how many are left?"
"""

import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

STOCK = {
    "bench": 31, "bottle": 64, "bowl": 27, "broom": 45, "bucket": 12, "candle": 88, "chair": 53, "clock": 19,
    "cup": 72, "desk": 14, "fan": 36, "fork": 97, "glove": 58, "hammer": 23, "jar": 41, "kettle": 16,
    "knife": 79, "ladder": 11, "lamp": 34, "mirror": 25, "mop": 48, "mug": 91, "pan": 39, "pillow": 62,
    "plate": 85, "rope": 29, "rug": 17, "saw": 22, "shelf": 43, "spoon": 94, "stool": 37, "table": 13,
    "tent": 21, "towel": 76, "tray": 54, "vase": 33,
}  # fmt: skip


def stock(item: str) -> str:
    """How many of an item are in stock."""
    return str(STOCK.get(item, "no such item"))


agent = create_agent(ChatOpenAI(model="gpt-5-mini"), [stock])


def ask(question: str) -> str:
    return agent.invoke({"messages": [("user", question)]})["messages"][-1].text


if __name__ == "__main__":
    print(ask(sys.argv[1]))
