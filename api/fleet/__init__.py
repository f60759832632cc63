"""What the API knows of the daemons behind Redis: models, health, metrics."""
