"""The numbers a training run is made with. Imports no MLX, so that the command line can show them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one training is told; a head's `head.json` holds the one it was made with."""

    epochs: float = 4.0
    positions: int = 4096
    """Pairs in a batch, padding included."""
    draft_vocabulary: int = 8192
    max_depth: int = 2
    matrix_rate: float = 0.02
    gain_rate: float = 1e-3
    decay: float = 0.1
    average: float = 0.998
    """Share of the averaged weights kept at each step."""
    noise: float = 0.1
    """Half width of the uniform noise on the trunk's states, in their standard deviations."""
    state_weight: float = 1.0
    """Weight of the state loss; it is dropped for the last third."""
    scored_share: float = 0.5
    """Share of a batch's pairs, drawn anew each step, whose drafts are scored over the draft vocabulary. The state loss
    looks at all of them, at a fraction of the price."""
    sharpness: float = 0.2
    """Share of the trunk's mass moved onto its likeliest token."""
    prompt_weight: float = 0.1
    """Weight of pairs within prompts; those within answers weigh 1."""
    warm_up: float = 0.03
    """Share of the run over which the rates rise; from there they fall in a line."""
    unrolled_from: float = 2 / 3
    """Share of the run from which depth 2 and more are trained too."""
    validate_every: int = 50
    validation_sequences: int = 120
    """Held-out sequences of each temperature that validation looks at."""
    seed: int = 0

    def rate_at(self, done: float) -> float:
        """Factor on the rates when the share `done` of the run is behind."""
        if done < self.warm_up:
            return max(done, 1e-3) / self.warm_up
        return max(0.02, (1 - done) / (1 - self.warm_up))
