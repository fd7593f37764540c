"""Records what happens inside a rollout beyond its LLM calls: rewards, messages, operations,
exceptions, as spans.

This room knows which attempt the current code belongs to (contextvars) and how a reward is written
and read. It does not know stores, HTTP or agents: spans are recorded in memory, and whoever bound
the attempt takes them away."""
