"""Readouts that cannot run are refused where they are described."""

import pytest

from hydra_ensembles.errors import ConfigError
from hydra_ensembles.model.config import ReadoutConfig


def test_a_norm_of_pooled_features_does_not_fit_two_of_them_side_by_side() -> None:
    with pytest.raises(ConfigError, match="twice as wide as the norm"):
        ReadoutConfig(pool="cls_mean", norm="pooled")
    assert ReadoutConfig(pool="cls_mean", norm="tokens").norm == "tokens"
