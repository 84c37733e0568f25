"""For those who come from Hugging Face: a Trainer that takes `TrainingArguments`."""

from meshwright.hf.trainer import Trainer
