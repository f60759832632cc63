"""What benchmarks and tests share; not shipped."""
