"""How linear layers store and multiply their weights: one method a kind of storage."""
