"""The parts of the chaos run: traffic whose every token is known, a proxy that loses things, a fault injector."""
