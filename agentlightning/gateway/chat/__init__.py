"""Chat for token-in, token-out backends: templates, tool calls and incremental text, one component
for all of them."""
