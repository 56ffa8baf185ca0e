"""Inference Endpoints of the Hugging Face hub: a `handler.py` next to a saved ensemble in its repository.

Its `requirements.txt` needs one line, `hydra-ensembles[serve] @ ADDRESS`, with the address of a wheel (`make release`
builds one): no index has this library yet. `inputs` is a text, an image (bytes, base64, or decoded by the endpoint), or
a list of them, in which a list of two texts is a pair. An abstention is an answer with `accept` false and a `reason`;
`notes` say what was done with an input, for example that a text was truncated.
"""

import io
from typing import Any

import hydra_ensembles as he
from hydra_ensembles.preprocessing import to_rgb
from hydra_ensembles.serve import ServeSettings
from hydra_ensembles.serve.batcher import warm_runner
from hydra_ensembles.serve.protocol import Served, image_of, text_of


class EndpointHandler:
    """Created once by the endpoint, and called for every request."""

    def __init__(self, path: str = "") -> None:
        """Load the ensemble and warm its plans."""
        model = he.Ensemble.from_pretrained(path or ".")
        self.served, self.runner = Served(model, "model"), warm_runner(model, ServeSettings(max_batch=8))

    def __call__(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        """One answer for each input; the first that cannot be read is an error."""
        given = data["inputs"] if isinstance(data["inputs"], list) else [data["inputs"]]
        read = text_of if self.served.ensemble.kind == "text" else encoded
        rows = [self.served.reader.read(read(one)) for one in given]
        plain = []
        for row, answer in zip(rows, self.runner.answers(rows), strict=True):
            if isinstance(answer, Exception):
                raise answer
            plain.append(self.served.plain(answer, row.notes))
        return plain


def encoded(image: Any) -> bytes:
    """The bytes of an image file, in whatever form the endpoint passes it."""
    if not hasattr(image, "save"):
        return image if isinstance(image, bytes) else image_of(image)
    target = io.BytesIO()
    to_rgb(image).save(target, "PNG", exif=image.getexif())  # PNG has no CMYK, which JPEG has
    return target.getvalue()
