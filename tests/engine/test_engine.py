"""The engine samples what it says, with the logprobs it says, whatever else it is doing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from agentlightning.engine.engine import Engine, Generation, GenerationRequest, SampledToken
from agentlightning.errors import BackendError, ConfigError
from tests.models import tiny_model

FAMILIES = ["llama", "qwen2", "qwen3"]
EOS = 1
VOCABULARY = 96


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_engine(model: PreTrainedModel, **changes: object) -> Engine:
    return Engine(
        model, **{"eos_token_ids": [EOS], "max_sequence_length": 128, "slots": 6, **changes}
    )


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, VOCABULARY) for _ in range(length)]


def submit(engine: Engine, request: GenerationRequest, output: list[SampledToken]) -> Generation:
    def fail(error: BackendError) -> None:
        raise error

    return engine.submit(request, output.append, fail)


def run(engine: Engine, *requests: GenerationRequest) -> list[list[SampledToken]]:
    outputs: list[list[SampledToken]] = [[] for _ in requests]
    for request, output in zip(requests, outputs, strict=True):
        submit(engine, request, output)
    while engine.step():
        pass
    return outputs


def ids(output: list[SampledToken]) -> list[int]:
    return [token.token_id for token in output]


@torch.no_grad()
def reference(
    model: PreTrainedModel, request: GenerationRequest, output: list[SampledToken]
) -> list[float]:
    """Logprobs of the sampled tokens by the model's own forward at the request's temperature."""
    sequence = [*request.prompt_token_ids, *ids(output)]
    logits = model(torch.tensor([sequence])).logits[0].float() / (request.temperature or 1.0)
    logprobs = logits.log_softmax(-1)
    start = len(request.prompt_token_ids) - 1
    return [logprobs[start + index, token.token_id].item() for index, token in enumerate(output)]


def worst_error(
    model: PreTrainedModel, request: GenerationRequest, output: list[SampledToken]
) -> float:
    expected = reference(model, request, output)
    return max(abs(token.logprob - other) for token, other in zip(output, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_logprobs_are_those_of_the_models_own_forward_in_any_batch(family: str, seed: int) -> None:
    rng = random.Random(seed)
    model = tiny_model(family, seed)
    engine = make_engine(model)
    shared = prompt(rng, 40)
    requests = [
        GenerationRequest(
            shared[: rng.randint(0, 40)] + prompt(rng, rng.randint(1, 30)),
            max_tokens=rng.randint(1, 50),
            temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
        )
        for _ in range(25)
    ]
    outputs: dict[int, list[SampledToken]] = {index: [] for index in range(len(requests))}
    for index, request in enumerate(requests):  # arriving while others run
        submit(engine, request, outputs[index])
        for _ in range(rng.randint(0, 6)):
            engine.step()
    while engine.step():
        pass
    for index, request in enumerate(requests):
        assert worst_error(model, request, outputs[index]) < 1e-4
        assert outputs[index][-1].finish_reason == (
            "stop" if outputs[index][-1].token_id == EOS else "length"
        )
        assert all(token.finish_reason is None for token in outputs[index][:-1])
    assert engine.statistics.reused_tokens > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"attention_bias": True, "mlp_bias": True},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=["untied", "no grouping", "one key head", "biases", "llama3 rope", "yarn rope"],
)
def test_variants_of_the_architecture_are_exact(changes: dict[str, object]) -> None:
    model = tiny_model("llama", **changes)
    rng = random.Random(0)
    requests = [GenerationRequest(prompt(rng, rng.randint(1, 60)), max_tokens=30) for _ in range(8)]
    for request, output in zip(requests, run(make_engine(model), *requests), strict=True):
        assert worst_error(model, request, output) < 1e-4


def test_projections_of_large_models_are_read_in_place_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("qwen2")
    request = GenerationRequest([5, 6, 7], max_tokens=20, seed=3)
    [joined] = run(make_engine(model), request)
    monkeypatch.setattr("agentlightning.engine.forward.LARGEST_JOINED", 0)
    [separate] = run(make_engine(model), request)
    assert ids(joined) == ids(separate)
    assert worst_error(model, request, separate) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_continues_in_its_slot(family: str) -> None:
    model = tiny_model(family)
    engine = make_engine(model)
    rng = random.Random(1)
    history = prompt(rng, 20)
    for _ in range(4):
        computed = engine.statistics.prompt_tokens
        request = GenerationRequest(history, max_tokens=8)
        [output] = run(engine, request)
        assert worst_error(model, request, output) < 1e-4
        if len(history) > 20:
            # All but the last sampled token of the previous turn lies in the cache.
            assert engine.statistics.prompt_tokens - computed == 5 + 1
        history = history + ids(output) + prompt(rng, 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_computes_its_prompt_once(family: str) -> None:
    model = tiny_model(family)
    engine = make_engine(model, slots=8)
    request = GenerationRequest(prompt(random.Random(2), 50), max_tokens=12)
    outputs = run(engine, *[request] * 8)
    assert engine.statistics.prompt_tokens == 50 + 7
    assert len({tuple(ids(output)) for output in outputs}) > 1
    for output in outputs:
        assert worst_error(model, request, output) < 1e-4


def test_prompts_longer_than_a_step_computes_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.engine.engine.PREFILL_TOKENS", 7)
    model = tiny_model()
    rng = random.Random(3)
    shared = prompt(rng, 40)
    requests = [
        GenerationRequest(shared[: rng.randint(5, 40)] + prompt(rng, 20), max_tokens=20)
        for _ in range(12)
    ]
    for request, output in zip(requests, run(make_engine(model), *requests), strict=True):
        assert worst_error(model, request, output) < 1e-4


@torch.no_grad()
def disturb(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_weight_update_running_sequences_go_on_with_the_new_weights(family: str) -> None:
    model = tiny_model(family)
    old = tiny_model(family)
    engine = make_engine(model, eos_token_ids=[])
    rng = random.Random(4)
    shared = prompt(rng, 20)
    requests = [
        GenerationRequest(shared + prompt(rng, rng.randint(1, 20)), max_tokens=30) for _ in range(8)
    ]
    outputs: list[list[SampledToken]] = [[] for _ in requests]
    for request, output in zip(requests, outputs, strict=True):
        submit(engine, request, output)
    for _ in range(10):
        engine.step()
    disturb(model, 0)
    engine.update_weights(7)
    while engine.step():
        pass
    for request, output in zip(requests, outputs, strict=True):
        before, after = reference(old, request, output), reference(model, request, output)
        for token, first, second in zip(output, before, after, strict=True):
            assert abs(token.logprob - (second if token.version == 7 else first)) < 1e-4
        assert [token.version for token in output] == sorted(token.version for token in output)
    assert {token.version for output in outputs for token in output} == {0, 7}
    assert all(token.version == 7 for output in outputs[6:] for token in output)


def test_bfloat16_stays_within_its_measured_tolerance() -> None:
    # Both sides round to 8 bits in every layer: the engine may be no further from the truth than
    # the model itself.
    ours: list[float] = []
    theirs: list[float] = []
    apart: list[float] = []
    for family in FAMILIES:
        model, exact = (
            tiny_model(family).to(torch.bfloat16),
            tiny_model(family).to(torch.bfloat16).float(),
        )
        rng = random.Random(6)
        requests = [
            GenerationRequest(prompt(rng, rng.randint(1, 60)), max_tokens=30) for _ in range(8)
        ]
        for request, output in zip(requests, run(make_engine(model), *requests), strict=True):
            rounded, truth = reference(model, request, output), reference(exact, request, output)
            ours += [abs(token.logprob - other) for token, other in zip(output, truth, strict=True)]
            theirs += [abs(one - other) for one, other in zip(rounded, truth, strict=True)]
            apart += [
                abs(token.logprob - other) for token, other in zip(output, rounded, strict=True)
            ]
    assert sum(ours) < 1.25 * sum(theirs)
    assert sum(apart) / len(apart) < 0.05
    assert max(apart) < 0.5


def windowed_model() -> PreTrainedModel:
    return tiny_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)


def other_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return GemmaForCausalLM(
        GemmaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=EOS,
            initializer_range=0.2,
        )
    ).eval()


@pytest.mark.parametrize("make_model", [windowed_model, other_model])
def test_other_architectures_run_through_their_own_forward(
    make_model: Callable[[], PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    engine = make_engine(model, slots=3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    rng = random.Random(7)
    requests = [GenerationRequest(prompt(rng, rng.randint(1, 30)), max_tokens=12) for _ in range(6)]
    outputs = run(engine, *requests)
    following = GenerationRequest(
        [*requests[0].prompt_token_ids, *ids(outputs[0]), 5, 6], max_tokens=12
    )
    requests.append(following)
    outputs += run(engine, following)
    for request, output in zip(requests, outputs, strict=True):
        assert worst_error(model, request, output) < 1e-4
    disturb(model, 2)
    engine.update_weights(1)
    [output] = run(engine, following)
    assert worst_error(model, following, output) < 1e-4


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="no attention heads"):
        make_engine(
            MambaForCausalLM(
                MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1)
            )
        )


def test_an_adapter_on_a_projection_sends_the_model_to_its_own_forward() -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) * 1.5

    model = tiny_model()
    attention = model.get_submodule("model.layers.0.self_attn")
    plain = attention.q_proj
    attention.q_proj = Adapted(plain.in_features, plain.out_features, bias=False)
    request = GenerationRequest([5, 6, 7], max_tokens=10)
    [output] = run(make_engine(model), request)
    assert worst_error(model, request, output) < 1e-4


def test_tokens_end_with_the_end_of_sequence_or_a_stop_id() -> None:
    engine = make_engine(tiny_model())
    request = GenerationRequest([5, 6, 7], max_tokens=100, seed=1)
    [free] = run(engine, request)
    stop = ids(free)[2]
    assert stop not in ids(free)[:2]
    [stopped] = run(
        engine,
        GenerationRequest([5, 6, 7], max_tokens=100, seed=1, stop_token_ids=frozenset({stop})),
    )
    assert ids(stopped) == ids(free)[:3]
    assert stopped[-1].finish_reason == "stop"


def test_a_seed_fixes_the_tokens_whatever_else_is_in_the_batch() -> None:
    model = tiny_model()
    request = GenerationRequest([5, 6, 7], max_tokens=40, seed=11)
    rng = random.Random(8)
    [alone] = run(make_engine(model), request)
    others = [GenerationRequest(prompt(rng, rng.randint(1, 30)), max_tokens=40) for _ in range(9)]
    engine = make_engine(model, seed=5)
    together = run(engine, *others[:4], request, *others[4:])[4]
    assert ids(together) == ids(alone)
    [again] = run(engine, request)
    assert ids(again) == ids(alone)


def test_a_cancelled_request_says_no_more_and_gives_its_slot_back() -> None:
    engine = make_engine(tiny_model(), eos_token_ids=[], slots=2)
    outputs: list[list[SampledToken]] = [[], [], []]
    generations: list[Generation] = [
        submit(engine, GenerationRequest([5, 6, index + 2], max_tokens=50), output)
        for index, output in enumerate(outputs)
    ]
    engine.step()
    lengths = [len(output) for output in outputs]
    engine.cancel(generations[0])
    engine.cancel(generations[2])
    assert (engine.running, engine.waiting) == (1, 0)
    while engine.step():
        pass
    assert [len(outputs[0]), len(outputs[2])] == [lengths[0], 0]
    assert len(outputs[1]) == 50
    engine.cancel(generations[1])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [3, VOCABULARY]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [3] * 128, "max_tokens": 1}, "holds sequences of 128 tokens"),
        ({"stop_token_ids": frozenset({VOCABULARY})}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_a_malformed_request_is_refused_by_the_name_of_the_field(
    changes: dict[str, object], name: str
) -> None:
    engine = make_engine(tiny_model())
    fields: dict[str, object] = {"prompt_token_ids": [3], **changes}
    with pytest.raises(BackendError, match=name) as raised:
        submit(engine, GenerationRequest(**fields), [])
    assert raised.value.status == 400
    assert (engine.running, engine.waiting) == (0, 0)


@pytest.mark.parametrize(
    "changes", [{"slots": 0}, {"max_sequence_length": 1}, {"max_sequence_length": 257}]
)
def test_impossible_sizes_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        make_engine(tiny_model(), **changes)


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on_with_good_weights() -> None:
    model = tiny_model()
    engine = make_engine(model)
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    errors: list[BackendError] = []
    tokens: list[SampledToken] = []
    request = GenerationRequest([5, 6, 7], max_tokens=20, seed=1)
    engine.submit(request, tokens.append, errors.append)
    engine.step()
    with torch.no_grad():
        for name in ("model.norm", "model.layers.0.input_layernorm"):
            model.get_submodule(name).weight.fill_(float("nan"))  # type: ignore[union-attr]
    engine.update_weights(1)
    assert engine.step() is False
    assert [(error.status, error.code) for error in errors] == [(500, "engine_error")]
    engine.submit(GenerationRequest(prompt(random.Random(1), 60)), tokens.append, errors.append)
    engine.step()
    assert engine.running == 0 and ["not finite" in str(error) for error in errors] == [True, True]
    model.load_state_dict(good)
    engine.update_weights(2)
    requests = [request, GenerationRequest(prompt(random.Random(2), 30), max_tokens=5)]
    for request, output in zip(requests, run(engine, *requests), strict=True):
        assert worst_error(model, request, output) < 1e-4


def test_engine_steps_leave_no_trace_in_the_models_autograd() -> None:
    model = tiny_model()
    run(make_engine(model), GenerationRequest([5, 6, 7], max_tokens=3))
    loss = model(torch.tensor([[5, 6, 7]])).logits.sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deterministic_engine_samples_the_same_bits_whatever_else_it_is_doing(
    family: str,
) -> None:
    rng = random.Random(7)
    model = tiny_model(family)
    wanted = GenerationRequest(prompt(rng, 40), max_tokens=12, seed=5)

    def sampled(engine: Engine) -> list[SampledToken]:
        others = [
            GenerationRequest(prompt(rng, rng.randrange(1, 90)), max_tokens=9)
            for _ in range(rng.randrange(9))
        ]
        # shares a prefix
        others += [GenerationRequest([*wanted.prompt_token_ids[:30], 9], max_tokens=3)]
        place = rng.randrange(len(others) + 1)
        return run(engine, *others[:place], wanted, *others[place:])[place]

    alone = run(make_engine(model, deterministic=True), wanted)[0]
    busy = make_engine(model, deterministic=True)
    assert all(sampled(busy) == alone for _ in range(5))
