"""A server of OpenEnv with one session: names a number, and rewards an answer that repeats it. PORT
is its argument."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    message: str


class Asked(Observation):
    text: str


class Number(Environment[Said, Asked, State]):
    def reset(self, seed=None, episode_id=None, **given):
        self._number, self._asked = str(10 + (seed or 0)), 0
        return Asked(text=f"Say {self._number}.", done=False, reward=None)

    def step(self, action, timeout_s=None, **given):
        self._asked += 1
        right = action.message == self._number
        return Asked(text="Again.", done=self._asked == 2, reward=0.5 if right else 0.25)

    @property
    def state(self):
        return State(step_count=self._asked)


if __name__ == "__main__":
    uvicorn.run(create_fastapi_app(Number, Said, Asked), port=int(sys.argv[1]), log_level="warning")
