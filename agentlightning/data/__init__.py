"""From spans to learning: transitions, credit and training sequences. NumPy only; no torch, no
store, no HTTP."""
