"""Operations on plain tensors and numbers: each with a readable torch reference beside its fast versions."""
