"""Input and output: tasks, traces of other tools, fine-tuning files, the Hugging Face hub."""
