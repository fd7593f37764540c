"""Meetings that need a room: what was asked for, the rooms there are, and which of them is
right."""

from __future__ import annotations

import random

EQUIPMENT = ("projector", "whiteboard", "video")
HOURS = range(9, 17)
ROOMS = {
    name: {"seats": seats, "equipment": sorted(equipment)}
    for name, seats, equipment in (
        ("Alder", 4, {"whiteboard"}),
        ("Birch", 6, {"video", "whiteboard"}),
        ("Cedar", 8, {"projector", "whiteboard"}),
        ("Elm", 12, {"projector", "video"}),
        ("Fir", 20, {"projector", "video", "whiteboard"}),
    )
}


def make_tasks(count: int, seed: int) -> list[dict]:
    """`{"request", "booked", "fitting", "room"}`: rooms that fit are free, large enough and have
    what is needed; the right one is the smallest of them."""
    chance = random.Random(seed)
    tasks: list[dict] = []
    while len(tasks) < count:
        people, hour = chance.randint(2, 14), chance.choice(HOURS)
        needs = sorted(chance.sample(EQUIPMENT, chance.randint(0, 2)))
        booked = {room: sorted(chance.sample(HOURS, 4)) for room in ROOMS}
        fitting = [
            room
            for room, has in ROOMS.items()
            if has["seats"] >= people
            and set(needs) <= set(has["equipment"])
            and hour not in booked[room]
        ]
        if fitting:
            wish = f"{people} people at {hour}:00" + (
                f", with {' and '.join(needs)}" if needs else ""
            )
            room = min(fitting, key=lambda name: ROOMS[name]["seats"])
            tasks.append({"request": wish, "booked": booked, "fitting": fitting, "room": room})
    return tasks
