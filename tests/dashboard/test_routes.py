"""The dashboard's routes as its page uses them: who may see and do what, and that what is shown is
what is stored."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from agentlightning.dashboard.run_views import time_left
from agentlightning.datasets.export import annotation_of
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.models import ModelEntry, ModelTable
from agentlightning.server import dashboard
from agentlightning.server.app import create_app
from agentlightning.server.dashboard import POLICY
from agentlightning.server.serve import HttpServer
from agentlightning.store.sql import SqlStore
from agentlightning.tracing.scores import give_score
from agentlightning.types import EnqueueRolloutRequest, Metrics, Rollout
from tests.data.recordings import SYSTEM, asks_for, call, reward, says, tool_says
from tests.gateway.world import talking
from tests.node import NODE

pytestmark = pytest.mark.anyio
KEY = "the admin's key"
HOSTILE = "<script>alert(1)</script>\x1b[31m"
CREDIT = {
    "returns": "identical",
    "returns_options": {},
    "baseline": "grpo",
    "baseline_options": {},
    "equal_rewards": False,
}
MANIFEST = {
    "seed": 3,
    "config": {
        "models": {"policy": "tiny"},
        "algorithm": {"steps": 9, "reward": {"base": "final"}, **CREDIT},
    },
}


class Place:
    """A server, its store, and a browser of its origin."""

    def __init__(
        self, store: SqlStore, http: aiohttp.ClientSession, url: str, models: ModelTable
    ) -> None:
        self.store, self.http, self.url, self.models = store, http, url, models
        self.headers = {"authorization": f"Bearer {KEY}"}

    async def ask(
        self, method: str, path: str, body: Any = None, status: int = 200, **headers: str
    ) -> Any:
        async with self.http.request(
            method, path, json=body, headers=self.headers | headers
        ) as answer:
            said = await answer.read()
            assert answer.status == status, said
            return msgspec.json.decode(said) if answer.content_type == "application/json" else said

    async def get(self, path: str, status: int = 200, **headers: str) -> Any:
        return await self.ask("GET", f"/api/v1/dashboard{path}", None, status, **headers)

    async def post(self, path: str, body: Any, status: int = 200, **headers: str) -> Any:
        return await self.ask("POST", f"/api/v1/dashboard{path}", body, status, **headers)

    async def logged_in(self, key: str = KEY) -> Place:
        """The same with the cookie of a session instead of a key."""
        async with self.http.post("/api/v1/dashboard/session", json={"key": key}) as answer:
            assert answer.status == 200, await answer.text()
            cookie = answer.headers["set-cookie"]
        assert key not in cookie and "HttpOnly" in cookie and "SameSite=Strict" in cookie
        browser = Place(self.store, self.http, self.url, self.models)
        browser.headers = {"cookie": cookie.partition(";")[0]}
        return browser


@pytest.fixture
async def place(anyio_backend) -> AsyncIterator[Place]:
    store = await SqlStore.open(":memory:")
    gateway = Gateway(ModelTable([]), store)
    jar = aiohttp.DummyCookieJar()
    async with (
        HttpServer(create_app(store, gateway=gateway, admin_key=KEY)) as http,
        aiohttp.ClientSession(http.url, cookie_jar=jar) as session,
    ):
        yield Place(store, session, http.url, gateway.models)
    await gateway.close()
    await store.close()


async def record(
    store: SqlStore,
    rewards: list[float | None],
    sampling: str | None = None,
    algorithm: dict[str, Any] | None = None,
) -> list[Rollout]:
    """A group of one run, in which each rollout calls twice: for a tool, which the first one's
    fails, and to answer."""
    told = algorithm or MANIFEST["config"]["algorithm"]
    config = MANIFEST["config"] | {
        "algorithm": told,
        "credit_by_settings": told.get("name") != "mine",
    }
    if told.get("name") in ("ppo", "sft"):
        config.pop("credit_by_settings")  # as runs of before have it
    run = await store.start_run("grpo", MANIFEST | {"config": config})
    group = await store.create_group(len(rewards), run_id=run.run_id)
    await store.enqueue_many_rollouts(
        [
            EnqueueRolloutRequest(
                input={"question": HOSTILE, "n": n}, group_id=group.group_id, group_index=n
            )
            for n in range(len(rewards))
        ]
    )
    question = [SYSTEM, says("user", HOSTILE)]
    for n, value in enumerate(rewards):
        leased = (await store.dequeue_many_rollouts(limit=1))[0]
        ids = leased.rollout_id, leased.attempt.attempt_id
        result = tool_says("t", '{"is_error": true}' if n == 0 else "sunny")
        spans = [
            call(
                0,
                question,
                asks_for("t"),
                CALL_REQUEST='{"model": "policy", "temperature": 1}',
                CALL_SAMPLING=sampling,
            ),
            call(1, [*question, asks_for("t"), result], says("assistant", HOSTILE)),
            *([] if value is None else [reward(value)]),
        ]
        own = [
            msgspec.structs.replace(
                one, rollout_id=ids[0], attempt_id=ids[1], span_id=f"{n:08x}{index:08x}"
            )
            for index, one in enumerate(spans)
        ]
        await store.add_many_spans(own)
        reason = {} if value is not None else {"reason": f"ValueError: {HOSTILE}"}
        await store.update_attempt(
            *ids, status="succeeded" if value is not None else "failed", metadata=reason
        )
    return await store.query_rollouts(run_id=run.run_id)


# --- the page -------------------------------------------------------------------------------------


async def test_the_page_needs_no_key_and_lets_nothing_in_from_elsewhere(
    place, tmp_path, monkeypatch
):
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "assets" / "main-1a2b.js").write_text("1")
    (tmp_path / "secret").write_text("no")
    monkeypatch.setattr(dashboard, "_STATIC", tmp_path)
    dashboard.page.cache_clear()
    async with place.http.get("/") as answer:
        assert (answer.status, answer.content_type) == (200, "text/html")
        assert answer.headers["content-security-policy"] == POLICY
        assert "unsafe" not in POLICY
    async with place.http.get("/assets/main-1a2b.js") as answer:
        assert (answer.status, answer.content_type) == (200, "text/javascript")
        assert "immutable" in answer.headers["cache-control"]
    for name in ("..%2Fsecret", ".hidden", "none.js"):
        async with place.http.get(f"/assets/{name}") as answer:
            assert answer.status == 404
    dashboard.page.cache_clear()


def test_the_pages_types_are_those_of_the_servers_answers():
    subprocess.run(
        [sys.executable, "scripts/page_types.py", "--check"],
        check=True,
        cwd=Path(__file__).parents[2],
    )


# --- sessions -------------------------------------------------------------------------------------


async def test_a_session_stands_for_its_key_until_it_ends(place):
    browser = await place.logged_in()
    assert (await browser.get("/session"))["admin"] is True
    assert await browser.ask("GET", "/api/v1/runs") == []
    async with place.http.get("/api/v1/events", headers=browser.headers) as answer:
        assert await answer.content.readline() == b"event: reset\n"
    await browser.ask("DELETE", "/api/v1/dashboard/session", status=204)
    await browser.get("/session", status=401)


async def test_a_wrong_key_begins_no_session(place):
    place.headers = {}
    await place.post("/session", {"key": "a guess"}, status=401)
    await place.get("/session", status=401)
    await place.get("/runs", status=401, cookie="agl_session_80=invented")


async def test_a_key_that_reads_gives_no_score_and_ends_its_sessions_when_it_is_revoked(place):
    rollout = (await record(place.store, [1.0, 0.0]))[0]
    issued = await place.store.issue_key(name="reader", scopes=["read"])
    browser = await place.logged_in(issued.api_key)
    said = await browser.get("/session")
    assert (said["scopes"], said["admin"], said["protected"]) == (["read"], False, True)
    assert len((await browser.post("/rollouts", {}))["items"]) == 2
    await browser.post(f"/rollouts/{rollout.rollout_id}/score", {"reward": 1.0}, status=403)
    await place.store.revoke_key(key_id=issued.key_id)
    await browser.get("/runs", status=401)


@pytest.mark.parametrize(
    "sent",
    [{"origin": "http://elsewhere.example"}, {"origin": "null"}, {"sec-fetch-site": "same-site"}],
)
async def test_another_sites_page_cannot_use_a_session(place, sent):
    (rollout,) = await record(place.store, [1.0])
    browser = await place.logged_in()
    await browser.get("/runs", status=403, **sent)
    await browser.post(f"/rollouts/{rollout.rollout_id}/score", {"reward": 0.0}, status=403, **sent)
    await browser.ask(
        "POST", f"/api/v1/rollouts/{rollout.rollout_id}/cancel", {}, status=403, **sent
    )
    await browser.ask("DELETE", "/api/v1/dashboard/session", status=403, **sent)
    place.headers = {}
    await place.post("/session", {"key": KEY}, status=403, **sent)  # nor begin one
    await browser.get("/runs", origin=place.url, **{"sec-fetch-site": "same-origin"})


# --- rollouts -------------------------------------------------------------------------------------


async def test_rollouts_are_listed_newest_first_page_by_page(place):
    made = await record(place.store, [1.0, 0.0, None])
    first = await place.post("/rollouts", {"limit": 2, "with_total": True})
    rest = await place.post("/rollouts", {"limit": 2, "cursor": first["next_cursor"]})
    rows = [*first["items"], *rest["items"]]
    assert [row["rollout"]["rollout_id"] for row in rows] == [
        one.rollout_id for one in reversed(made)
    ]
    assert (first["total"], rest["next_cursor"]) == (3, None)
    assert [row["reward"] for row in rows] == [None, 0.0, 1.0]
    assert (rows[0]["error"], rows[0]["calls"], rows[0]["attempts"]) == (
        f"ValueError: {HOSTILE}",
        2,
        1,
    )


async def test_a_query_that_cannot_be_meant_is_refused(place):
    said = await place.post(
        "/rollouts", {"where": {"op": "eq", "field": "rewards", "value": 1}}, status=422
    )
    assert "did you mean 'reward'" in said["error"]["message"]
    await place.post("/rollouts", {"limit": 1000}, status=422)
    await place.get("/rollouts/none", status=404)
    await place.post("/series", {"run_ids": ["none"], "names": []}, status=404)
    await place.post("/series", {"run_ids": ["none"] * 200, "names": ["reward"] * 100}, status=422)
    await place.get("/quality", status=422)


async def test_a_rollout_is_shown_with_what_was_new_in_each_call(place):
    (one,) = await record(place.store, [1.0])
    view = await place.get(f"/rollouts/{one.rollout_id}")
    (conversation,) = view["conversations"]
    first, second = conversation["calls"]
    assert [message["role"] for message in first["new_messages"]] == ["system", "user"]
    assert [message["role"] for message in second["new_messages"]] == ["tool"]
    assert second["answer"]["content"] == HOSTILE  # as it is: the page shows text as text
    steps = [(step["kind"], step["call_index"]) for step in view["steps"]]
    assert steps == [("call", 0), ("call", 1), ("reward", None)]
    await place.get(f"/rollouts/{one.rollout_id}?attempt=2", status=404)


async def test_tokens_are_those_that_were_sampled(place):
    one, _ = await record(place.store, [1.0, 0.0])
    view = await place.get(f"/rollouts/{one.rollout_id}/tokens")
    assert view["prompt"] == {"ids": [1, 2, 0], "texts": None, "shared": 0}
    sampled = view["sampled"]
    assert (sampled["ids"], sampled["logprobs"], sampled["versions"]) == (
        [7, 8],
        [-0.5, -0.25],
        [3, 4],
    )
    # (1 − ½) over a standard deviation of √½
    assert sampled["advantages"] == pytest.approx([2**-0.5] * 2, rel=1e-4)
    later = await place.get(f"/rollouts/{one.rollout_id}/tokens?call={view['calls'][1]['span_id']}")
    assert (later["prompt"]["ids"], later["prompt"]["shared"]) == ([1, 2, 1], 2)
    await place.get(f"/rollouts/{one.rollout_id}/tokens?call=none", status=404)


async def test_a_model_of_this_process_says_which_weights_it_answers_with(place):
    async with talking() as (backend, service):
        await service.update_weights(4)
        place.models.put(ModelEntry("policy", backend))
        [model] = await place.ask("GET", "/api/v1/models")
    assert (model["name"], model["policy_version"]) == ("policy", 4)


# --- groups and credit ----------------------------------------------------------------------------


async def test_a_group_is_shown_as_its_run_credits_it(place):
    one, *_ = await record(place.store, [1.0, 0.0, None])
    view = await place.get(f"/groups/{one.group_id}")
    assert (view["credit"], view["problem"], view["group"]["group_id"]) == (
        CREDIT,
        None,
        one.group_id,
    )
    *compared, failed = [member["advantage"] for member in view["members"]]
    assert compared == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-4) and failed is None
    assert await place.get(f"/rollouts/{one.rollout_id}/credit") == view


async def test_credit_is_that_of_the_runs_settings(place):
    settings = CREDIT | {
        "returns": "air",
        "returns_options": {"alpha": 0.5, "tool_weights": {"search": 2.0}},
    }
    algorithm = {"reward": {"base": "final"}, **settings, "baseline": "none"}
    one, _ = await record(place.store, [1.0, 0.0], algorithm=algorithm)
    view = await place.get(f"/rollouts/{one.rollout_id}/credit")
    # ½·r + ½·R: the first rollout's tool failed (−2), the second's did not (+2); answers call no
    # tool.
    found = [[call["return"] for call in member["calls"]] for member in view["members"]]
    assert found == [
        [pytest.approx(-0.5), pytest.approx(0.5)],
        [pytest.approx(1.0), pytest.approx(0.0)],
    ]


@pytest.mark.parametrize(
    ("algorithm", "problem", "returned"),
    [
        (
            {"name": "ppo", "returns": "identical", "returns_options": {}},
            "what ppo made of these rewards",
            None,
        ),
        ({"name": "mine", **CREDIT}, "what mine made of these rewards", None),
        (CREDIT | {"baseline": "reinforce++"}, "all groups of a step", 1.0),
        (CREDIT | {"returns": "air", "returns_options": {"alpha": 7}}, "alpha", None),
        (CREDIT | {"returns": "agentlightning:missing"}, "not built in", None),
    ],
)
async def test_credit_that_is_not_known_here_is_not_made_up(place, algorithm, problem, returned):
    one, _ = await record(
        place.store, [1.0, 0.0], algorithm={"reward": {"base": "final"}, **algorithm}
    )
    view = await place.get(f"/rollouts/{one.rollout_id}/credit")
    assert problem in view["problem"]
    assert [view["members"][0]["calls"][0][name] for name in ("return", "advantage")] == [
        returned,
        None,
    ]


async def test_the_prefix_tree_holds_every_token_once(place):
    one, _ = await record(place.store, [1.0, 0.0])
    tree = await place.get(f"/groups/{one.group_id}/tree")
    # (1 2 0 7 8) and (1 2 1 7 8), twice each: 1 2, then two branches.
    assert (tree["tokens"], tree["shared"]) == (20, 12)
    assert sorted((node["tokens"], node["sampled"], node["value"]) for node in tree["nodes"]) == [
        (2, 0, 0.5),
        (3, 2, 0.5),
        (3, 2, 0.5),
    ]
    assert sum(len(node["ends"]) for node in tree["nodes"]) == 4


# --- runs -----------------------------------------------------------------------------------------


async def test_curves_are_told_in_as_many_points_as_asked(place):
    run = await place.store.start_run("grpo", MANIFEST)
    counted = {"rollouts": 8.0, "calls": 16.0, "prompt_tokens_mean": 10.0, "sampled_tokens": 32.0}
    for step in range(100):
        values = counted | {"reward": step / 100} | ({"val_reward": 0.5} if step == 99 else {})
        await place.store.add_metrics(
            Metrics(run_id=run.run_id, step=step, time=run.start_time + step, values=values)
        )
    asked = {"run_ids": [run.run_id], "names": ["reward", "val_reward"], "points": 20}
    (series,) = await place.post("/series", asked)
    assert len(series["step"]) == 20
    assert [series[x][-1] for x in ("step", "rollouts", "tokens_read", "tokens_written")] == [
        99,
        800,
        16000,
        3200,
    ]
    assert series["values"]["reward"][0] == pytest.approx(0.02)  # the mean of five
    assert series["values"]["val_reward"] == [None] * 19 + [0.5]
    (row,) = await place.get("/runs")
    assert [row[name] for name in ("seed", "steps", "total_steps", "models", "best_val")] == [
        3,
        99,
        9,
        ["policy"],
        0.5,
    ]
    assert [row[name] for name in ("reason", "tags", "stopping", "excluded")] == [
        None,
        [],
        False,
        [],
    ]
    again = await place.store.start_run("grpo", MANIFEST | {"seed": 4})
    other = await place.store.start_run("grpo", MANIFEST | {"config": {}})
    families = {one["run_id"]: one["family"] for one in await place.get("/runs")}
    assert families[again.run_id] == families[run.run_id] != families[other.run_id]


def test_the_time_left_is_that_of_the_steps_to_come_at_the_pace_of_the_newest():
    def steps(*times: float) -> list[Metrics]:
        return [Metrics(run_id="r", step=step, time=at, values={}) for step, at in enumerate(times)]

    assert time_left(steps(0.0, 100.0, 103.0, 106.0), 10, 107.0) == 20.0
    assert time_left(steps(0.0, 100.0, 103.0, 106.0), 3, 107.0) == 0.0
    assert (
        time_left(steps(0.0, 100.0), 10, 107.0) is None
        and time_left(steps(0.0, 1.0, 2.0), None, 3.0) is None
    )


def test_ticks_are_told_apart_and_noise_does_not_fill_a_chart():
    program = """
        import {shownRange, tickLabels} from "./dashboard/src/ticks.ts";
        console.log(JSON.stringify([
            tickLabels([0.9996, 0.9998, 1, 1.0002], 0.0002), tickLabels([0, 0.25, 0.5], 0.25),
            tickLabels([0, 5000, 10000], 5000), tickLabels([0, 2e-7, 4e-7], 2e-7), tickLabels([0, 20], 20),
            shownRange(0, 0), shownRange(1e-13, 9e-13), shownRange(2, 2),
            shownRange(1.0000001, 1.0000004).map((end) => Math.round(end * 1e4)), shownRange(-3, 5),
        ]));
    """
    command = [
        NODE,
        "--no-warnings",
        "--experimental-strip-types",
        "--input-type=module",
        "-e",
        program,
    ]
    said = subprocess.run(command, check=True, cwd=Path(__file__).parents[2], capture_output=True)
    assert msgspec.json.decode(said.stdout) == [
        ["0.9996", "0.9998", "1.0000", "1.0002"],
        ["0.00", "0.25", "0.50"],
        ["0", "5k", "10k"],
        ["0", "2e-7", "4e-7"],
        ["0", "20"],
        [0, 1],
        [0, 1e-9],
        [1.8, 2.2],
        [9995, 10005],
        [-3.4, 5.4],
    ]


async def test_quality_is_what_steps_counted(place):
    run = await place.store.start_run("grpo", MANIFEST)
    values = {
        "rollouts": 4.0,
        "calls": 6.0,
        "calls_excluded": 2.0,
        "excluded/other agent": 2.0,
        "unmerged/unknown": 1,
    }
    await place.store.add_metrics(Metrics(run_id=run.run_id, step=1, time=0.0, values=values))
    told = await place.get(f"/quality?run_id={run.run_id}")
    assert (told["counts"]["excluded"], told["shares"]["excluded"]) == ({"other agent": 2}, [0.25])
    assert told["counts"]["breaks"] == {"unknown": 1} and "unknown" in told["suggestions"]


async def test_prompts_are_told_with_their_scores(place):
    run = await place.store.start_run("apo", {})
    seed = {"name": "seed", "round": 0, "texts": {"prompt": "Be brief."}, "parent": None}
    await place.store.add_resources({}, {"candidate": seed, "diff": ""}, run_id=run.run_id)
    better = seed | {"name": "a", "round": 1, "parent": "seed", "critique": HOSTILE}
    await place.store.add_resources({}, {"candidate": better, "diff": "-x\n+y"}, run_id=run.run_id)
    ended = {"number": 1, "beam": ["a"], "scores": {"a": {"mean": 0.75, "tasks": 4, "failed": 0}}}
    await place.store.add_resources({}, {"round": ended}, run_id=run.run_id)
    for name, given in (("a", 1.0), ("seed", 0.0), ("unknown", 1.0)):
        about: dict[str, Any] = {"mode": "val", "metadata": {"measure": [name, "val", 3]}}
        request = EnqueueRolloutRequest(input={}, run_id=run.run_id, **about)
        await place.store.enqueue_many_rollouts([request])
        (measured,) = await place.store.dequeue_many_rollouts(limit=1)
        await place.store.update_attempt(
            measured.rollout_id, measured.attempt.attempt_id, status="succeeded"
        )
        await give_score(place.store, measured, {"final": given}, None, "test")
    said = await place.get(f"/prompts?run_id={run.run_id}")
    candidates = [(one["name"], one["parent"], one["diff"]) for one in said["candidates"]]
    assert candidates == [("seed", None, ""), ("a", "seed", "-x\n+y")]
    assert (said["candidates"][1]["score"]["mean"], said["rounds"][0]["beam"]) == (0.75, ["a"])
    rewards = {(one["candidate"], one["task"]): one["reward"] for one in said["measured"]}
    assert rewards == {("a", 3): 1.0, ("seed", 3): 0.0}


# --- actions --------------------------------------------------------------------------------------


async def test_a_person_annotates_a_rollout_part_by_part_and_finds_it_by_its_label(place):
    one, other = await record(place.store, [1.0, 0.0])
    browser = await place.logged_in()
    await browser.post(f"/rollouts/{one.rollout_id}/annotation", {"label": "good", "note": HOSTILE})
    path = f"/rollouts/{one.rollout_id}/annotation"
    await asyncio.gather(
        *(browser.post(path, part) for part in ({"answer": "yes"}, {"note": ""}, {"label": "best"}))
    )
    changed = await place.store.get_rollout_by_id(one.rollout_id)
    assert changed.metadata["annotation"] == {"label": "best", "answer": "yes"}
    assert annotation_of(await place.store.get_rollout_by_id(one.rollout_id)).answer == "yes"
    labelled = {"where": {"op": "eq", "field": "metadata.annotation.label", "value": "best"}}
    found = await browser.post("/rollouts", labelled)
    assert [each["rollout"]["rollout_id"] for each in found["items"]] == [one.rollout_id]
    await browser.post("/rollouts/nobody/annotation", {"label": "x"}, status=404)
    issued = await place.store.issue_key(name="scores", scopes=["grader"])
    grader = await place.logged_in(issued.api_key)
    await grader.post(f"/rollouts/{other.rollout_id}/annotation", {"label": "bad"}, status=403)


async def test_a_persons_score_becomes_the_reward(place):
    one, _ = await record(place.store, [1.0, 0.0])
    browser = await place.logged_in()
    row = await browser.post(
        f"/rollouts/{one.rollout_id}/score", {"reward": 0.25, "comment": HOSTILE}
    )
    assert row["reward"] == 0.25
    low = await browser.post("/rollouts", {"where": {"op": "eq", "field": "reward", "value": 0.25}})
    assert [each["rollout"]["rollout_id"] for each in low["items"]] == [one.rollout_id]
    given = (await browser.get(f"/rollouts/{one.rollout_id}"))["rewards"][-1]
    assert (given["by"], given["comment"]) == ("the admin key", HOSTILE)
    assert given["dimensions"] == [{"name": "human", "value": 0.25}]
    row = await browser.post(f"/rollouts/{one.rollout_id}/score", {"comment": "only said"})
    assert row["reward"] == 0.25
    await browser.post(f"/rollouts/{one.rollout_id}/score", {}, status=422)
    waiting = await place.store.enqueue_rollout("task")  # never tried
    await browser.post(f"/rollouts/{waiting.rollout_id}/score", {"reward": 1.0}, status=409)


async def test_why_the_reward_moved_is_told_by_tag_and_task_by_task(place):
    """Two evaluations of two tasks: the sum is learned, half of the search forgotten."""
    run = await place.store.start_run("grpo", MANIFEST)
    question, result = [SYSTEM, says("user", "x")], tool_says("t", "sunny")
    for step, rewards in ((0, {"sum": 0.0, "search": 1.0}), (4, {"sum": 1.0, "search": 0.5})):
        for kind, value in rewards.items():
            asked = EnqueueRolloutRequest(
                input={"kind": kind}, mode="val", run_id=run.run_id, metadata={"step": step}
            )
            (rollout,) = await place.store.enqueue_many_rollouts([asked])
            attempt = (await place.store.start_attempt(rollout.rollout_id)).attempt
            spans = [call(0, question, asks_for("t") if step else says("assistant", "x"))]
            spans += (
                [call(1, [*question, asks_for("t"), result], says("assistant", "x"))]
                if step
                else []
            )
            ids = {"rollout_id": rollout.rollout_id, "attempt_id": attempt.attempt_id}
            await place.store.add_many_spans(
                [msgspec.structs.replace(one, **ids) for one in [*spans, reward(value)]]
            )
            await place.store.update_attempt(**ids, status="succeeded")
    told = await place.get(f"/runs/{run.run_id}/progress")
    assert told["steps"] == [0, 4]
    assert {row["name"]: row["means"] for row in told["rewards"]} == {
        "all tasks": [0.5, 0.75],
        "kind=search": [1.0, 0.5],
        "kind=sum": [0.0, 1.0],
    }
    assert {row["name"]: row["means"] for row in told["behaviour"]} == {
        "calls": [1, 2],
        "answer tokens": [2, 4],
        "tool search": [0, 1],
        "failed tools": [0, 0],
    }
    assert [row["rewards"] for row in told["tasks"]] == [[0.0, 1.0], [1.0, 0.5]]
    one = await place.store.get_rollout_by_id(told["tasks"][0]["rollout_ids"][1])
    assert one.metadata["step"] == 4
    (held_out,) = (await place.get(f"/rollouts/{one.rollout_id}/credit"))["members"]
    assert held_out["advantage"] is None and [call["return"] for call in held_out["calls"]] == [
        None,
        None,
    ]
    # Beside a run without held-out tasks; the newest evaluation counts.
    other = await place.store.start_run("grpo", MANIFEST)
    rows = await place.post("/tasks", {"run_ids": [other.run_id, run.run_id]})
    assert {row["task"]: row["rewards"] for row in rows} == {
        '{"kind":"search"}': [None, 0.5],
        '{"kind":"sum"}': [None, 1.0],
    }
    assert (await place.get("/runs/nobody/progress"))["steps"] == []
