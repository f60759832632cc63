"""From logits to a token: the coupled sampler, its noise, filters, penalties, logprobs and the audit."""
