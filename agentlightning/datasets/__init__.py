"""What comes in and goes out: tasks to train on, other tools' traces, fine-tuning files, the Hugging Face hub."""
