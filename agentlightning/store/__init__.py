"""The store: the only meeting point of runners, gateway and algorithm."""
