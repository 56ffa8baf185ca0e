"""The experiments behind the results; not part of the installed package."""
