"""The protocols agents speak: each module reads one kind of request into the chat form and writes
its answers."""
