"""The parts of the tokenizer manager, in the order in which a request meets them."""
