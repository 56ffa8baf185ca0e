"""The experiments behind docs/results.md; not part of the installed package."""
