"""The zero-shot study: a dual encoder, its circuits of both towers, and the sets it is asked about."""
