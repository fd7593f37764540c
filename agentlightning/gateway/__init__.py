"""The gateway: protocol translation, routing and exact capture of every LLM call."""
