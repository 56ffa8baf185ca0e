"""One of several processes that evaluate together; see test_evaluate_parallel."""

import sys
from pathlib import Path

import torch.distributed as dist
from tiny_models import image_batches, tiny_ensemble

from hydra_ensembles.evaluation.evaluate import evaluate

SETS = {"near": {"close": image_batches((5, 6), seed=5)}, "far": {"one": image_batches((7,), seed=6)}}


def run(fail_on: int = -1):
    model = tiny_ensemble()

    def answer(inputs):
        if dist.is_initialized() and dist.get_rank() == fail_on:
            raise RuntimeError("out of memory")
        return model(inputs)

    return evaluate(
        answer if fail_on >= 0 else model, image_batches(), SETS, progress=False, gallery=4, keep_logits=True
    )


if __name__ == "__main__":
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    run().save(folder / f"{rank}.json")
    try:
        run(fail_on=1)
    except Exception as error:
        (folder / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
