"""Models that are asked and never trained: endpoints given by a user → entries of the gateway's table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.gateway.backends.http import HttpBackend
from agentlightning.gateway.models import ModelEntry
from agentlightning.types import FrozenModel


def read_frozen(
    models: Mapping[str, FrozenModel | Mapping[str, Any]], trained: Mapping[str, object]
) -> dict[str, FrozenModel]:
    """The models beside those `trained`. ConfigError for what is none, and for a name that is taken."""
    read: dict[str, FrozenModel] = {}
    for name, given in models.items():
        if name in trained or name == "llm":
            raise ConfigError(f"models: the name {name!r} is that of a model being trained; choose another")
        try:
            read[name] = given if isinstance(given, FrozenModel) else msgspec.convert(given, FrozenModel)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"models.{name}: {error}; give it as {{endpoint: https://…/v1, frozen: true}}, with `model` and "
                "`api_key` where the endpoint needs them. What is trained is given as `model`"
            ) from None
    return read


def frozen_entry(name: str, model: FrozenModel) -> ModelEntry:
    """The model under its name. Without a key of its own it is asked with OPENAI_API_KEY if that is for its host."""
    host = urlsplit(os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1").hostname
    key = model.api_key or (os.environ.get("OPENAI_API_KEY") if urlsplit(model.endpoint).hostname == host else None)
    # Hosted APIs refuse to be asked for token ids, and nothing here trains on their answers.
    backend = HttpBackend(model.endpoint, kind="openai", api_key=key, model=model.model)
    return ModelEntry(name, backend, trainable=False)
