"""The draft algorithms: what proposes the tokens that the target verifies."""
