"""The parts of a prompt search: candidates, their rollouts, the model that edits, and a budget.

A search is walked again from its beginning after it was interrupted. Rollouts are found by
candidate and task, calls of the editing model by their number and text, so the walk pays for
nothing twice and comes to the same place."""
