from agentlightning.runner import instrumented

instrumented.start(__file__)
