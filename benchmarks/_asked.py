"""What vLLM is asked, by its `--middleware`: a line for each call in the file `$ASKED`, with the
time and the last thing that was said. vLLM's own environment imports this file, so it needs nothing of ours."""

import os
import re
import time
from functools import cache

from transformers import AutoTokenizer

LAST_SAID = re.compile(r"<\|user\|>([^<]*)<\|end\|><\|assistant\|>$")


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(os.environ["ASKED_MODEL"])


def write(line):
    with open(os.environ["ASKED"], "a") as lines:
        lines.write(f"{time.time()} {line}\n")


async def note(request, call_next):
    if request.method == "POST" and request.url.path == "/inference/v1/generate":
        said = LAST_SAID.search(tokenizer().decode((await request.json())["token_ids"]))
        if said:  # not what compares sampler and learner
            write(said[1])
    return await call_next(request)
