"""The parts of the tokenizer manager: prepare a request, follow it, build its answer."""
