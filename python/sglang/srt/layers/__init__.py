"""Parts of models: linears, norms, attention and its back ends, the sampler."""
