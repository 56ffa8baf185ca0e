"""The contender LitServe of `serve.py`, as its documentation shows it, with dynamic batching: FOLDER PORT.

A module of its own, as LitServe's worker process imports it.
"""

import sys
from typing import Any

import litserve  # type: ignore[import-not-found]
from serve import BATCH, WAIT_MS, Answers


class Api(litserve.LitAPI):  # type: ignore[misc]
    """Decoding, batches and answers in the worker process."""

    def setup(self, device: str) -> None:
        """Load the model."""
        self.answers = Answers(sys.argv[1])

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # a type here would be that of the body
        """One row."""
        return self.answers.read(request)

    def predict(self, batch: Any) -> Any:
        """The answers of a batch."""
        return self.answers(batch)


if __name__ == "__main__":
    api = Api(max_batch_size=BATCH, batch_timeout=WAIT_MS / 1e3, api_path="/v1/predict")
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", generate_client_file=False)
